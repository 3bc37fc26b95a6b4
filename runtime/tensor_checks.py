"""Checks of tensors for the kernels that can be used alone: they read memory as it lies, whatever is there."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UsageError


def check_tensors(device: torch.device, **wanted: tuple[Tensor, torch.dtype, tuple[int | None, ...]]) -> None:
    """Check tensors, by name: (tensor, dtype, shape, where None is any size). All lie on ``device``, contiguous.

    Raises:
        UsageError: one is otherwise; ``tensor`` is its name.
    """
    for name, (tensor, dtype, shape) in wanted.items():
        fits = len(shape) == tensor.dim() and all(
            want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise UsageError(
                f"{name} must be {dtype} [{sizes}], contiguous, on {device}; got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}."
            )
