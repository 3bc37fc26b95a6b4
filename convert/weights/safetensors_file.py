"""One safetensors file: its header checked in full before anything is trusted, its rows read straight from disk.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, the little-endian length N of the header; N
bytes of JSON that map each name to dtype, shape and data_offsets [begin, end) relative to the end of the header; the
data. The tensors tile the data without hole or overlap. The library behind `safe_open` checks the same rules, but it
maps the file into memory and gathers rows only from a whole tensor; here rows are read with `pread`, run by run, into
their place in the result, so that the memory in use is that of the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError
from .types import FETCH_AGAIN, TensorInfo, shorten

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# The limit of the safetensors library itself; a larger header is a lie or not a header.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8

DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype that the format knows (safetensors 0.8)."""

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip

_MAX_INT = 2**63 - 1
_MAX_DIMENSIONS = 64  # torch's own limit
# Several readers keep a solid-state disk busy and copy from the page cache on several cores; more did not help.
_READERS = 4
_BLOCK_BYTES = 4 << 20
# Of a piece, what one reader takes at once.
_SHARE_BYTES = 1 << 20
# Buffers for pieces: one is being filled, one is with the caller, and one or two are still being hashed or written.
_RING = 4

Block = list[tuple[int, int, int]]
"""Parts of a file, read by one thread: (offset in the file, offset in the output, bytes)."""
Blocks = list[Block]


def torch_dtype(name: str, where: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype; CheckpointError for those torch cannot hold (F4, F6)."""
    import torch

    try:
        return getattr(torch, _TORCH_NAMES[name])  # type: ignore[no-any-return]
    except KeyError:
        raise CheckpointError(
            f"{where}: dtype {name} is packed below one byte and cannot be read as a tensor here.\n"
            "Use a checkpoint that stores this tensor in bf16, fp16, fp32 or an 8-bit type."
        ) from None


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """Return the safetensors spelling of a torch dtype, or None where the format has none."""
    spelled = str(dtype).removeprefix("torch.")
    return next((name for name, torch_name in _TORCH_NAMES.items() if torch_name == spelled), None)


@dataclass(frozen=True)
class TensorSpan(TensorInfo):
    """A tensor and the place of its bytes in the file: `offset` counts from the first byte of the file."""

    offset: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A header that has passed every check.

    Attributes:
        tensors: by name, in file order.
        metadata: the strings under `__metadata__`.
        data_offset: where the data begins, in bytes from the start of the file.
    """

    tensors: Mapping[str, TensorSpan]
    metadata: Mapping[str, str]
    data_offset: int


def header_length(first_bytes: bytes, file_size_bytes: int, where: str) -> int:
    """Return the length in bytes of the JSON header announced by the first 8 bytes of a file.

    Raises:
        CheckpointError: the file is too short to be safetensors, or the length cannot be true.
    """
    if len(first_bytes) < LENGTH_BYTES or file_size_bytes < LENGTH_BYTES:
        raise CheckpointError(
            f"{where}: not a safetensors file: expected at least {LENGTH_BYTES} bytes, found {file_size_bytes:,}.\n"
            + FETCH_AGAIN
        )
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if first_bytes.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{where}: this is a Git LFS pointer, a text of {file_size_bytes:,} bytes, not the weights.\n"
            "Run `git lfs pull` in that folder, or fetch the repository with `hf download`."
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: not a safetensors file: its first 8 bytes announce a header of {length:,} bytes, "
            f"expected at most {MAX_HEADER_BYTES:,}.\n" + FETCH_AGAIN
        )
    if LENGTH_BYTES + length > file_size_bytes:
        raise CheckpointError(
            f"{where}: truncated: expected a header of {length:,} bytes after the first 8, "
            f"found a file of {file_size_bytes:,} bytes.\n" + FETCH_AGAIN
        )
    return length


