"""Write one safetensors file tensor by tensor, with the checksum of each.

The layout is the one `safetensors.torch.save_file` gives (tensors by descending alignment, then by name; compact JSON
header padded to 8 bytes), so the same tensors give the same bytes; but only two chunks are in memory at a time: one is
being read while the one before it is being written.
Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import sha256_of
from .dtypes import LONG_NAMES, item_size
from .safetensors_header import header_bytes
from .stream import Bytes, Hashed

# The order in which the reference writer sorts dtypes: descending in its own enumeration.
_DTYPE_ORDER = ["F64", "I64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL"]
_FLUSH_BYTES = 64 << 20

Chunks = Callable[[], Generator[Bytes, None, str]]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be written: what it is, and a function that yields its bytes when its turn comes.

    Attributes:
        name: of the tensor.
        dtype: safetensors spelling.
        shape: one integer per dimension.
        chunks: yields uint8 arrays that are, one after another, the tensor's bytes in row-major order, and returns the
            SHA-256 of them all. A chunk must stay as it is until two more have been asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Chunks

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True)
class WrittenFile:
    """What was written: SHA-256 of all bytes before the first tensor's data, and of each tensor's bytes by its name."""

    size_bytes: int
    header_sha256: str
    tensors: dict[str, str]


def whole(raw: Bytes) -> Chunks:
    """A `TensorPlan.chunks` for bytes that are already in memory."""

    def chunks() -> Generator[Bytes, None, str]:
        yield raw
        return sha256_of(raw.reshape(-1).data)

    return chunks


def array_plan(name: str, array: NDArray[Any]) -> TensorPlan:
    """The plan of a small array in memory, of a dtype that NumPy has."""
    dtype = next(short for short, long_name in LONG_NAMES.items() if long_name == array.dtype.name)
    return TensorPlan(name, dtype, array.shape, whole(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def zeros_plan(name: str, dtype: str, size: int) -> TensorPlan:
    """The plan of a vector [size] of zeros of any dtype."""
    return TensorPlan(name, dtype, (size,), whole(np.zeros(size * item_size(dtype), np.uint8)))


def write_safetensors(path: Path, plans: Sequence[TensorPlan], metadata: Mapping[str, str]) -> WrittenFile:
    """Write `plans` to `path`, flushed to the disk, and return the size and checksums of what was written.

    Raises:
        ValueError: a plan yielded another number of bytes than it declared.
        OSError: the disk refused.
    """
    ordered = sorted(plans, key=lambda plan: (_DTYPE_ORDER.index(plan.dtype), plan.name))
    entries: dict[str, object] = {}
    offset = 0
    for plan in ordered:
        offsets = [offset, offset + plan.size_bytes]
        entries[plan.name] = {"dtype": plan.dtype, "shape": list(plan.shape), "data_offsets": offsets}
        offset += plan.size_bytes
    start = header_bytes(entries, dict(sorted(metadata.items())))
    digests = write_tensors(path, start, ordered)
    return WrittenFile(len(start) + offset, sha256_of(start), digests)


def write_tensors(path: Path, start: bytes, plans: Sequence[TensorPlan], alignment: int = 1) -> dict[str, str]:
    """Write `start`, then each tensor, to a new file; return what each plan's chunks returned, by name.

    Every part is followed by zeros up to a multiple of `alignment` bytes. Raises as `write_safetensors`.
    """
    digests: dict[str, str] = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, start + bytes(-len(start) % alignment))
        with ThreadPoolExecutor(1, thread_name_prefix="write") as writer, _Flusher(descriptor) as flusher:
            for plan in plans:
                digests[plan.name] = _write_tensor(descriptor, plan, writer, flusher)
                _write_all(descriptor, bytes(-plan.size_bytes % alignment))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digests


class _Flusher:
    """Sends what has been written on to the disk while the next part is being read and hashed.

    Otherwise the last fsync, which waits for all of the file, comes on top of everything else.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._running: Future[None] | None = None
        self._waiting_bytes = 0

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        # A disk error is reported once, to whoever flushes first: it must not be lost here.
        if kind is None and self._running is not None:
            self._running.result()

    def wrote(self, size_bytes: int) -> None:
        """Begin to flush once enough has come together; never waits. Raises OSError where the flush before failed."""
        self._waiting_bytes += size_bytes
        if self._waiting_bytes >= _FLUSH_BYTES and (self._running is None or self._running.done()):
            if self._running is not None:
                self._running.result()
            self._waiting_bytes = 0
            self._running = self._pool.submit(os.fdatasync, self._descriptor)


def _write_tensor(descriptor: int, plan: TensorPlan, writer: ThreadPoolExecutor, flusher: _Flusher) -> str:
    def put(data: memoryview) -> None:
        _write_all(descriptor, data)
        flusher.wrote(len(data))

    chunks, written = Hashed(plan.chunks()), 0
    before: Future[None] | None = None
    for chunk in chunks:
        data = chunk.reshape(-1).data
        written += len(data)
        if before is not None:
            before.result()
        before = writer.submit(put, data)
    if before is not None:
        before.result()
    if written != plan.size_bytes:
        raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {written}")
    return chunks.sha256


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        # One write(2) takes at most 2 GiB, and may take less than it was given.
        view = view[os.write(descriptor, view) :]
