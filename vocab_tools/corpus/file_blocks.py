"""A local file → its blocks, and the first records of it.

Plain text files are cut into byte ranges that the workers read for themselves; compressed ones are decompressed here,
block by block. Memory never holds more than one block and the longest record, whatever the file.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from .arrays import array_pieces
from .blocks import (
    BLOCK_BYTES,
    MAX_PARAGRAPH_BYTES,
    MAX_RECORD_BYTES,
    Block,
    BytesBlock,
    FaultBlock,
    RowGroupBlock,
    RowsBlock,
    cut_text,
    parse_line,
    too_long,
)
from .find import CorpusFile, open_file
from .packed import PackedReader, fault_of

_SCAN_BYTES = 64 << 10
# A file without a readable line is not read to its end.
_LINES_LOOKED_AT = 1000


def first_rows(file: CorpusFile) -> Iterable[dict[str, Any]]:
    """Yield the readable records of a file from its beginning, for a look at its columns; none for plain text."""
    if file.format == "txt":
        return ()
    return _first_parquet_rows(file) if file.format == "parquet" else _first_lines(file)


def _first_lines(file: CorpusFile) -> Iterator[dict[str, Any]]:
    try:
        with open_file(file) as data:
            for line in itertools.islice(_lines(file, data), _LINES_LOOKED_AT):
                if line.isspace():
                    continue
                with contextlib.suppress(ValueError):
                    yield parse_line(line.removeprefix(b"\xef\xbb\xbf"))
    except OSError:
        return


def _lines(file: CorpusFile, data: BinaryIO) -> Iterator[bytes]:
    if file.format == "json":
        return (line for piece in array_pieces(data, 0) for line in piece.lines.split(b"\n"))
    return iter(lambda: data.readline(MAX_RECORD_BYTES + 1), b"")


def _first_parquet_rows(file: CorpusFile) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as table:
            # One by one: a row may be large, and the first nearly always settles it.
            for batch in table.iter_batches(batch_size=1):
                yield batch.to_pylist()[0]
            yield dict.fromkeys(table.schema_arrow.names)
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return


def blocks_of(file: CorpusFile, shard: int, start: int, column: str) -> Iterator[Block]:
    """Cut one file into blocks, from the record at position `start` on."""
    if file.format == "parquet":
        return _parquet_blocks(file, shard, start, column)
    if file.format == "json":
        return _array_blocks(file, shard, start)
    return _packed_blocks(file, shard, start) if file.compressed else _plain_blocks(file, shard, start)


def _plain_blocks(file: CorpusFile, shard: int, start: int) -> Iterator[Block]:
    is_text = file.format == "txt"
    with open_file(file) as data:
        while start < file.size:
            stop = file.size
            if stop - start > BLOCK_BYTES:
                cut = _text_cut if is_text else _line_cut
                stop, whole = cut(data, start, file.size)
                if not whole:
                    yield FaultBlock(shard, start, stop, stop - start, too_long(stop - start))
                    start = stop
                    continue
            yield BytesBlock(shard, start, stop, stop - start, file.path, is_text)
            start = stop


def _text_cut(data: BinaryIO, start: int, size: int) -> tuple[int, bool]:
    tail_start = max(start, start + BLOCK_BYTES - MAX_PARAGRAPH_BYTES)
    data.seek(tail_start)
    return tail_start + cut_text(data.read(start + BLOCK_BYTES - tail_start)), True


def _line_cut(data: BinaryIO, start: int, size: int) -> tuple[int, bool]:
    """Return the end of the last line that ends within a block, or of the first line when it is longer than that.

    The flag is False when that line is longer than MAX_RECORD_BYTES.
    """
    window_stop = start + BLOCK_BYTES
    while window_stop > start:
        window_start = max(start, window_stop - _SCAN_BYTES)
        data.seek(window_start)
        found = data.read(window_stop - window_start).rfind(b"\n")
        if found >= 0:
            return window_start + found + 1, True
        window_stop = window_start
    stop = start + BLOCK_BYTES
    data.seek(stop)
    while window := data.read(_SCAN_BYTES):
        found = window.find(b"\n")
        if found >= 0:
            stop += found + 1
            break
        stop += len(window)
    return stop, stop - start <= MAX_RECORD_BYTES


def _array_blocks(file: CorpusFile, shard: int, start: int) -> Iterator[Block]:
    with open_file(file) as stream:
        reached = stream.skip(start) if isinstance(stream, PackedReader) else stream.seek(min(start, file.size))
        if reached < start:
            # The last block of an array stops one past the end.
            return
        reported = _compressed_position(stream)
        for piece in array_pieces(stream, start):
            moved = _compressed_position(stream) - reported
            reported += moved
            if piece.fault is None:
                yield BytesBlock(shard, piece.start, piece.stop, moved, file.path, False, piece.lines)
            else:
                yield FaultBlock(shard, piece.start, piece.stop, moved, piece.fault)


def _packed_blocks(file: CorpusFile, shard: int, start: int) -> Iterator[Block]:
    is_text = file.format == "txt"
    position = 0
    held = b""
    reported = 0
    with PackedReader(file.path) as stream:
        while True:
            wanted = BLOCK_BYTES if len(held) < BLOCK_BYTES else len(held) + BLOCK_BYTES
            held += stream.read(wanted - len(held))
            ended, fault = len(held) < wanted, fault_of(stream)
            if ended or is_text:
                tail = max(0, len(held) - MAX_PARAGRAPH_BYTES)
                cut = len(held) if ended else tail + cut_text(held[tail:])
            else:
                cut = held.rfind(b"\n") + 1
            if fault:
                # Bytes after the last line end belong to a line that was cut off.
                cut = held.rfind(b"\n") + 1
            moved = stream.raw.compressed_position - reported
            if not cut and not ended and len(held) > MAX_RECORD_BYTES:
                cut, rest = _drain_line(stream, len(held))
                yield from _from(start, FaultBlock(shard, position, position + cut, moved, too_long(cut)))
                held, position, reported = rest, position + cut, reported + moved
                continue
            if cut:
                yield from _from(
                    start, BytesBlock(shard, position, position + cut, moved, file.path, is_text, held[:cut])
                )
                held, position, reported = held[cut:], position + cut, reported + moved
            if fault:
                # One past the cut-off line, so that resuming after this block does not meet it again.
                stop = position + len(held) + 1
                yield from _from(start, FaultBlock(shard, position, stop, file.size - reported, fault))
            if ended:
                return


def _drain_line(stream: BinaryIO, length: int) -> tuple[int, bytes]:
    """Skip to the end of a line of which `length` bytes were read; returns its length and what follows it."""
    while True:
        window = stream.read(_SCAN_BYTES)
        found = window.find(b"\n")
        if found >= 0 or not window:
            return length + found + 1, window[found + 1 :]
        length += len(window)


def _from(start: int, block: Block) -> Iterator[Block]:
    if block.start >= start:
        yield block


def _parquet_blocks(file: CorpusFile, shard: int, start: int, column: str) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(file.path, buffer_size=1 << 20) as table:
            rows_total = max(1, table.metadata.num_rows)
            if column not in table.schema_arrow.names:
                reason = f"no column {column!r}; the file has {', '.join(table.schema_arrow.names)}"
                if start == 0:
                    yield FaultBlock(shard, 0, rows_total, file.size, reason)
                return
            for group in range(table.num_row_groups):
                metadata = table.metadata.row_group(group)
                rows = metadata.num_rows
                size = file.size * rows // rows_total
                if row + rows > start:
                    column_bytes = _column_bytes(metadata, column)
                    if column_bytes <= 2 * BLOCK_BYTES and row >= start:
                        yield RowGroupBlock(shard, row, row + rows, size, file.path, group)
                    else:
                        yield from _split_row_group(table, group, column, column_bytes, shard, row, start, size)
                row += rows
    except (OSError, pa.ArrowException) as error:
        if row >= start:
            yield FaultBlock(shard, row, row + 1, 0, f"damaged Parquet file: {str(error).rstrip('.')}")


def _column_bytes(metadata: Any, column: str) -> int:
    columns = (metadata.column(position) for position in range(metadata.num_columns))
    return sum(part.total_uncompressed_size for part in columns if part.path_in_schema.split(".")[0] == column)


def _split_row_group(
    table: Any, group: int, column: str, column_bytes: int, shard: int, row: int, start: int, size: int
) -> Iterator[Block]:
    import pyarrow as pa

    rows = table.metadata.row_group(group).num_rows
    batch_rows = max(1, rows * BLOCK_BYTES // max(1, column_bytes))
    batches = table.iter_batches(batch_size=batch_rows, row_groups=[group], columns=[column], use_threads=False)
    for batch in batches:
        values = pa.chunked_array([batch.column(0)])
        skipped = max(0, start - row)
        if skipped < len(values):
            stop = row + len(values)
            yield RowsBlock(shard, row + skipped, stop, size * len(values) // rows, values.slice(skipped))
        row += len(values)


def _compressed_position(stream: BinaryIO) -> int:
    return stream.raw.compressed_position if isinstance(stream, PackedReader) else stream.tell()


def inner_block(file: CorpusFile, shard: int, fraction: float) -> Block | None:
    """Return a block from within a large plain file, from the start of a line on; None for other files."""
    if file.compressed or file.format in ("json", "parquet") or file.size < 4 * BLOCK_BYTES:
        return None
    with open_file(file) as data:
        data.seek(int(file.size * fraction))
        skipped = data.readline(MAX_RECORD_BYTES)
        start = data.tell()
    return next(_plain_blocks(file, shard, start), None) if skipped.endswith(b"\n") else None


def line_of(file: CorpusFile, position: int) -> int:
    """Return the line number, from 1, of the byte at a position; reads the file up to there."""
    line, left = 1, position
    with open_file(file) as data:
        while left > 0 and (window := data.read(min(left, BLOCK_BYTES))):
            line += window.count(b"\n")
            left -= len(window)
    return line
