"""Kernel or twin, on which GPU, and where graphs are captured: the one place where it is chosen.

An operation is a function that launches Triton kernels; its twin is the plain PyTorch function in the same module whose
name ends in ``_ref``, with the same arguments and results, which defines it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

Operation = TypeVar("Operation", bound=Callable[..., Any])
_SIDE_TURN = threading.RLock()


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


@contextmanager
def side_stream() -> Iterator[torch.cuda.Stream]:
    """Run a block on the current GPU's side stream, where work is practised and captured; one thread at a time.

    A process has one: cuBLAS keeps a workspace (32 MiB on an H100) for every stream that it has ever run on, and the
    allocator keeps free memory by stream.
    """
    with _SIDE_TURN:
        stream, outside = _side_stream(torch.cuda.current_device()), torch.cuda.current_stream()
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            yield stream
        outside.wait_stream(stream)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
