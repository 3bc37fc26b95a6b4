"""The rules by which requests choose their tokens, read from their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api.request import Request
from ..settings import SamplingConfig
from .kernels.choice_kernels import COLDEST, ChoiceRules
from .kernels.choose_tokens import token_bits

_BY_KERNELS = {"repetition_penalty", "min_new_tokens", "suppress_tokens"}
"""Options whose processors the kernels know."""


@dataclass(frozen=True)
class CallRules:
    """Rules by which the requests of a call choose tokens.

    On the device the kernels do all of it. On the host, ``host_reason`` saying why, ``Request.process`` applies the
    processors, and ``rules`` are without their stages.
    """

    rules: ChoiceRules
    numbers: Tensor
    """float32 [6] on the CPU, as a slot's in `ChoiceState`."""
    suppressed: Tensor | None = None
    """Bits of suppressed ids, if there are any."""
    host_reason: str | None = None

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        sampling: SamplingConfig,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
    ) -> CallRules:
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
            0 if sampling.is_greedy else max(sampling.temperature, COLDEST.value),
            sampling.top_k or vocab_size,
            sampling.top_p,
            sampling.min_p,
            options.get("repetition_penalty", 1),
            options.get("min_new_tokens", 0),
        )
        bits = token_bits(torch.tensor(sorted(barred), dtype=torch.int64), vocab_size) if rules.has_suppressed else None
        return cls(rules, torch.tensor(numbers, dtype=torch.float32), bits, reason)
