"""Record which kernels a piece of work launches, and compile them elsewhere; Triton's cache on disk hands them over."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import getclosurevars
from types import SimpleNamespace
from typing import Any

import triton
from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.driver import driver

logger = logging.getLogger(__name__)
_ONE_AT_A_TIME = threading.RLock()
"""Triton has one driver for all threads."""


def prepare() -> None:
    """Do what each process that compiles, or records, does once: read Triton's own files, which takes a second."""
    # Triton makes its driver now, which must not take a recorder's place. What fails here fails in full at a launch.
    with suppress(Exception), _ONE_AT_A_TIME:
        target = driver.active.get_current_target()
        triton_key()
        make_backend(target).hash()


@dataclass(frozen=True)
class Job:
    """A kernel to compile; equal to every other that gives the same machine code.

    It goes to another process with the kernel by name: kernels are functions of modules.
    """

    key: str
    """Of the compiled kernel in Triton's cache."""
    name: str
    source: tuple[Any, ...] = field(compare=False, repr=False)
    """Module, name and hash of the kernel; types of its arguments, its constants, what is known of the arguments."""
    target: GPUTarget = field(compare=False)
    options: dict[str, Any] = field(compare=False, repr=False)

    @classmethod
    def of(cls, source: ASTSource, target: GPUTarget, options: Any, environment: dict[str, str]) -> Job:
        """Describe what Triton is about to compile; ``environment``: variables that are part of its keys."""
        key = get_cache_key(source, make_backend(target), options, env_vars=environment)
        function = source.fn.fn
        kernel = (function.__module__, function.__qualname__, source.fn.cache_key)
        described = (*kernel, source.signature, source.constants, source.attrs)
        return cls(hashlib.sha256(key.encode()).hexdigest(), source.name, described, target, options.__dict__)

    def is_cached(self) -> bool:
        """Report whether Triton's cache on disk has it."""
        # The file that Triton looks for, by a name that is cut.
        return get_cache_manager(self.key).get_group(f"{self.name[:150]}.json") is not None

    def compile(self) -> None:
        """Compile into Triton's cache. The process launches nothing any more (`compile_target`)."""
        module, name, kernel_hash, *described = self.source
        function = getattr(import_module(module), name)
        # Triton 3.6 makes it in another way after other kernels, and it is part of the key.
        function.hash = kernel_hash
        kernel = triton.compile(ASTSource(function, *described), target=self.target, options=self.options)
        # Triton 3.6 builds a module in C for each signature of a launch.
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


class _Recorder:
    """Takes the place of Triton's driver, and of the threads to which it gives what is to be compiled.

    Recording threads are on a device of their own, so that kernels compiled for other devices are recorded, too, and
    no other launch finds those of the recording.
    """

    def __init__(self, jobs: dict[Job, None]) -> None:
        self.jobs, self._driver = jobs, driver.active
        # Kernels of another GPU are others.
        self._thread, self._device = threading.get_ident(), -self._driver.get_current_target().arch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def get_current_device(self) -> int:
        """Return a device that is not there; to other threads, theirs."""
        return self._device if threading.get_ident() == self._thread else int(self._driver.get_current_device())

    def get_current_stream(self, device: int) -> int:
        return 0 if device == self._device else int(self._driver.get_current_stream(device))

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        """Describe what compiles a kernel; its launches, here and in later recordings, note it and do nothing."""
        given = getclosurevars(compile_kernel).nonlocals
        job = Job.of(given["src"], given["target"], given["options"], given["env_vars"])

        def note(*_: object) -> None:
            driver.active.jobs[job] = None

        future = Future[Any]()
        future.set_result(SimpleNamespace(function=None, packed_metadata=None, launch_metadata=note, run=note))
        return future


def writable_cache() -> str:
    """Return the folder of Triton's cache; where it cannot be written, a temporary one that Triton takes instead."""
    folder = str(triton.knobs.cache.dir)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning("Compiled kernels cannot be kept: %s. TRITON_CACHE_DIR names another folder.", error)
        temporary = tempfile.TemporaryDirectory(prefix="triton-")
        atexit.register(temporary.cleanup)
        folder = triton.knobs.cache.dir = temporary.name
    return folder


@contextmanager
def recording(jobs: dict[Job, None]) -> Iterator[None]:
    """Add every kernel that a block launches to ``jobs``, and launch none. What PyTorch itself does is done.

    Other threads go on launching.
    """
    with _ONE_AT_A_TIME:
        recorder, before = _Recorder(jobs), driver.active
        driver.set_active(recorder)
        try:
            with AsyncCompileMode(recorder):
                yield
        finally:
            driver.set_active(before)
