"""Compile kernels in forks of this process, for the process that started it: `python -m`, with a descriptor of a pipe.

This process imports what kernels need once and then only forks, so that a compilation begins at once, has no state of
another, and takes nothing else with it where it dies. It ignores interrupts, sees no GPU and does without PyTorch. When
the other side closes the pipe, what has begun is finished, as Triton's cache keeps it for the next run, and the rest is
dropped.
"""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
import traceback
from collections import deque
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

from .kernels.compile_target import compile_only_for
from .kernels.jobs import Job, prepare

KERNELS = tuple(f"eagle_slim.runtime.{room}.kernels" for room in ("target", "step", "drafter"))
"""Packages whose modules are imported before the first job."""
IDLE_S = 60.0
"""Seconds without work after which this process ends."""


class Worker:
    """Compiles up to ``max_jobs`` jobs at a time, in the order in which they came.

    Receives pairs of a number and a `Job`; sends the number of each that has ended, and why it failed, or None.
    """

    def __init__(self, pipe: Connection, max_jobs: int) -> None:
        self._pipe, self._max_jobs = pipe, max_jobs
        self._waiting: deque[tuple[int, Job]] = deque()
        self._running: dict[Connection, tuple[int, int]] = {}

    def run(self) -> None:
        """Work until the other side closes the pipe, or has nothing to do for `IDLE_S`."""
        is_open = True
        while is_open or self._running:
            while is_open and self._waiting and len(self._running) < self._max_jobs:
                self._begin(*self._waiting.popleft())
            sources = [*self._running, *([self._pipe] if is_open else [])]
            ready = wait(sources, None if self._running else IDLE_S)
            if not ready:
                return
            for source in ready:
                if source is self._pipe:
                    is_open = self._receive()
                else:
                    is_open &= self._end(source)  # type: ignore[arg-type]

    def _receive(self) -> bool:
        try:
            self._waiting.append(self._pipe.recv())
        except (EOFError, ConnectionError):
            return False
        return True

    def _begin(self, number: int, job: Job) -> None:
        here, there = os.pipe()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.close(here)
                job.compile()
                status = 0
            except BaseException:
                os.write(there, traceback.format_exc().encode()[-4000:])
            finally:
                os._exit(status)
        os.close(there)
        self._running[Connection(here, writable=False)] = number, process

    def _end(self, source: Connection) -> bool:
        """Take note of a fork that has ended; whether the other side still listens."""
        number, process = self._running.pop(source)
        with source:
            text = os.read(source.fileno(), 4000).decode(errors="replace")
        _, status = os.waitpid(process, 0)
        try:
            self._pipe.send((number, None if status == 0 else text or f"ended with status {status}"))
        except OSError:
            return False
        return True


def begin(capability: int) -> None:
    """Import what compiling for GPUs of a ``capability`` needs, so that every fork has it."""
    # Modules of kernels import PyTorch for twins and launches, which takes longer than most kernels: it is left out.
    absent: Any = SimpleNamespace(Tensor=object, Module=object, functional=None, bfloat16=None)
    absent.nn = absent
    sys.modules |= dict.fromkeys(("torch", "torch.nn", "torch.nn.functional"), absent)
    compile_only_for(capability)
    prepare()
    for package in KERNELS:
        for module in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
            import_module(module.name)


def main() -> None:
    """Compile for the process at the other end of a pipe."""
    descriptor, capability, max_jobs = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    begin(capability)
    Worker(Connection(descriptor), max_jobs).run()


if __name__ == "__main__":
    main()
