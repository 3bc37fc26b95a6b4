"""Kernel or twin, and on which GPU: the one place where it is chosen.

An operation is a function that launches Triton kernels; its twin is the plain PyTorch function in the same module whose
name ends in ``_ref``, with the same arguments and results, which defines it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Operation = TypeVar("Operation", bound=Callable[..., Any])


@dataclass(frozen=True)
class Ops:
    """Runs operations as kernels, or as their twins: ``ops(add_norm)(residual, ...)``."""

    use_kernels: bool

    @classmethod
    def for_device(cls, device: torch.device) -> Ops:
        """Kernels on a GPU, twins elsewhere."""
        return cls(device.type == "cuda")

    def __call__(self, operation: Operation) -> Operation:
        """Return the operation itself, or its twin."""
        if self.use_kernels:
            return operation
        twin: Operation = getattr(sys.modules[operation.__module__], f"{operation.__name__}_ref")
        return twin


def current(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels where a model is, which need not be the current GPU; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