def parse_header(raw: bytes, file_size_bytes: int, where: str) -> SafetensorsHeader:
    """Check a JSON header against the size of its file and return it.

    Args:
        raw: the bytes of the JSON text, without the 8 bytes before it.
        file_size_bytes: size of the whole file.
        where: the name of the file in messages.

    Raises:
        CheckpointError: the header is not the JSON that the format demands, or what it claims about names, dtypes,
            shapes and offsets contradicts itself or the size of the file.
    """
    entries = _load_object(raw, where)
    metadata = _metadata(entries.pop("__metadata__", {}), where)
    data_offset = LENGTH_BYTES + len(raw)
    spans = [_span(name, entry, data_offset, where) for name, entry in entries.items()]
    spans.sort(key=lambda span: (span.offset, span.size_bytes))
    end = data_offset
    for span in spans:
        if span.offset != end:
            problem = "overlaps the tensor before it" if span.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: tensor {shorten(span.name)} {problem}: expected its data at offset {end - data_offset:,}, "
                f"the header says {span.offset - data_offset:,}.\n" + FETCH_AGAIN
            )
        end += span.size_bytes
    if end != file_size_bytes:
        problem = "truncated" if end > file_size_bytes else "longer than its header says"
        raise CheckpointError(
            f"{where}: {problem}: the header describes {end:,} bytes, the file has {file_size_bytes:,}.\n" + FETCH_AGAIN
        )
    return SafetensorsHeader({span.name: span for span in spans}, metadata, data_offset)


def _load_object(raw: bytes, where: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: the header names {shorten(twice)} twice.\n" + FETCH_AGAIN)
        return found

    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{where}: not a safetensors file: expected a header that begins with '{{', found {shorten(raw[:16])}.\n"
            + FETCH_AGAIN
        )
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: the header is not valid JSON ({shorten(str(error))}).\n{FETCH_AGAIN}"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{where}: the header is not a JSON object.\n" + FETCH_AGAIN)
    return entries


def _metadata(metadata: object, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{where}: __metadata__ must map strings to strings, found {shorten(metadata)}.\n" + FETCH_AGAIN
        )
    return metadata


def _span(name: str, entry: object, data_offset: int, where: str) -> TensorSpan:
    label = f"{where}: tensor {shorten(name)}"
    if not _is_text(name):
        raise CheckpointError(f"{label}: the name is not valid Unicode text.\n" + FETCH_AGAIN)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{label}: expected dtype, shape and data_offsets, found {shorten(entry)}.\n" + FETCH_AGAIN
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{label}: unknown dtype {shorten(dtype)}, expected one of {', '.join(DTYPE_BITS)}.\n{FETCH_AGAIN}"
        )
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"{label}: shape must be a list of at most {_MAX_DIMENSIONS} sizes, found {shorten(shape)}.\n" + FETCH_AGAIN
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{label}: data_offsets must be [begin, end] with begin <= end, found {shorten(offsets)}.\n" + FETCH_AGAIN
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    needs = f"{shorten(bits)} bits" if bits % 8 else f"{shorten(bits // 8)} bytes"
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{label}: {dtype} of shape {shorten(shape)} takes {needs}, "
            f"the offsets span {offsets[1] - offsets[0]:,}.\n" + FETCH_AGAIN
        )
    return TensorSpan(name, dtype, tuple(shape), bits // 8, data_offset + offsets[0])


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_INT for size in value)


