"""Compile kernels in other processes, so that this one goes on meanwhile."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

import torch

from .kernels.jobs import Job, prepare, writable_cache

logger = logging.getLogger(__name__)
MAX_PROCESSES = 14
"""Most compilations at a time: those of a step are some forty, of which three take ten times as long as the others."""


class _Worker(subprocess.Popen[bytes]):
    """The process that compiles; it may outlive this one, and ends by itself."""

    def __del__(self) -> None:
        """Leave no zombie, and do not warn."""
        if self.pid:
            self.poll()


class CompilePool:
    """Compiles jobs for one kind of GPU into Triton's cache; ``capability``: 90 for sm_90.

    A job that cannot be compiled here counts as done: the launch compiles it again, and fails in full where it must.
    """

    def __init__(self, capability: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.capability = capability
        self.max_processes = max(1, min(MAX_PROCESSES, cores - 1))
        self._cache = writable_cache()
        self._worker: _Worker | None = None
        self._pipe: Connection | None = None
        self._outbox: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
        self._numbers: dict[Job, int] = {}
        self._pending: dict[int, Job] = {}

    def prepare(self) -> None:
        """Begin what recording needs, beside other work, and the process that compiles where nothing is compiled."""
        Thread(target=prepare, daemon=True).start()
        if not os.listdir(self._cache):
            self.start()

    def start(self) -> None:
        """Start the process that compiles, unless it runs."""
        if self._worker is not None and self._worker.poll() is None:
            return
        self._give_up()
        here, there = Pipe()
        command = [sys.executable, "-m", "eagle_slim.runtime.compiling.worker"]
        numbers = [str(each) for each in (there.fileno(), self.capability, self.max_processes)]
        # In a session of its own: an interrupt is this process's alone. No GPU: it would take memory there.
        self._worker = _Worker(
            [*command, *numbers],
            pass_fds=[there.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": self._cache},
        )
        there.close()
        self._pipe, self._outbox = here, SimpleQueue()
        # A thread sends: until the other process has imported all that it needs, it takes nothing.
        Thread(target=_send_all, args=(self._outbox, here), daemon=True).start()

    def submit(self, jobs: Iterable[Job]) -> None:
        """Have jobs compiled, in order, behind those submitted before; what is compiled or under way is not again."""
        for job in jobs:
            if job in self._numbers:
                continue
            number = self._numbers[job] = len(self._numbers)
            if job.is_cached():
                continue
            self.start()
            self._pending[number] = job
            self._outbox.put((number, job))

    def are_done(self, jobs: Iterable[Job]) -> bool:
        """Report whether jobs that were submitted are compiled, or have failed."""
        self._receive(0.0)
        return all(self._numbers[job] not in self._pending for job in jobs)

    def wait(self, jobs: Iterable[Job], timeout_s: float | None = None) -> bool:
        """Wait until submitted jobs are done; returns whether they are (False after ``timeout_s``)."""
        wanted, until = [*jobs], time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while not (done := self.are_done(wanted)) and (left := until - time.monotonic()) > 0:
            self._receive(min(left, 60.0))
        return done

    def _receive(self, timeout_s: float | None) -> None:
        """Take what has been compiled; waits for something up to ``timeout_s`` where jobs are pending."""
        while self._pending and self._pipe is not None:
            try:
                if not self._pipe.poll(timeout_s):
                    return
                number, failure = self._pipe.recv()
            except (EOFError, OSError):
                self._give_up()
                return
            job = self._pending.pop(number)
            if failure is not None:
                logger.warning("%s is compiled where it is launched: %s", job.name, failure.strip().splitlines()[-1])
            timeout_s = 0.0

    def _give_up(self) -> None:
        if self._pending:
            text = "%d kernels are compiled where they are launched: the process that compiles has ended."
            logger.warning(text, len(self._pending))
        self._pending.clear()
        if self._pipe is not None:
            self._outbox.put(None)
            self._pipe.close()
        self._pipe = self._worker = None


def _send_all(outbox: SimpleQueue[tuple[int, Job] | None], pipe: Connection) -> None:
    """Send what is put into a queue, up to None; whoever receives notices where the other side has gone."""
    while (item := outbox.get()) is not None:
        try:
            pipe.send(item)
        except (OSError, ValueError):
            return


def pool_for(device: torch.device) -> CompilePool | None:
    """Return this process's pool for a GPU; None for other devices, where nothing is compiled."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return _pool(10 * major + minor)


_pool = cache(CompilePool)
