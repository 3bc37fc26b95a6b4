"""Quantisation that a configuration speaks of, wherever it does; trainers leave descriptions of none behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Words for no method: ModelOpt's, TensorRT-LLM's and transformers'.
_NO_METHODS = ("none", "null", "", "no_quant", "float16", "bfloat16", "float32", "fp16", "bf16")


def quantisation(config: Any) -> str | None:
    """Read the method by which a `quantization_config` quantises weights; None for one that quantises none.

    Such are: no method, no group with weights, 16 bits, or all modules left out.
    """
    if not isinstance(config, Mapping):
        return None
    if isinstance(config.get("quantization"), Mapping):
        return quantisation(config["quantization"])
    method = next((config[key] for key in ("quant_algo", "quant_method") if config.get(key)), None)
    groups, ignored = config.get("config_groups"), config.get("ignore")
    says_nothing = (
        str(method).lower() in _NO_METHODS,
        "quant_algo" in config and str(config["quant_algo"]).lower() in _NO_METHODS,
        isinstance(groups, Mapping)
        and not any(isinstance(group, Mapping) and group.get("weights") for group in groups.values()),
        any(config.get(key) in (16, 32) for key in ("bits", "w_bit")),
        method == "bitsandbytes" and not (config.get("load_in_8bit") or config.get("load_in_4bit")),
        isinstance(ignored, list) and any(pattern in ("*", ".*", "re:.*") for pattern in ignored),
    )
    return None if any(says_nothing) else str(method)
