"""Sliding window of a head's layer: `layer_types` and its neighbours in, keys of vLLM and transformers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MismatchError

_SLIDING = "sliding_attention"


def settle_window(config: dict[str, Any], where: str) -> None:
    """State whether the head's one layer has a sliding window, in the keys that vLLM and transformers read.

    `layer_types` decides, its first entry where it was copied from a target of many layers. Without it transformers
    gives Qwen a window from layer `max_window_layers` on; `sliding_window` alone gives no draft layer one anywhere.
    Raises MismatchError for keys of a wrong type, or that contradict each other.
    """
    types, window = config.get("layer_types"), config.get("sliding_window")
    if not isinstance(types, list | None):
        raise MismatchError.of_key(where, "layer_types", "a list or null", types)
    if types is not None and types[:1] != [_SLIDING]:
        # What every engine computes for any other; transformers refuses a list that is longer than the layers, and vLLM
        # looks up an EAGLE-1/2 layer after the target's, where it has no entry.
        del config["layer_types"]
        if types:
            return
    if not types and not (config.get("use_sliding_window") and window and config.get("max_window_layers") == 0):
        return
    for key, value, is_right, expected in (
        ("sliding_window", window, type(window) is int and window > 0, "a positive number of tokens"),
        ("use_sliding_window", False, config.get("use_sliding_window") is not False, "true"),
    ):
        if not is_right:
            raise MismatchError.of_key(where, key, f"{expected}, as layer_types says {_SLIDING}", value)
    config |= {"layer_types": [_SLIDING], "use_sliding_window": True}


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Read the sliding window of a normalised configuration, in tokens, the query's own included; None without one.

    As in transformers, vLLM and speculators, a key is seen if query position - key position < window.
    """
    types = config.get("layer_types")
    return config["sliding_window"] if isinstance(types, list) and types[:1] == [_SLIDING] else None
