"""Choose a decoder's tokens: by the kernels of `choose_tokens`, or by its rule on the host, where no kernel can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..api.request import Request
from ..ops import Ops
from ..tree import Trees
from .kernels.choice_kernels import ChoiceRules, ChoiceScratch, ChoiceState
from .kernels.choose_tokens import choice_scratch, choose_token, choose_tokens, find_fault, mark_seen
from .kernels.slot_state import RECORD_HEAD, SlotState


@dataclass(frozen=True)
class HostChoice:
    """Chooses tokens on the host and only at the nodes that a walk visits.

    For logits processors that no kernel knows, and for CPUs, where choosing at every node would take longer than the
    draft. The rule is that of `choose_tokens`. ``running``: the request in each slot, whose tokens must be known up to
    the root of its tree; ``rules``: of each slot, with the numbers, as in `CallRules`.
    """

    running: Mapping[int, Request]
    rules: Mapping[int, tuple[ChoiceRules, Tensor]]

    def choose(self, logits: Tensor, trees: Trees, out: Tensor) -> None:
        """Choose a token at every node that the walk from the root visits: int32 [batch, nodes], else -1.

        ``logits`` [batch * nodes, vocab] of any float type. Waits for the device.
        """
        batch, nodes = out.shape
        slots = trees.active_slots[: min(batch, int(trees.active_count))].tolist()
        tokens, parents = trees.draft_tokens.tolist(), trees.parents.tolist()
        choices = torch.full((batch, nodes), -1, dtype=torch.int32)
        for place, slot in enumerate(slots):
            walked, node = list[int](), 0
            while node >= 0:
                token = self._choose_one(logits[place * nodes + node], slot, walked)
                choices[place, node] = token
                walked.append(token)
                children = (n for n in range(nodes) if parents[slot][n] == node and tokens[slot][n] == token)
                node = next(children, -1)
        out.copy_(choices)

    def _choose_one(self, logits: Tensor, slot: int, walked: list[int]) -> int:
        """Choose after the request's tokens and those that this walk has chosen."""
        state, (rules, numbers), scores = self.running[slot], self.rules[slot], logits.float()
        if state.process is not None:
            past = [*state.prompt_ids, *state.token_ids, *walked]
            scores = state.process(torch.tensor([past], device=logits.device), scores.clone()[None])[0]
        if fault := find_fault(scores):
            return fault
        number, keys = len(state.token_ids) + len(walked), state.keys
        key = int(keys[number]) if keys is not None and number < len(keys) else 0
        return choose_token(scores.cpu() if rules.sampled else scores, rules, numbers, key)


class TokenChoice:
    """Chooses the target's next tokens in a decoder; ``nodes``: the most of a tree."""

    def __init__(self, ops: Ops, state: ChoiceState, vocab_size: int, nodes: int) -> None:
        self._ops, self._state, self._vocab_size, self._nodes = ops, state, vocab_size, nodes

    @cached_property
    def _scratch(self) -> ChoiceScratch:
        slots = self._state.num_generated
        return choice_scratch(len(slots), self._nodes, self._vocab_size, slots.device)

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:
        """Write the target's next token after every node into ``choices`` int32 [batch, nodes].

        ``logits`` [batch * nodes, vocab], of the trees' nodes in order; ``host`` chooses in the place of the kernels.
        """
        if host is not None:
            host.choose(logits, trees, choices)
        else:
            scratch = self._scratch.first(choices.numel())
            self._ops(choose_tokens)(logits, trees, rules, self._state, choices, scratch)

    def mark_accepted(self, state: SlotState, rules: ChoiceRules) -> None:
        """Mark the tokens that ``state`` has accepted as seen, for penalties."""
        if rules.has_penalty:
            tokens = state.record[:, RECORD_HEAD : RECORD_HEAD + state.path.shape[1]]
            self._ops(mark_seen)(tokens, state.active_slots, state.active_count, self._state.seen)
