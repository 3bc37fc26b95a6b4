"""Checks that the parts of a draft fit together: otherwise the kernel would read and write out of bounds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import UsageError
from ..tensor_checks import check_tensors
from .buffers import Buffers, buffer_layout, check_active
from .dimensions import DrafterConfig, check_head_fits
from .packed_weights import Weights


def check_features(cfg: DrafterConfig, X: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Refuse features that are not of this configuration; returns the taps, one or three."""
    taps = (X,) if isinstance(X, Tensor) else X
    separate = not isinstance(X, Tensor)
    are_tensors = isinstance(taps, (tuple, list)) and all(isinstance(tap, Tensor) for tap in taps)
    if not are_tensors or len(taps) != (3 if separate else 1) or len({_form(tap) for tap in taps}) != 1:
        raise UsageError(
            "Features are one tensor, or three of equal shape, strides and dtype on one device; got "
            f"{type(X).__name__}."
        )
    if separate and not (cfg.kind == "eagle3" and cfg.has_fc and cfg.tap_norms in (0, 1, 3)):
        raise UsageError("Only an EAGLE-3 head with fc takes three taps; this one takes one tensor of features.")
    shape, width = taps[0].shape, cfg.feature_width // len(taps)
    slots = cfg.num_slots
    if len(shape) != 3 or shape[0] != slots or not 1 <= shape[1] <= cfg.tree.new_tokens_width or shape[2] != width:
        raise UsageError(
            f"Features must be [{slots} slots, 1 to {cfg.tree.new_tokens_width} new tokens, {cfg.feature_width}]; got "
            f"{[tuple(tap.shape) for tap in taps]}."
        )
    if any(tap.dtype != cfg.dtype or tap.stride(-1) != 1 for tap in taps):
        raise UsageError(f"Features must be {cfg.dtype} with contiguous rows; got {taps[0].dtype}, {taps[0].stride()}.")
    return taps


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_parts(cfg: DrafterConfig, weights: Weights, bufs: Buffers) -> None:
    """Refuse parts of another configuration: the kernel would read and write out of bounds."""
    check_head_fits(cfg, weights.head)
    _check_buffers(cfg, weights, bufs)
    packed = weights.packed
    if packed is not None and packed.stream.dtype != cfg.weight_dtype:
        raise UsageError(
            f"The weights are packed in {packed.stream.dtype}, the configuration has weight_dtype = "
            f"{cfg.weight_dtype}; take Weights.pack(head, cfg)."
        )
    if packed is not None and (len(packed.cos) < cfg.max_positions or not weights.is_fixed_for(cfg.num_tokens)):
        raise UsageError(
            f"The weights are packed for {len(packed.cos)} positions and texts of {packed.num_tokens} tokens, the "
            f"configuration has {cfg.max_positions} and {cfg.num_tokens}; take "
            f"weights.with_positions({cfg.max_positions}, {cfg.num_tokens})."
        )


def _check_buffers(cfg: DrafterConfig, weights: Weights, bufs: Buffers) -> None:
    allocate = "Allocate them with allocate_buffers(cfg, weights)."
    layout = buffer_layout(cfg)
    try:
        check_tensors(
            weights.head.device, **{name: (getattr(bufs, name), layout[name][1], layout[name][0]) for name in layout}
        )
    except UsageError as error:
        raise UsageError(f"The buffers are of another configuration: {error} {allocate}") from error
    width = 0 if bufs.tails is None else bufs.tails.ranks.shape[1]
    if width != cfg.tail_rows:
        raise UsageError(
            f"The buffers have room for {width} rows that join a sequence, the configuration for {cfg.tail_rows}. "
            f"{allocate}"
        )
    if bufs.tree_rows != cfg.depth * cfg.top_k or bufs.target_vocab != cfg.target_vocab:
        raise UsageError(
            f"The buffers are for trees of {bufs.tree_rows} rows and {bufs.target_vocab} token ids, the configuration "
            f"has depth * top_k = {cfg.depth * cfg.top_k} and target_vocab = {cfg.target_vocab}. {allocate}"
        )
    if weights.packed is None or not bufs.workspace:
        return
    from .workspace import allocate_workspace

    for name, like in allocate_workspace(cfg, weights.packed.launches.get(cfg), "meta").items():
        tensor = bufs.workspace.get(name)
        if tensor is None or tensor.dtype != like.dtype or tensor.shape != like.shape:
            held = "no" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UsageError(
                f"The buffers' workspace has {held} {name}, these weights need {like.dtype} {tuple(like.shape)}. "
                f"{allocate}"
            )


def check_step(width: int, bufs: Buffers) -> None:
    """Refuse a step that does not fit, as it lies in the buffers; ``width`` counts the rows of features."""
    slots, count = len(bufs.num_new), int(bufs.active_count)
    active = bufs.active_slots[: max(0, count)].tolist()
    if not 0 <= count <= slots:
        raise UsageError(f"{count} slots are active, of {slots}.")
    check_active(active, slots)
    num_new, prefix, new_tokens = bufs.num_new.tolist(), bufs.prefix.tolist(), bufs.new_tokens.tolist()
    for slot in active:
        if num_new[slot] > width:
            raise UsageError(f"Slot {slot} has {num_new[slot]} new tokens, but features of {width}.")
        bufs.check_sequence(slot, new_tokens[slot][: max(0, num_new[slot])], prefix[slot])
