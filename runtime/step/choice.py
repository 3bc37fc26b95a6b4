"""How a call chooses its tokens: the stages and their numbers, and the choice on the host where no kernel makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api.request import Request, RunningRequest
from ..settings import SamplingConfig
from ..tree import Trees
from .kernels.choice_kernels import COLDEST, ChoiceRules
from .kernels.choose_tokens import choose_token, find_fault, token_bits

_BY_KERNELS = {"repetition_penalty", "min_new_tokens", "suppress_tokens"}
"""Options whose processors the kernels know."""


@dataclass(frozen=True)
class CallRules:
    """How a call chooses tokens.

    On the device the kernels do all of it. On the host, ``host_reason`` saying why, ``Request.process`` applies the
    processors, and ``rules`` are without their stages.
    """

    rules: ChoiceRules
    numbers: Tensor
    """float32 [6] on the CPU, as in `ChoiceState`."""
    suppressed: Tensor | None = None
    """Bits of suppressed ids, if there are any."""
    host_reason: str | None = None

    @classmethod
    def of(
        cls, options: Mapping[str, Any], sampling: SamplingConfig, requests: Sequence[Request], vocab_size: int,
        device: torch.device,
    ) -> CallRules:  # fmt: skip
        """Read the rules of a call from joined options; all requests of a call have the same processors."""
        names = {name for request in requests if request.process is not None for name in request.process.names}
        # A bad word of one token is a suppressed one, unless it ends the answer, which transformers lets it.
        words = [list(word) for word in options.get("bad_words_ids", ())] if "bad_words_ids" in names else []
        if all(len(word) == 1 for word in words):
            names = {"suppress_tokens" if name == "bad_words_ids" else name for name in names}
        ends = {token for request in requests for token in request.eos_ids}
        barred = {*options.get("suppress_tokens", ()), *(word[0] for word in words if word[0] not in ends)}
        reason = f"the model is on {device}" if device.type != "cuda" else None
        if reason is None and not names <= _BY_KERNELS:
            reason = f"{min(names - _BY_KERNELS)} is applied on the host"
        known = names if reason is None else set()
        sampled = not sampling.is_greedy
        rules = ChoiceRules(
            sampled=sampled,
            has_top_k=sampled and sampling.top_k > 0,
            has_top_p=sampled and sampling.top_p < 1,
            has_min_p=sampled and sampling.min_p > 0,
            has_penalty="repetition_penalty" in known,
            has_suppressed="suppress_tokens" in known,
            has_minimum="min_new_tokens" in known,
        )
        numbers = (
            max(sampling.temperature, COLDEST.value), sampling.top_k, sampling.top_p, sampling.min_p,
            options.get("repetition_penalty", 1), options.get("min_new_tokens", 0),
        )  # fmt: skip
        bits = token_bits(torch.tensor(sorted(barred), dtype=torch.int64), vocab_size) if rules.has_suppressed else None
        return cls(rules, torch.tensor(numbers, dtype=torch.float32), bits, reason)


@dataclass(frozen=True)
class HostChoice:
    """Chooses tokens for the requests of one call, on the host and only at the nodes that a walk visits.

    For logits processors that no kernel knows, and for CPUs, where choosing at every node would take longer than the
    draft. The rule is that of `choose_tokens`. ``running``: the request in each slot, whose tokens must be known up to
    the root of its tree. ``rules``, ``numbers``: as in `CallRules`.
    """

    running: Mapping[int, RunningRequest]
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

    def _choose_one(self, logits: Tensor, state: RunningRequest, walked: list[int]) -> int:
        """Choose after the request's tokens and those that this walk has chosen."""
        scores = logits.float()
        if state.request.process is not None:
            past = [*state.request.prompt_ids, *state.token_ids, *walked]
            scores = state.request.process(torch.tensor([past], device=logits.device), scores.clone()[None])[0]
        if fault := find_fault(scores):
            return fault
        if not self.rules.sampled:
            # The lowest id among equals, whatever the device.
            return int((scores == scores.max()).int().argmax())
        assert state.keys is not None
        number = len(state.token_ids) + len(walked)
        key = int(state.keys[number]) if number < len(state.keys) else 0
        return choose_token(scores.cpu(), self.rules, self.numbers, key)
