"""What llama.cpp's architectures `eagle3` and `dflash` call a head's tensors, and the keys that tell them of it.

Source: `src/models/eagle3.cpp`, `src/models/dflash.cpp` and `common/speculative.cpp` in llama.cpp b11434, and its
converter, `conversion/llama.py` and `conversion/qwen.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import MismatchError
from ..head import names
from ..head.dflash import rope_config, whole_config
from ..head.draft_head import DraftHead
from ..sources.builtin import LAYER_TENSORS

_LAYER = {f"{name}.weight": f"{stored}.weight" for stored, name in LAYER_TENSORS.items()}
_COMMON = {
    names.FC: "fc.weight",
    "norm.weight": "output_norm.weight",
    names.LM_HEAD: "output.weight",
    names.EMBEDDING: "token_embd.weight",
}
_EAGLE3 = {
    **_COMMON,
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"midlayer.{name}": f"blk.0.{stored}" for name, stored in _LAYER.items()},
}
_DFLASH = {
    **_COMMON,
    "hidden_norm.weight": "enc.output_norm.weight",
    names.MARKOV_IN: "markov_w1.weight",
    names.MARKOV_OUT: "markov_w2.weight",
    names.CONFIDENCE: "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
_DFLASH_LAYER = {**_LAYER, **{f"self_attn.{each}_norm.weight": f"attn_{each}_norm.weight" for each in "qk"}}


@dataclass(frozen=True)
class GgufLayout:
    """How a GGUF file tells llama.cpp of a head.

    Attributes:
        architecture: llama.cpp's name for it.
        names: of the head's tensors there.
        keys: single values, with the architecture before each name.
        rope: normalised configuration with `rope_theta`, `rope_scaling` and `head_dim`.
        rotated: matrices whose rows change places, and the number of their attention heads. llama.cpp rotates
            neighbouring pairs in `eagle3` (`sources.builtin.unpermute_rows`), halves as transformers does in `dflash`.
        mask_id: the token of the slots that a DFlash draft fills.
    """

    architecture: str
    names: Mapping[str, str]
    keys: Mapping[str, int | float | bool]
    rope: Mapping[str, Any]
    rotated: Mapping[str, int] = field(default_factory=dict)
    mask_id: int | None = None

    def taps_key(self) -> str:
        """The key of the captured layers: those whose inputs the head reads."""
        return f"{self.architecture}.target_layers"


def gguf_layout(head: DraftHead) -> GgufLayout:
    """The layout of an EAGLE-3 head, a DFlash or a DSpark draft that llama.cpp can serve (`engines/llama_cpp.py`).

    Raises:
        MismatchError: config.json of a DFlash draft lacks what the file must say.
    """
    if head.kind == "dflash":
        return _dflash(head)
    config = head.config
    keys = {
        **_sizes(head, config, layers=1),
        "target_hidden_size": head.target_hidden_size,
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": "input_norm.weight" in head.tensors,
    }
    rotated = {
        "midlayer.self_attn.q_proj.weight": config["num_attention_heads"],
        "midlayer.self_attn.k_proj.weight": config["num_key_value_heads"],
    }
    return GgufLayout("eagle3", _EAGLE3, _prefixed("eagle3", keys), config, rotated)


def _dflash(head: DraftHead) -> GgufLayout:
    whole, config = whole_config(head.source_config), rope_config(head)
    own = whole.get("dflash_config")
    own = own if isinstance(own, Mapping) else {}
    block_size = _stated(head, own, whole, "block_size", least=2)
    mask_id = _stated(head, own, whole, "mask_token_id", least=0)
    if mask_id >= head.target_vocab:
        raise MismatchError.at(
            head.location,
            f"mask_token_id: expected an id below {head.target_vocab}, found {mask_id}.\nCorrect config.json.",
            key="mask_token_id",
            found=mask_id,
        )
    layers = names.dflash_layers(head.tensors.names)
    keys = {**_sizes(head, config, layers), "block_size": block_size}
    if _is_causal(own, whole):
        keys["attention.causal"] = True
    part = config.get("partial_rotary_factor") or 1
    keys["rope.dimension_count"] = int(config["head_dim"] * part)
    if names.MARKOV_OUT in head.tensors:
        # As llama.cpp's converter: the exports of SpecForge and speculators begin a block with a token that is known.
        others = "transformer_layer_config" in whole or "aux_hidden_state_layer_ids" in whole
        keys["sample_from_anchor"] = bool(whole.get("sample_from_anchor", not others))
        keys["has_confidence_head"] = names.CONFIDENCE in head.tensors
    found = {
        f"layers.{layer}.{name}": f"blk.{layer}.{stored}"
        for layer in range(layers)
        for name, stored in _DFLASH_LAYER.items()
    }
    return GgufLayout("dflash", {**_DFLASH, **found}, _prefixed("dflash", keys), config, mask_id=mask_id)


def _sizes(head: DraftHead, config: Mapping[str, Any], layers: int) -> dict[str, int | float | bool]:
    return {
        "vocab_size": head.target_vocab,
        "context_length": int(config.get("max_position_embeddings") or 2048),
        "embedding_length": head.hidden_size,
        "block_count": layers,
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": int(config["num_attention_heads"]),
        "attention.head_count_kv": int(config["num_key_value_heads"]),
        "attention.key_length": int(config["head_dim"]),
        "attention.value_length": int(config["head_dim"]),
        "attention.layer_norm_rms_epsilon": float(np.float32(config["rms_norm_eps"])),
        "rope.dimension_count": int(config["head_dim"]),
        "rope.freq_base": float(np.float32(config["rope_theta"])),
    }


def _prefixed(architecture: str, keys: Mapping[str, int | float | bool]) -> dict[str, int | float | bool]:
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _stated(head: DraftHead, own: Mapping[str, Any], whole: Mapping[str, Any], key: str, least: int) -> int:
    """A number that z-lab writes into `dflash_config` or beside it, speculators at top level."""
    value = own.get(key, whole.get(key))
    if type(value) is not int or value < least:
        raise MismatchError.at(
            head.location,
            f"{key}: expected a whole number from {least} on, found {value!r}.\nCorrect config.json.",
            key=key,
            found=value,
        )
    return value


def _is_causal(own: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether slots of a block see only those before them: vLLM's `_dflash_layer_causal` without sliding windows.

    `sliding_window_non_causal` false is speculators' word for it (vLLM, `configs/speculators/algos.py`).
    """
    said: Sequence[Any] = (whole.get("is_causal"), own.get("causal"))
    return next((bool(value) for value in said if value is not None), whole.get("sliding_window_non_causal") is False)
