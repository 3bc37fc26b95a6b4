"""Choose tokens on the host, by the rule of `choose_tokens`, where no kernel can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..api.request import Request
from ..tree import Trees
from .kernels.choice_kernels import ChoiceRules
from .kernels.choose_tokens import choose_token, find_fault


@dataclass(frozen=True)
class HostChoice:
    """Chooses tokens for the requests of one call, on the host and only at the nodes that a walk visits.

    For logits processors that no kernel knows, and for CPUs, where choosing at every node would take longer than the
    draft. The rule is that of `choose_tokens`. ``running``: the request in each slot, whose tokens must be known up to
    the root of its tree. ``rules``, ``numbers``: as in `CallRules`.
    """

    running: Mapping[int, Request]
    rules: ChoiceRules
    numbers: Tensor

    def choose(self, logits: Tensor, trees: Trees, out: Tensor) -> None:
        """Choose a token at every node that the walk from the root visits: int32 [places, nodes], else -1.

        ``logits`` [places * nodes, vocab] of any float type. Waits for the device.
        """
        places, nodes = out.shape
        slots = trees.active_slots[: min(places, int(trees.active_count))].tolist()
        tokens, parents = trees.draft_tokens.tolist(), trees.parents.tolist()
        choices = torch.full((places, nodes), -1, dtype=torch.int32)
        for place, slot in enumerate(slots):
            state, walked, node = self.running[slot], list[int](), 0
            while node >= 0:
                token = self._choose_one(logits[place * nodes + node], state, walked)
                choices[place, node] = token
                walked.append(token)
                children = (n for n in range(nodes) if parents[slot][n] == node and tokens[slot][n] == token)
                node = next(children, -1)
        out.copy_(choices)

    def _choose_one(self, logits: Tensor, state: Request, walked: list[int]) -> int:
        """Choose after the request's tokens and those that this walk has chosen."""
        scores = logits.float()
        if state.process is not None:
            past = [*state.prompt_ids, *state.token_ids, *walked]
            scores = state.process(torch.tensor([past], device=logits.device), scores.clone()[None])[0]
        if fault := find_fault(scores):
            return fault
        number, keys = len(state.token_ids) + len(walked), state.keys
        key = int(keys[number]) if keys is not None and number < len(keys) else 0
        return choose_token(scores.cpu() if self.rules.sampled else scores, self.rules, self.numbers, key)
