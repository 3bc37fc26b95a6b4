"""Operations as kernels or twins, profiler ranges, the side stream for graph capture, and counts of launches.

An operation is a function that launches Triton kernels; its twin is the plain PyTorch function in the same module whose
name ends in ``_ref``, with the same arguments and results, which defines it.

With ``EAGLE_SLIM_RANGES=1`` each operation runs in a range of its name, and steps run phase by phase without graphs: a
replay has no ranges inside.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

Operation = TypeVar("Operation", bound=Callable[..., Any])
_SIDE_TURN = threading.RLock()
_GARBAGE = threading.Lock()


@dataclass(frozen=True)
class Ops:
    """Runs operations as kernels, or as their twins: ``ops(norm_rows)(x, ...)``."""

    use_kernels: bool

    @classmethod
    def for_device(cls, device: torch.device) -> Ops:
        """Choose kernels on a GPU, twins elsewhere."""
        return cls(device.type == "cuda")

    def __call__(self, operation: Operation) -> Operation:
        """Return the operation itself, or its twin."""
        run = operation
        if not self.use_kernels:
            run = getattr(sys.modules[operation.__module__], f"{operation.__name__}_ref")
        return named_range(operation.__name__)(run) if ranges_wanted() else run


def is_set(variable: str) -> bool:
    """Tell if an environment variable is there, not empty, and not 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def ranges_wanted() -> bool:
    """Return whether ``EAGLE_SLIM_RANGES`` is set."""
    return is_set("EAGLE_SLIM_RANGES")


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Run a block, or a decorated function, in a named range of PyTorch's profiler, on a GPU of NVTX too."""
    has_nvtx = torch.cuda.is_available()
    if has_nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if has_nvtx:
            torch.cuda.nvtx.range_pop()


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current GPU for a block, and the CPU the default device, whatever the user's is."""
    gpu, host = torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.device("cpu")
    with gpu, nullcontext() if torch.get_default_device() == host else host:
        yield


def lacks_fp8(device: torch.device) -> str | None:
    """Return why a device multiplies by no weights in FP8, as the end of a sentence; None where it does."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability >= (8, 9):
        return None
    chip = "" if capability is None else f" (sm_{capability[0]}{capability[1]})"
    return f"needs an NVIDIA GPU of sm_89 or later, and the model is on {device}{chip}"


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Look for no garbage in a block whose many objects stay: each search reads the million of all imported modules."""
    with _GARBAGE:  # another thread's switch between a look at it and our own would be undone
        was_enabled = gc.isenabled()
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            with _GARBAGE:
                gc.enable()


@contextmanager
def side_stream() -> Iterator[torch.cuda.Stream]:
    """Run a block on the current GPU's side stream, used for warm-up and capture; one thread at a time.

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


Launches = Counter[tuple[Any, bool]]
"""Launches of the drafter, graph replays included, by shape (`drafter.tuned_cache`) and by whether that is tuned."""
ALL_LAUNCHES: Launches = Counter()
"""Those of this process so far, warm-ups and captures included."""


class _Counts(threading.local):
    def __init__(self) -> None:
        self.launches: Launches = Counter()


_COUNTS = _Counts()
REHEARSES: ContextVar[bool] = ContextVar("rehearses", default=False)
"""Whether work is run for its kernels alone: of launches that differ in numbers only, one will do."""


def count_launches(launches: Launches) -> None:
    """Add launches to this thread's count, and to the process's."""
    _COUNTS.launches.update(launches)
    ALL_LAUNCHES.update(launches)


def tuned_counts(launches: Launches) -> dict[str, int]:
    """Count launches with and without tuned parameters: ``tuned_hits`` and ``tuned_misses``."""
    hits = sum(count for (_, is_tuned), count in launches.items() if is_tuned)
    return {"tuned_hits": hits, "tuned_misses": launches.total() - hits}


@contextmanager
def counted_apart() -> Iterator[Launches]:
    """Count launches of this block separately."""
    outside, _COUNTS.launches = _COUNTS.launches, Counter()
    try:
        yield _COUNTS.launches
    finally:
        _COUNTS.launches = outside
