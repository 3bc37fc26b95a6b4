"""DFlash drafts: a few decoder layers that fill a block of masked tokens at once, over hidden states of the target.

Two published forms have the same tensors. z-lab's (`DFlashDraftModel`; `dflash_config.target_layer_ids` are outputs of
layers, z-lab/dflash `dflash/model.py`) has neither embedding nor LM head: both are the target's. speculators'
(`transformer_layer_config`; `aux_hidden_state_layer_ids` are inputs of layers, vLLM takes 1 from each in
`transformers_utils/configs/speculators/algos.py`) may have a reduced LM head with `d2t` and `t2d`, offsets as in
EAGLE-3 (speculators `model.py`, `DraftVocabMixin`; vLLM `model_executor/models/qwen3_dflash.py`, `compute_logits`).
DSpark (`Qwen3DSparkModel`) adds a Markov bias of low rank with a row for each draft id (vLLM `qwen3_dspark.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import names
from ..errors import MismatchError
from .check import check_shapes, layer_shapes
from .draft_head import LazyTensors
from .taps import TAPS_FLAG, layer_ids, section, tap_layers

# speculators leaves out what equals the defaults of transformers' Qwen3Config (`to_diff_dict`).
QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 32),
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


def settle_dflash(
    tensors: LazyTensors, config: Mapping[str, Any], merged: Mapping[str, Any], where: str, given: Sequence[int] | None
) -> tuple[int, ...]:
    """Check a draft's tensors and mask token, and find the layers of the target whose inputs it reads.

    `config` is normalised, with both vocabularies settled. Raises MismatchError for what does not fit together.
    """
    taps = tap_layers(merged, where)
    if taps is None:
        problem = "config.json names no layers of the target, and engines choose different ones."
        raise MismatchError.at(where, f"{problem}\nAdd those whose outputs the draft reads as target_layer_ids.")
    if given is not None and layer_ids(given, where, TAPS_FLAG, lowest=0) != taps:
        problem = f"--tap-layers: config.json of the draft names the inputs of layers {list(taps)}."
        raise MismatchError.at(where, f"{problem}\nLeave the option out.")
    hidden, vocab, rows = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    for place in ("dflash_config", ""):
        key, mask = f"{place}.mask_token_id".lstrip("."), section(merged, place).get("mask_token_id")
        if mask is not None and not (type(mask) is int and 0 <= mask < vocab):
            raise MismatchError.at(where, f"{key}: expected an id below {vocab}, found {mask!r}.\nCorrect config.json.")

    layers, columns = names.num_layers(tensors), len(taps) * (config.get("target_hidden_size") or hidden)
    for key in ("num_hidden_layers", "intermediate_size"):
        if config.get(key) is None:
            raise MismatchError.at(where, f"{key}: expected a positive integer, found none.\nCorrect config.json.")
    if config["num_hidden_layers"] != layers:
        problem = f"num_hidden_layers is {config['num_hidden_layers']}, the file has {layers} layers."
        raise MismatchError.at(where, f"{problem}\nCorrect config.json, or fetch the draft again.")
    rank = tensors.shape(names.MARKOV_OUT)[-1] if names.MARKOV_OUT in tensors else 0
    expected = {
        names.FC: (hidden, columns),
        **dict.fromkeys(("hidden_norm.weight", "norm.weight"), (hidden,)),
        names.LM_HEAD: (rows, hidden),
        names.EMBEDDING: (vocab, hidden),
        names.MARKOV_IN: (vocab, rank),
        names.MARKOV_OUT: (rows, rank),
    }
    for layer in range(layers):
        expected |= layer_shapes(config, f"layers.{layer}.", hidden)
    check_shapes(tensors, expected, where)
    return taps


def in_one_level(source_config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten config.json of either form, with the defaults that speculators leaves out."""
    nested = section(source_config, "transformer_layer_config")
    is_brief = bool(nested) and nested.get("model_type") in (None, "qwen3")
    return {**(QWEN3_DEFAULTS if is_brief else {}), **nested, **source_config}
