"""Checks that the parts of a draft fit together: otherwise the kernel would read and write out of bounds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import UsageError
from ..tensor_checks import check_tensors
from .buffers import Buffers, buffer_layout
from .dimensions import DrafterConfig, check_head_fits
from .packing import Weights


def check_features(cfg: DrafterConfig, X: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Refuse features of another configuration; returns the taps, one or three."""
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
    """Refuse weights and buffers of another configuration: the kernel would read and write out of bounds."""
    check_head_fits(cfg, weights.head)
    if bufs.cfg != cfg:
        different = [name for name, value in vars(cfg).items() if getattr(bufs.cfg, name) != value]
        raise UsageError(
            f"The buffers are of a configuration with other {', '.join(different)}. Allocate them with "
            "allocate_buffers(cfg, weights)."
        )
    layout = buffer_layout(cfg, bufs.tree)
    tensors = {name: (getattr(bufs, name), dtype, shape) for name, (shape, dtype) in layout.items()}
    check_tensors(weights.head.device, **tensors)
    if weights.head.draft_vocab < cfg.draft_vocab:
        raise UsageError(f"draft_vocab = {cfg.draft_vocab}, but the head has {weights.head.draft_vocab} rows.")
    packed = weights.packed
    if packed is not None and packed.stream.dtype != cfg.weight_dtype:
        raise UsageError(
            f"The weights are packed in {packed.stream.dtype}, the configuration has weight_dtype = "
            f"{cfg.weight_dtype}; take Weights.pack(head, cfg)."
        )