class SafetensorsFile:
    """A safetensors file on disk. The header is read and checked at once, data only on demand.

    Args:
        path: the file.
        name: how messages call it; the path by default.

    Raises:
        CheckpointError: the file cannot be opened, or its header is false (`parse_header`).
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.where = name or str(path)
        fd = self._open()
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.where}: expected a file of weights, found a folder or a device.")
            self.size_bytes = status.st_size
            length = header_length(self._pread(fd, 0, min(64, self.size_bytes)), self.size_bytes, self.where)
            self.header = parse_header(self._pread(fd, LENGTH_BYTES, length), self.size_bytes, self.where)
        finally:
            os.close(fd)

    @property
    def tensors(self) -> Mapping[str, TensorSpan]:
        """Every tensor of the file by name."""
        return self.header.tensors

    def read(self, name: str) -> tuple[torch.Tensor, str]:
        """Return the whole tensor in its own dtype and shape, and the sha256 of its bytes.

        Raises:
            KeyError: no such tensor.
            CheckpointError: the file has changed, cannot be read, or holds booleans other than 0 and 1.
        """
        span = self.tensors[name]
        return self._whole(span, span.shape, _cut(span.offset, span.size_bytes, _BLOCK_BYTES))

    def read_rows(self, name: str, ids: NDArray[np.int64]) -> tuple[torch.Tensor, str]:
        """Return rows `ids` [rows], in that order, as a tensor [rows, ...], and the sha256 of those bytes.

        Only these rows are read: neighbours in one call, everything else row by row. Ids may repeat.

        Raises:
            KeyError: no such tensor.
            CheckpointError: as `read`, or an id is outside the tensor, or the tensor has no rows.
        """
        span = self.tensors[name]
        check_row_ids(ids, span, self.where)
        blocks = list(_row_blocks(ids, span.offset, row_size(span), _BLOCK_BYTES))
        return self._whole(span, (len(ids), *span.shape[1:]), blocks)

    def pieces(self, name: str, ids: NDArray[np.int64] | None, piece_bytes: int) -> Generator[torch.Tensor, None, str]:
        """Yield a tensor, or its rows `ids`, in pieces of whole rows; see `Checkpoint.pieces`. Returns the sha256.

        Raises:
            KeyError: no such tensor.
            CheckpointError: as `read_rows`.
        """
        span = self.tensors[name]
        if not span.shape or span.size_bytes == 0 or (ids is not None and len(ids) == 0):
            value, digest = self.read(name) if ids is None else self.read_rows(name, ids)
            yield value
            return digest
        if ids is not None:
            check_row_ids(ids, span, self.where)
        size = row_size(span)
        step = max(1, piece_bytes // size)
        count = span.shape[0] if ids is None else len(ids)
        plans = (
            _cut(span.offset + start * size, min(step, count - start) * size, _SHARE_BYTES)
            if ids is None
            else list(_row_blocks(ids[start : start + step], span.offset, size, _SHARE_BYTES))
            for start in range(0, count, step)
        )
        dtype = torch_dtype(span.dtype, f"{self.where}: tensor {shorten(span.name)}")
        ring = [
            allocate_bytes(min(step, count) * size, f"{self.where}: tensor {shorten(span.name)}")
            for _ in range(min(_RING, -(-count // step)))
        ]
        return (yield from self._stream(span, plans, ring, dtype, size))

    def _stream(
        self, span: TensorSpan, plans: Iterator[Blocks], ring: list[torch.Tensor], dtype: torch.dtype, row_bytes: int
    ) -> Generator[torch.Tensor, None, str]:
        """Read ahead into a ring of buffers with several threads, hash in another, and yield what has been read.

        Fresh memory costs more than reading into it from the page cache, so a few buffers are used again and again.
        """
        digest = hashlib.sha256()
        fd = self._open()
        readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read")
        hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")
        hashed: list[Future[None] | None] = [None] * len(ring)

        def start(index: int) -> tuple[int, list[Future[None]]] | None:
            blocks = next(plans, None)
            if blocks is None:
                return None
            slot = index % len(ring)
            if (before := hashed[slot]) is not None:
                before.result()
            view = ring[slot].numpy().data
            size = blocks[-1][-1][1] + blocks[-1][-1][2]
            return size, [readers.submit(self._fill, fd, view, block) for block in blocks]

        try:
            self._refuse_changed(fd)
            index, ahead = 0, start(0)
            while ahead is not None:
                size, reads = ahead
                for read in reads:
                    read.result()
                slot = index % len(ring)
                piece = ring[slot][:size]
                hashed[slot] = hasher.submit(digest.update, piece.numpy().data)
                self._refuse_bad_booleans(span, piece, dtype)
                # With one buffer there is one piece, and nothing to read ahead.
                ahead = start(index + 1)
                yield piece.view(dtype).reshape(size // row_bytes, *span.shape[1:])
                index += 1
            hasher.shutdown()
            return digest.hexdigest()
        finally:
            readers.shutdown(cancel_futures=True)
            hasher.shutdown(cancel_futures=True)
            os.close(fd)

    def _whole(self, span: TensorSpan, shape: Sequence[int], blocks: Blocks) -> tuple[torch.Tensor, str]:
        """Read blocks, which tile the output in order, into a new tensor."""
        dtype = torch_dtype(span.dtype, f"{self.where}: tensor {shorten(span.name)}")
        flat = allocate_bytes(math.prod(shape) * dtype.itemsize, f"{self.where}: tensor {shorten(span.name)}")
        view = flat.numpy().data
        fd = self._open()
        try:
            self._refuse_changed(fd)
            digest = read_in_order(blocks, lambda block: self._fill(fd, view, block), view)
        finally:
            os.close(fd)
        self._refuse_bad_booleans(span, flat, dtype)
        return flat.view(dtype).reshape(tuple(shape)), digest

    def _refuse_bad_booleans(self, span: TensorSpan, flat: torch.Tensor, dtype: torch.dtype) -> None:
        import torch

        if dtype == torch.bool and flat.numel() and int(flat.max()) > 1:
            raise CheckpointError(
                f"{self.where}: tensor {shorten(span.name)}: booleans must be 0 or 1, found {int(flat.max())}.\n"
                + FETCH_AGAIN
            )

    def _fill(self, fd: int, view: memoryview, block: Block) -> None:
        for offset, start, size in block:
            done = 0
            while done < size:
                done += self._checked_read(
                    lambda at, into: os.preadv(fd, [into], at), offset + done, view[start + done : start + size]
                )

    def _checked_read(self, read: Callable[[int, memoryview], int], offset: int, into: memoryview) -> int:
        try:
            count = read(offset, into)
        except OSError as error:
            raise CheckpointError(
                f"{self.where}: cannot read at offset {offset:,}: {error.strerror}.\nCheck the disk."
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{self.where}: ends at offset {offset:,} although it had {self.size_bytes:,} bytes when opened.\n"
                "Something has changed the file in the meantime: try again when it is complete."
            )
        return count

    def _pread(self, fd: int, offset: int, size: int) -> bytes:
        raw = bytearray(size)
        self._fill(fd, memoryview(raw), [(offset, 0, size)])
        return bytes(raw)

    def _refuse_changed(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size != self.size_bytes:
            raise CheckpointError(
                f"{self.where}: had {self.size_bytes:,} bytes when it was opened and has {size:,} now.\n"
                "Something has changed the file in the meantime: try again when it is complete."
            )

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.where}: cannot be opened: {error.strerror}.") from error


def check_row_ids(ids: NDArray[np.int64], tensor: TensorInfo, where: str) -> None:
    """Raise CheckpointError unless `ids` [rows] all are rows of `tensor`."""
    if not tensor.shape:
        raise CheckpointError(f"{where}: tensor {shorten(tensor.name)} is a scalar and has no rows.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tensor.shape[0]:
        wrong = int(ids.max()) if int(ids.max()) >= tensor.shape[0] else int(ids.min())
        raise CheckpointError(
            f"{where}: tensor {shorten(tensor.name)}: row {wrong} was asked for, of {tensor.shape[0]}.\n"
            "The vocabulary and this checkpoint do not belong together."
        )


def allocate_bytes(size_bytes: int, where: str) -> torch.Tensor:
    """Return an uninitialised uint8 tensor [size_bytes]; CheckpointError where memory does not suffice."""
    import torch

    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{where}: {size_bytes:,} bytes do not fit into the memory of this machine.") from error


def row_size(tensor: TensorInfo) -> int:
    """Bytes of one row of a tensor; 0 where it has none."""
    return tensor.size_bytes // tensor.shape[0] if tensor.shape and tensor.shape[0] else 0


def read_in_order(blocks: Blocks, read: Callable[[Block], None], view: memoryview) -> str:
    """Read blocks with several threads and return the sha256 of `view`, hashed in order behind the readers."""
    digest = hashlib.sha256()
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read") if len(blocks) > 1 else None
    try:
        done: Iterable[None] = readers.map(read, blocks) if readers else map(read, blocks)
        for block, _ in zip(blocks, done, strict=True):
            digest.update(view[block[0][1] : block[-1][1] + block[-1][2]])
    finally:
        if readers:
            readers.shutdown(cancel_futures=True)
    return digest.hexdigest()


def _cut(offset: int, size_bytes: int, block_bytes: int) -> Blocks:
    """Return blocks of one part each that cover a stretch of the file."""
    return [
        [(offset + start, start, min(block_bytes, size_bytes - start))] for start in range(0, size_bytes, block_bytes)
    ]


def _row_blocks(ids: NDArray[np.int64], offset: int, row_bytes: int, block_bytes: int) -> Iterator[Block]:
    """Yield blocks with one part for each run of consecutive ids.

    Ids 4, 5, 6, 9 of rows of 8 bytes at offset 100 are two runs: (132, 0, 24) and (172, 24, 8).
    """
    if len(ids) == 0 or row_bytes == 0:
        return
    max_rows = max(1, block_bytes // row_bytes)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    # A run also ends where a block does, so that a long run is still read by several threads.
    starts = np.union1d(np.concatenate([[0], breaks]), np.arange(0, len(ids), max_rows))
    counts = np.diff(np.append(starts, len(ids)))
    parts = np.stack([offset + ids[starts] * row_bytes, starts * row_bytes, counts * row_bytes], axis=1)
    for block in np.split(parts, np.flatnonzero(np.diff(starts // max_rows)) + 1):
        yield [(at, out, size) for at, out, size in block.tolist()]
