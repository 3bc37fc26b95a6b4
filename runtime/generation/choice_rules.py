"""Which of a call's rules for the next token run on the device, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from ..config import SamplingConfig
from ..kernels.choose_tokens import ChoiceRules, token_bits
from ..kernels.prompt_chunks import MAX_EOS
from .requests import Request

# The largest logit has all the probability long before this; colder, its quotient would overflow float32.
_COLDEST = 1e-30
_ON_THE_DEVICE = {
    hf.RepetitionPenaltyLogitsProcessor: "repetition_penalty",
    hf.MinNewTokensLengthLogitsProcessor: "min_new_tokens",
    hf.SuppressTokensLogitsProcessor: "suppress_tokens",
}


@dataclass(frozen=True)
class DeviceRules:
    """Stages, their ``numbers`` as in `ChoiceState`, and the bits of suppressed ids, if there are any."""

    rules: ChoiceRules
    numbers: tuple[float, ...]
    suppressed: Tensor | None


def device_rules(
    options: Mapping[str, Any], sampling: SamplingConfig, requests: Sequence[Request], vocab_size: int
) -> DeviceRules | str:
    """Say how the device chooses tokens in this call, or why it cannot and the call runs in pieces."""
    names = set()
    for request in requests:
        processors: Any = request.process or ()
        for processor in processors:
            if type(processor) not in _ON_THE_DEVICE:
                return f"{type(processor).__name__} runs on the host"
            names.add(_ON_THE_DEVICE[type(processor)])
        if len(request.eos_ids) > MAX_EOS:
            return f"there are more than {MAX_EOS} end-of-sequence ids"
    if sampling.typical_p < 1:
        return "typical_p runs on the host"
    rules = ChoiceRules(
        sampled=not sampling.is_greedy,
        has_top_k=not sampling.is_greedy and sampling.top_k > 0,
        has_top_p=not sampling.is_greedy and sampling.top_p < 1,
        has_min_p=not sampling.is_greedy and sampling.min_p > 0,
        has_penalty="repetition_penalty" in names,
        has_suppressed="suppress_tokens" in names,
        has_minimum="min_new_tokens" in names,
    )
    numbers = (
        max(float(sampling.temperature), _COLDEST), float(sampling.top_k), float(sampling.top_p), float(sampling.min_p),
        float(options.get("repetition_penalty", 1)), float(options.get("min_new_tokens", 0)), 0.0, 0.0,
    )  # fmt: skip
    suppressed = None
    if rules.has_suppressed:
        suppressed = token_bits(torch.tensor(list(options["suppress_tokens"])), vocab_size)
    return DeviceRules(rules, numbers, suppressed)
