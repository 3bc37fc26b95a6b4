"""How a call chooses its tokens: the stages and their numbers, and where they run."""

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

_BY_KERNELS = ("repetition_penalty", "min_new_tokens", "suppress_tokens")
"""Options whose processors the kernels know."""


@dataclass(frozen=True)
class CallRules:
    """How a call chooses tokens.

    On the device the kernels do all of it. On the host, ``host_reason`` saying why, ``Request.process`` applies the
    processors, and `rules` are without their stages.
    """

    rules: ChoiceRules
    numbers: tuple[float, ...]
    """As in `ChoiceState`."""
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
        foreign = sorted(names - set(_BY_KERNELS))
        reason = None
        if device.type != "cuda":
            reason = f"the model is on {device}"
        elif foreign:
            reason = f"{foreign[0]} is applied on the host"
        known = names if reason is None else set()
        rules = ChoiceRules(
            sampled=not sampling.is_greedy,
            has_top_k=not sampling.is_greedy and sampling.top_k > 0,
            has_top_p=not sampling.is_greedy and sampling.top_p < 1,
            has_min_p=not sampling.is_greedy and sampling.min_p > 0,
            has_penalty="repetition_penalty" in known,
            has_suppressed="suppress_tokens" in known,
            has_minimum="min_new_tokens" in known,
        )
        numbers = (
            max(float(sampling.temperature), COLDEST.value), float(sampling.top_k), float(sampling.top_p),
            float(sampling.min_p), float(options.get("repetition_penalty", 1)),
            float(options.get("min_new_tokens", 0)),
        )  # fmt: skip
        suppressed = None
        if rules.has_suppressed:
            suppressed = token_bits(torch.tensor(sorted(barred), dtype=torch.int64), vocab_size)
        return cls(rules, numbers, suppressed, reason)
