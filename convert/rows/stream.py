"""Reading a tensor, or some of its rows, from any file of weights: piece by piece, by several threads, and hashed.

The only place that reads tensor data and the only one that hashes it. A file says how rows are brought into memory
(`WeightsFile.reading`); here they are asked for one piece ahead of the consumer.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .types import TensorInfo, damaged, shorten

Bytes = NDArray[np.uint8]
Rows = slice | NDArray[np.int64]
Job = Callable[[], object]
Fill = Callable[[Rows, Bytes], Sequence[Job]]
"""`fill(rows, out)` gives the jobs that together bring these rows into `out` uint8 [rows, row_bytes]."""

# Four of them stay in a core's cache, and cost little to allocate for each tensor: with 8 MiB, converting a head of
# Llama-3.1-8B's size took twice the time in the kernel and 1.4 times as long (two cores of an AMD EPYC, 2026-11).
PIECE_BYTES = 2 << 20
# Several readers keep a solid-state disk busy and copy from the page cache on several cores; more did not help.
_READERS = 4
# Buffers for pieces: one is being filled, one is with the caller, and one or two are still being hashed or written.
_RING = 4


class WeightsFile(ABC):
    """One file of weights, opened lazily: its tensors are known, data is read on demand. Messages name `where`."""

    path: Path
    where: str
    size_bytes: int

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[Fill]:
        """Open a tensor for reading; KeyError where there is none of that name."""


def pieces(
    file: WeightsFile, name: str, ids: NDArray[np.int64] | None = None, piece_bytes: int = PIECE_BYTES
) -> Generator[Bytes, None, str]:
    """Yield a tensor, or its rows `ids` [rows] in that order, as uint8 [n, row_bytes]; return the sha256 of all bytes.

    Fresh memory costs more than reading into it from the page cache, so a few buffers are used again and again: a piece
    is valid until two more have been asked for. Ids may repeat. A scalar is one row.
    """
    tensor = file.tensors[name]
    count = tensor.num_rows if ids is None else len(ids)
    step = max(1, min(count, piece_bytes // max(1, tensor.row_bytes)))
    ring = [_allocate(file, tensor, min(step, count)) for _ in range(min(_RING, -(-count // step)))]
    return (yield from _read(file, tensor, ids, count, step, lambda index: ring[index % len(ring)]))


def read(file: WeightsFile, name: str, ids: NDArray[np.int64] | None = None) -> tuple[Bytes, str]:
    """Return a tensor, or its rows `ids`, as uint8 [rows, row_bytes] in newly allocated memory, and their sha256.

    Raises as `pieces`.
    """
    tensor = file.tensors[name]
    count = tensor.num_rows if ids is None else len(ids)
    out = _allocate(file, tensor, count)
    step = max(1, PIECE_BYTES // max(1, tensor.row_bytes))
    return out, Hashed(_read(file, tensor, ids, count, step, lambda index: out[index * step :])).read_all()


class Hashed:
    """The pieces of a generator that returns their SHA-256, which is `sha256` once the last of them has come."""

    sha256 = ""

    def __init__(self, pieces: Generator[Bytes, None, str]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[Bytes]:
        self.sha256 = yield from self._pieces

    def read_all(self) -> str:
        """Read the pieces for their SHA-256 alone."""
        deque(self, maxlen=0)
        return self.sha256


def _read(
    file: WeightsFile,
    tensor: TensorInfo,
    ids: NDArray[np.int64] | None,
    count: int,
    step: int,
    buffer_of: Callable[[int], Bytes],
) -> Generator[Bytes, None, str]:
    if ids is not None:
        _check_ids(ids, tensor, file.where)
    with file.reading(tensor.name) as fill:

        def plans() -> Iterator[tuple[Bytes, Sequence[Job]]]:
            for index, start in enumerate(range(0, count, step)):
                rows = slice(start, min(start + step, count))
                buffer = buffer_of(index)[: rows.stop - start]
                yield buffer, fill(rows if ids is None else ids[rows], buffer) if buffer.size else ()

        def check(piece: Bytes) -> None:
            if tensor.dtype == "BOOL" and piece.size and (found := int(piece.max())) > 1:
                where = f"{file.where}: tensor {shorten(tensor.name)}"
                raise damaged(where, f"booleans must be 0 or 1, found {found}", tensor=tensor.name, found=found)

        return (yield from _filled(plans(), check))


def _filled(
    plans: Iterator[tuple[Bytes, Sequence[Job]]], check: Callable[[Bytes], None]
) -> Generator[Bytes, None, str]:
    """Fill buffers one ahead with several threads, hash them in order in another; yield each, checked, when full."""
    digest = hashlib.sha256()
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read")
    hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")
    hashes: deque[Future[None]] = deque()
    reading: list[Future[object]] = []

    def start() -> Bytes | None:
        if len(hashes) == _RING:
            # The buffer that comes next was hashed last as many pieces ago.
            hashes.popleft().result()
        plan = next(plans, None)
        reading.clear()
        if plan is None:
            return None
        buffer, parts = plan
        for part in parts:
            reading.append(readers.submit(part))
        return buffer

    try:
        ahead = start()
        while ahead is not None:
            for job in reading:
                job.result()
            buffer = ahead
            hashes.append(hasher.submit(digest.update, buffer.reshape(-1).data))
            ahead = start()
            check(buffer)
            yield buffer
        for hashed in hashes:
            hashed.result()
        return digest.hexdigest()
    finally:
        # Jobs are waited for, threads are not joined: the garbage collector may close a generator that was left, in any
        # thread, and so in one that is just being started and holds the lock that joining takes.
        readers.shutdown(wait=False, cancel_futures=True)
        hasher.shutdown(wait=False, cancel_futures=True)
        left: list[Future[Any]] = [*reading, *hashes]
        for job in left:
            if not job.cancelled():
                job.exception()


def _allocate(file: WeightsFile, tensor: TensorInfo, rows: int) -> Bytes:
    try:
        return allocate(rows, tensor.row_bytes)
    except (MemoryError, ValueError) as error:
        raise CheckpointError.at(
            file.where, f"tensor {shorten(tensor.name)}: {rows * tensor.row_bytes:,} bytes do not fit into memory."
        ) from error


def allocate(rows: int, row_bytes: int) -> Bytes:
    """Uninitialised memory, uint8 [rows, row_bytes]."""
    return np.empty((rows, row_bytes), dtype=np.uint8)


def _check_ids(ids: NDArray[np.int64], tensor: TensorInfo, where: str) -> None:
    if not tensor.shape:
        raise CheckpointError.at(
            where, f"tensor {shorten(tensor.name)} is a scalar and has no rows.", tensor=tensor.name
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tensor.num_rows:
        wrong = int(ids.max()) if int(ids.max()) >= tensor.num_rows else int(ids.min())
        raise CheckpointError.at(
            where,
            f"tensor {shorten(tensor.name)}: row {wrong} was asked for, of {tensor.num_rows}.\n"
            "The vocabulary and this checkpoint do not belong together.",
            tensor=tensor.name,
            row=wrong,
            rows=tensor.num_rows,
        )
