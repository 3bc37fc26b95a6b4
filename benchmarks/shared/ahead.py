"""Compile the kernels of calls ahead on all cores: calls are rehearsed without a launch, and forks compile."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from eagle_slim.runtime.compiling.kernels.compile_target import CompileTarget
from triton import AsyncCompileMode
from triton.runtime.driver import driver

Compile = Callable[[], Any]
_COMPILES: list[Compile] = []


def _do_nothing(*_: object) -> None: ...


_NO_KERNEL = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=_do_nothing, run=_do_nothing)


class Recorder(CompileTarget):
    """Takes the place of Triton's driver, and of its threads that compile: ``compiles`` is what they would have run."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.compiles: list[Compile] = []

    def get_current_device(self) -> int:
        """Return a device of its own: launches on others do not find its kernels."""
        return -1

    def submit(self, compile_kernel: Compile) -> Future[Any]:
        """Note what compiles a kernel; its launches do nothing."""
        self.compiles.append(compile_kernel)
        future = Future[Any]()
        future.set_result(_NO_KERNEL)
        return future

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Launch no kernel in a block; what PyTorch itself does is done."""
        before = driver.active
        driver.set_active(self)
        try:
            with AsyncCompileMode(self):
                yield
        finally:
            driver.set_active(before)


def compile_in_forks(compiles: Sequence[Compile]) -> list[Future[None]]:
    """Compile into Triton's cache, in order, while this process goes on; returns a future of each kernel."""
    # A fork that collected a tensor would call CUDA, which it cannot.
    gc.freeze()
    pool = ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("fork"), _begin, (compiles,))
    return [pool.submit(_compile, place) for place in range(len(compiles))]


def _begin(compiles: Sequence[Compile]) -> None:
    os.nice(5)
    _COMPILES[:] = compiles


def _compile(place: int) -> None:
    kernel = _COMPILES[place]()
    # Triton 3.6 builds C code for each signature.
    driver.active.launcher_cls(kernel.src, kernel.metadata)
