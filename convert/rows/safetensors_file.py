"""One safetensors file on disk: its rows are read straight from it.

The library behind `safe_open` checks the same rules of the header, but it maps the file into memory and gathers rows
only from a whole tensor; here rows are read with `pread`, run by run, into their place in the result, so that the
memory in use is that of the result, and a file that shrinks is an error rather than a SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..files import open_regular
from .safetensors_header import LENGTH_BYTES, TensorSpan, header_length, parse_header
from .stream import Bytes, Fill, Job, Rows, WeightsFile

# What one reader takes at once.
_SHARE_BYTES = 512 << 10

Block = list[tuple[int, int, int]]
"""Parts of a file, read by one thread: (offset in the file, offset in the output, bytes)."""


class SafetensorsFile(WeightsFile):
    """A safetensors file on disk. The header is read and checked at once, data only on demand.

    Raises:
        CheckpointError: the file cannot be opened, or its header is false (`parse_header`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        fd = self._open()
        try:
            self.size_bytes = os.fstat(fd).st_size
            length = header_length(self._pread(fd, 0, min(64, self.size_bytes)), self.size_bytes, self.where)
            self.header = parse_header(self._pread(fd, LENGTH_BYTES, length), self.size_bytes, self.where)
        finally:
            os.close(fd)

    @property
    def tensors(self) -> Mapping[str, TensorSpan]:
        """Every tensor of the file by name."""
        return self.header.tensors

    @contextmanager
    def reading(self, name: str) -> Iterator[Fill]:
        """Open a tensor for reading; see `WeightsFile.reading`."""
        span = self.tensors[name]
        fd = self._open()

        def fill(rows: Rows, out: Bytes) -> Sequence[Job]:
            view = out.reshape(-1).data
            if isinstance(rows, slice):
                blocks = _cut(span.offset + rows.start * span.row_bytes, len(view))
            else:
                blocks = list(_row_blocks(rows, span.offset, span.row_bytes))
            return [partial(self._fill, fd, view, block) for block in blocks]

        try:
            if (size := os.fstat(fd).st_size) != self.size_bytes:
                raise self._changed(size)
            yield fill
        finally:
            os.close(fd)

    def _fill(self, fd: int, view: memoryview, block: Block) -> None:
        for offset, start, size in block:
            done = 0
            while done < size:
                done += self._read_some(fd, offset + done, view[start + done : start + size])

    def _read_some(self, fd: int, offset: int, into: memoryview) -> int:
        try:
            count = os.preadv(fd, [into], offset)
        except OSError as error:
            raise CheckpointError.at(
                self.where, f"cannot be read at offset {offset:,}: {error.strerror}.\nCheck the disk."
            ) from error
        if count == 0:
            raise self._changed(offset)
        return count

    def _pread(self, fd: int, offset: int, size: int) -> bytes:
        raw = bytearray(size)
        self._fill(fd, memoryview(raw), [(offset, 0, size)])
        return bytes(raw)

    def _changed(self, size_bytes: int) -> CheckpointError:
        return CheckpointError.at(
            self.where,
            f"had {self.size_bytes:,} bytes when it was opened and has {size_bytes:,} now.\n"
            "Something has changed the file in the meantime: try again when it is complete.",
            expected=self.size_bytes,
            found=size_bytes,
        )

    def _open(self) -> int:
        try:
            return open_regular(self.path)
        except OSError as error:
            raise CheckpointError.at(
                self.where, f"cannot be opened: {error.strerror}.\nExpected a file of weights."
            ) from error


def _cut(offset: int, size_bytes: int) -> list[Block]:
    """Return blocks of one part each that cover a stretch of the file."""
    share = _SHARE_BYTES
    return [[(offset + start, start, min(share, size_bytes - start))] for start in range(0, size_bytes, share)]


def _row_blocks(ids: NDArray[np.int64], offset: int, row_bytes: int) -> Iterator[Block]:
    """Yield blocks with one part for each run of consecutive ids, of which there is at least one.

    Ids 4, 5, 6, 9 of rows of 8 bytes at offset 100 are two runs: (132, 0, 24) and (172, 24, 8).
    """
    max_rows = max(1, _SHARE_BYTES // row_bytes)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    # A run also ends where a block does, so that a long run is still read by several threads.
    starts = np.union1d(np.concatenate([[0], breaks]), np.arange(0, len(ids), max_rows))
    counts = np.diff(np.append(starts, len(ids)))
    parts = np.stack([offset + ids[starts] * row_bytes, starts * row_bytes, counts * row_bytes], axis=1)
    for block in np.split(parts, np.flatnonzero(np.diff(starts // max_rows)) + 1):
        yield [(at, out, size) for at, out, size in block.tolist()]
