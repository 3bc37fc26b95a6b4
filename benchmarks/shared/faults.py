"""Faults injected into a call: a streamer that raises, an interrupt at any place, memory that runs out."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

STREAMER, INTERRUPT, BESIDE, LIMIT = "streamer", "interrupt", "memory beside", "memory limit"


class StreamerError(Exception):
    """What a faulty streamer raises."""


class FaultyStreamer:
    """Raises when it is given more than so often, if it is."""

    def __init__(self, most: int) -> None:
        self.left = most

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then new tokens."""
        self.left -= 1
        if self.left < 0:
            raise StreamerError

    def end(self) -> None:
        """Nothing more comes."""


def faults_on(device: torch.device) -> list[str]:
    """Those that a device allows: only a GPU's allocator has a limit."""
    return [STREAMER, INTERRUPT, BESIDE, *([LIMIT] if device.type == "cuda" else [])]


def injected(
    fault: str | None, device: torch.device, rng: random.Random, usual_s: float
) -> AbstractContextManager[None]:
    """Run a block, which usually takes ``usual_s`` seconds, with a fault; a faulty streamer is the block's to bring."""
    if fault == INTERRUPT:
        return _interrupt(max(1e-3, 1.5 * usual_s * rng.random()))
    if fault == BESIDE:
        return _memory_beside(device, rng.uniform(0.3, 0.95))
    return _memory_limit(device, rng.randrange(1 << 28)) if fault == LIMIT else nullcontext()


def explains(fault: str | None, error: BaseException) -> bool:
    """Whether a block was ended by its fault."""
    if fault in (STREAMER, INTERRUPT):
        return isinstance(error, StreamerError if fault == STREAMER else KeyboardInterrupt)
    return fault is not None and isinstance(error, RuntimeError) and _is_of_memory(error)


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether it, or one that it came from, says that memory ran out."""
    return error is not None and ("out of memory" in str(error) or _is_of_memory(error.__context__))


@contextmanager
def _interrupt(after_s: float) -> Iterator[None]:
    """Interrupt a block as Ctrl-C does, unless it has ended."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory_beside(device: torch.device, share: float) -> Iterator[None]:
    """Hold a share of the device's free memory, as another process would; on a CPU, of 128 MiB."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 27
    held = [torch.empty(int(share * free), dtype=torch.uint8, device=device)]
    try:
        yield
    finally:
        held.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _memory_limit(device: torch.device, more_bytes: int) -> Iterator[None]:
    """Let a GPU's allocator have no more than that beside what it holds."""
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved(device) + more_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / torch.cuda.mem_get_info(device)[1]), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
