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

import numpy as np

from ..errors import MismatchError, UnsupportedHeadError
from ..rows.checkpoint import Checkpoint
from ..sources.source import ResolvedSource
from . import config as head_config
from . import names
from .check import check_dtypes, settle_dflash
from .draft_head import DraftHead, LazyTensors
from .map import D2tForm, read_map

_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "draft_vocab_size", "target_hidden_size", "hidden_act", "rms_norm_eps", "quantization_config",
)  # fmt: skip
# speculators leaves out what equals the defaults of transformers' Qwen3Config (`to_diff_dict`).
QWEN3_DEFAULTS = {
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
_MASK_EMBEDDING = "mask_embedding.pt"


def open_dflash(
    checkpoint: Checkpoint,
    source_config: Mapping[str, Any],
    where: str,
    source: ResolvedSource | None,
    d2t_form: D2tForm,
    given_taps: Sequence[int] | None,
) -> DraftHead:
    """A DFlash draft as a `DraftHead`; arguments and errors as `head_from_checkpoint`."""
    _refuse_others(source_config, where, source)
    table = names.dflash_names(checkpoint.names, where)
    tensors = LazyTensors(checkpoint, table.stored)
    check_dtypes(tensors, where)
    merged = whole_config(source_config)
    # Only what is checked here; RoPE and windows, which each layer may have of its own, are copied unread.
    config = head_config.normalise_config({key: merged[key] for key in _KEYS if key in merged}, where)
    ids = read_map(tensors, config, where, d2t_form)
    taps = head_config.tap_layers(merged, where)
    if taps is None:
        if given_taps is None:
            raise MismatchError.at(
                where,
                "config.json names no layers of the target, and engines choose different ones: vLLM 2, n // 2, n - 3, "
                "SGLang as many as the draft has.\nName the layers whose inputs the draft reads with --tap-layers.",
            )
        taps = head_config.given_tap_layers(given_taps, where)
        source_config = _with_tap_layers(source_config, taps)
    elif given_taps is not None and tuple(given_taps) != taps:
        raise MismatchError.at(
            where,
            f"--tap-layers: config.json of the draft names the inputs of layers {list(taps)}.\nLeave the option out.",
        )
    _check_mask(merged, config["vocab_size"], where)
    settle_dflash(tensors, config, len(taps), where)
    is_sorted = ids is None or bool(np.all(np.diff(ids) > 0))
    kept = {name: stored for name, stored in table.stored.items() if name not in names.MAPS}
    return DraftHead(
        kind="dflash",
        config=config,
        tensors=LazyTensors(checkpoint, kept),
        draft_ids_to_target=ids,
        tap_layers=taps,
        warnings=() if is_sorted else ("the map was not in ascending order; rows and map are sorted together",),
        location=where,
        source_config=dict(source_config),
        source=source,
        target_name=head_config.metadata_target(source_config),
        dropped=table.dropped,
    )


def whole_config(source_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of either form in one level, with the defaults that speculators leaves out."""
    nested = source_config.get("transformer_layer_config")
    nested = nested if isinstance(nested, Mapping) else {}
    is_brief = bool(nested) and nested.get("model_type") in (None, "qwen3")
    return {**(QWEN3_DEFAULTS if is_brief else {}), **nested, **source_config}


def _refuse_others(config: Mapping[str, Any], where: str, source: ResolvedSource | None) -> None:
    head_config.refuse_foreign(config, where)
    if not head_config.is_dflash(config):
        raise names.other_draft("dflash", where)
    if source is not None and (_MASK_EMBEDDING in source.files or (source.folder / _MASK_EMBEDDING).exists()):
        raise UnsupportedHeadError.at(
            where,
            f"{_MASK_EMBEDDING} replaces a row of the target's embedding, and is not carried over.\n"
            "Serve the draft as it is.",
        )


def _with_tap_layers(source_config: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """The configuration with the layers named where its form has them: inputs in speculators', outputs in z-lab's."""
    if "transformer_layer_config" in source_config:
        return {**source_config, "aux_hidden_state_layer_ids": list(layers)}
    own = source_config.get("dflash_config")
    named = {**(own if isinstance(own, Mapping) else {}), "target_layer_ids": [layer - 1 for layer in layers]}
    return {**source_config, "dflash_config": named}


def _check_mask(config: Mapping[str, Any], vocab: int, where: str) -> None:
    """Refuse a mask token, in `dflash_config` or beside it, that the vocabulary does not have."""
    own = config.get("dflash_config")
    for key, part in (("dflash_config.mask_token_id", own), ("mask_token_id", config)):
        mask = part.get("mask_token_id") if isinstance(part, Mapping) else None
        if mask is not None and not (type(mask) is int and 0 <= mask < vocab):
            raise MismatchError.at(where, f"{key}: expected an id below {vocab}, found {mask!r}.\nCorrect config.json.")
