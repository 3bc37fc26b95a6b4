"""Blocks: the pieces of a corpus that travel to the workers, a few megabytes each, and the records in them.

JSON lines and plain text are read as bytes, and each line is parsed by itself: the builders of `datasets` infer types
from whole batches (the text "2024-01-01" comes back as a date, chats with and without tool calls do not fit together)
and drop line breaks. A block of a plain file is a range of bytes that the worker reads; what is packed, or streamed
from the Hub, is unpacked here and travels with its bytes or rows. Where blocks end depends on the file alone, so that
the same text in a packed file gives the same documents.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import CorpusError

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 4 << 20
MAX_RECORD_BYTES = 32 << 20
TEXT_DOCUMENT_BYTES = 4 << 10
MAX_PARAGRAPH_BYTES = 64 << 10

_READ_BYTES = 64 << 10
_ROWS = 100
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadRecord:
    """Reason why a record cannot be read."""

    reason: str


@dataclass(frozen=True)
class LinesBlock:
    """Lines of JSON, or plain text.

    Attributes:
        shard: ordinal of the file.
        size: its share of `OpenSource.size`, for the progress bar.
        fault: why nothing behind its records can be read; None where there is no fault.
        path: the file, or its address on the Hub.
        unit: what is counted to name a place: "line", or "record" of an array.
        is_text: whether it is plain text.
        start, stop: its bytes in the (unpacked) file, where the worker reads the file; `stop` is None for `data`.
        first: number of its first line, from 0; None where nobody has counted lines.
        data: its bytes, where the worker cannot read them.
    """

    shard: int
    size: int
    fault: str | None
    path: str
    unit: str
    is_text: bool
    start: int
    stop: int | None = None
    first: int | None = None
    data: bytes | None = None

    def records(self, column: str | None) -> Iterator[tuple[int, Any]]:
        """Yield the number of each record's line, and the column's value (None: all of it) or a BadRecord.

        Text has no column and comes in documents, see `text_documents`.
        """
        data = _range_of(self.path, self.start, self.stop) if self.data is None else self.data
        if self.start == 0:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        yield from _texts(data) if self.is_text else _values(data.split(b"\n"), column)
        if self.fault is not None:
            yield data.count(b"\n"), BadRecord(self.fault)

    def place(self, number: int) -> str:
        """Say the file and the line; where nobody has counted lines, this reads the file up to there."""
        first = _lines_before(self.path, self.start) if self.first is None else self.first
        return f"{self.path}, {self.unit} {first + number + 1}"


@dataclass(frozen=True)
class RowsBlock:
    """Rows of one Arrow column, in memory.

    Attributes:
        shard, size, fault: as in `LinesBlock`.
        where: the file, or the dataset, its split and shard.
        first: number of its first row, from 0.
        data: the column; None where there is no row, or only places are wanted.
    """

    shard: int
    size: int
    fault: str | None
    where: str
    first: int
    data: pa.ChunkedArray | None

    def records(self, column: str | None) -> Iterator[tuple[int, Any]]:
        """Yield the number of each row and its value, or a BadRecord; `column` was chosen before."""
        rows = [] if self.data is None else self.data
        try:
            yield from enumerate([] if self.data is None else self.data.to_pylist())
        except UnicodeDecodeError:
            # Arrow does not promise that its strings are UTF-8; the place is that of the block.
            yield 0, BadRecord("a text of these rows is not UTF-8")
        if self.fault is not None:
            yield len(rows), BadRecord(self.fault)

    def place(self, number: int) -> str:
        """Say file or dataset, and the row, from 0."""
        return f"{self.where}, row {self.first + number}"


Block = LinesBlock | RowsBlock
"""A run of records of one shard: of one file, or of one part of a dataset. `replace(block, data=None)` knows places."""


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line of a JSON-lines file.

    Raises:
        ValueError: it is too long, not UTF-8, not JSON, or not an object; the message says which.
    """
    import orjson

    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"the line is too long: at most {MAX_RECORD_BYTES:,} bytes")
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        # The standard library decides: it accepts NaN, and its messages say more.
        row = _parse_strictly(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def _parse_strictly(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
        row = json.loads(text)
        # A text that holds half of a surrogate pair has no UTF-8.
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: byte 0x{line[error.start]:02x}, column {error.start + 1}") from error
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is not a character") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    return row


def _values(lines: list[bytes], column: str | None) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            row = parse_line(line)
            yield number, row if column is None else row[column]
        except ValueError as error:
            yield number, BadRecord(str(error))
        except KeyError:
            yield number, BadRecord(f"no column {column!r}; the line has {', '.join(map(repr, row)) or 'none'}")


def _texts(data: bytes) -> Iterator[tuple[int, Any]]:
    for start, stop in text_documents(data):
        try:
            yield start, data[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            at = start + error.start
            yield data.count(b"\n", 0, at), BadRecord(f"not UTF-8 text: byte 0x{data[at]:02x}, {error.reason}")


def text_documents(data: bytes) -> list[tuple[int, int]]:
    """Split plain text into documents: paragraphs (ended by a blank line), joined until they fill 4 KiB.

    A paragraph longer than 64 KiB is cut, see `cut_text`. Nothing is dropped: the documents follow each other
    without gaps.

    Returns:
        (start, stop) byte offsets of each document.
    """
    documents = []
    start = 0
    while start < len(data):
        found = _BLANK_LINE.search(data, start + TEXT_DOCUMENT_BYTES - 1, start + MAX_PARAGRAPH_BYTES)
        if found:
            stop = found.end()
        elif start + MAX_PARAGRAPH_BYTES < len(data):
            stop = start + cut_text(data[start : start + MAX_PARAGRAPH_BYTES])
        else:
            stop = len(data)
        documents.append((start, stop))
        start = stop
    return documents


def cut_text(data: bytes) -> int:
    """Return where to cut text that continues: after the last blank line, else line end, else space, else character."""
    blank_lines = list(_BLANK_LINE.finditer(data))
    if blank_lines:
        return blank_lines[-1].end()
    for mark in (b"\n", b" "):
        cut = data.rfind(mark) + 1
        if cut:
            return cut
    cut = len(data)
    while cut > max(1, len(data) - 3) and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    # Before a lead byte whose continuation may be beyond the end; bytes that are not UTF-8 are cut anywhere.
    return cut - 1 if cut > 1 and data[cut - 1] >= 0xC0 else len(data)


# Plain files: ranges of bytes


def plain_blocks(path: str, shard: int, size: int, is_text: bool) -> Iterator[Block]:
    """Cut a plain file of `size` bytes into ranges without reading it, but for a look at where each ends.

    Every multiple of BLOCK_BYTES is moved to a line's end behind it, or for text to the best cut before it.
    """
    start = 0
    with _readable(path) as file:
        for offset in range(BLOCK_BYTES, size + BLOCK_BYTES, BLOCK_BYTES):
            stop = size if offset >= size else _text_cut(file, offset) if is_text else _line_end(file, offset, size)
            # A line may be longer than a block.
            if stop > start:
                yield LinesBlock(shard, stop - start, None, path, "line", is_text, start, stop)
                start = stop


def _line_end(file: BinaryIO, offset: int, size: int) -> int:
    file.seek(offset - 1)
    while piece := file.readline(_READ_BYTES):
        if piece.endswith(b"\n"):
            return file.tell()
    return size


def _text_cut(file: BinaryIO, offset: int) -> int:
    start = max(0, offset - MAX_PARAGRAPH_BYTES)
    file.seek(start)
    return start + cut_text(file.read(offset - start))


def _range_of(path: str, start: int, stop: int | None) -> bytes:
    assert stop is not None
    # What is beyond the bound belongs to a last line that is too long.
    wanted = min(stop - start, BLOCK_BYTES + MAX_RECORD_BYTES + 1)
    with _readable(path) as file:
        file.seek(start)
        data = file.read(wanted)
    if len(data) != wanted:
        raise CorpusError.at(path, "became shorter while it was being counted. Start again when nothing writes to it.")
    return data


def _lines_before(path: str, stop: int) -> int:
    lines, left = 0, stop
    with _readable(path) as file:
        while left > 0 and (window := file.read(min(left, BLOCK_BYTES))):
            lines += window.count(b"\n")
            left -= len(window)
    return lines


def _readable(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}.") from error


# Streams: packed files, files of the Hub, arrays


def _open_zstd(raw: BinaryIO) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")


_UNPACK: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".zst": _open_zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
PACKED = tuple(_UNPACK)


class Stream:
    """The unpacked bytes of a file, which end where it is damaged.

    Attributes:
        fault: how it is damaged; None while no damage was met.
    """

    def __init__(self, path: str) -> None:
        self.fault: str | None = None
        self._suffix = Path(path).suffix.lower()
        self._raw = _open_raw(path)
        self._unpacked: Any = _UNPACK[self._suffix](self._raw) if self._suffix in _UNPACK else self._raw
        self._ahead = b""
        self._told = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        """Read `size` bytes, and less only at the end or before the damage."""
        pieces = [self._ahead]
        left = size - len(self._ahead)
        self._ahead = b""
        while left > 0 and self.fault is None and (piece := self._piece()):
            pieces.append(piece)
            left -= len(piece)
        data = b"".join(pieces)
        self._ahead = data[size:]
        return data[:size]

    def rest_of_line(self) -> tuple[bytes, int]:
        """Read to the end of a line; returns what of it is not beyond the bound of a record, and how much was."""
        kept, dropped = b"", 0
        while piece := self.read(_READ_BYTES):
            stop = piece.find(b"\n") + 1
            if stop:
                self._ahead = piece[stop:] + self._ahead
                piece = piece[:stop]
            if len(kept) <= MAX_RECORD_BYTES:
                kept += piece
            else:
                dropped += len(piece)
            if stop:
                break
        return kept, dropped

    def begins_array(self) -> bool:
        """Whether the first bytes begin an array rather than an object; reads on as if nobody had looked."""
        head = self.read(_READ_BYTES)
        self._ahead = head + self._ahead
        return head.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")

    def moved(self) -> int:
        """Return how many bytes of the file itself were read since the last call."""
        before, self._told = self._told, self._raw.tell()
        return self._told - before

    def _piece(self) -> bytes:
        # Small: a call that meets damage loses what it had unpacked before.
        try:
            piece: bytes = self._unpacked.read(_READ_BYTES)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # An OSError with a number is the system's, one of another class the Hub's: the rest are the unpackers'.
            if isinstance(error, OSError) and (type(error) not in _OF_UNPACKERS or error.errno is not None):
                raise
            self.fault = f"the {self._suffix} stream is damaged from about here: {error}"
            return b""
        return piece


_OF_UNPACKERS = (OSError, gzip.BadGzipFile)


def _open_raw(path: str) -> BinaryIO:
    if "://" not in path:
        return _readable(path)
    import fsspec

    opened: BinaryIO = fsspec.open(path, "rb").open()
    return opened


def stream_blocks(path: str, shard: int, is_text: bool) -> Iterator[Block]:
    """Read a file from its beginning to its end, as blocks that hold what they are about."""
    with Stream(path) as stream:
        if not is_text and stream.begins_array():
            yield from _array_blocks(stream, path, shard)
        else:
            yield from _lines_of(stream, path, shard, is_text)


def _lines_of(stream: Stream, path: str, shard: int, is_text: bool) -> Iterator[Block]:
    """Cut a stream where `plain_blocks` cuts a file."""
    held, start, first, offset, ended = b"", 0, 0, BLOCK_BYTES, False
    while not ended:
        data, dropped = held + stream.read(offset - start - len(held)), 0
        held, ended = b"", len(data) < offset - start
        if is_text and not ended:
            begin = max(0, len(data) - MAX_PARAGRAPH_BYTES)
            cut = begin + cut_text(data[begin:])
            data, held = data[:cut], data[cut:]
        elif not ended and not data.endswith(b"\n"):
            rest, dropped = stream.rest_of_line()
            data += rest
        if stream.fault is not None:
            # Bytes after the last line end belong to a line that was cut off.
            data, ended = data[: data.rfind(b"\n") + 1], True
        yield LinesBlock(shard, stream.moved(), stream.fault, path, "line", is_text, start, None, first, data)
        start, first = start + len(data) + dropped, first + data.count(b"\n")
        offset = max(offset, start - start % BLOCK_BYTES) + BLOCK_BYTES


def _array_blocks(stream: Stream, path: str, shard: int) -> Iterator[Block]:
    """Read one array of records as lines of JSON, a record a line."""
    lines, first, fault = bytearray(), 0, None
    try:
        for record in _array_records(stream):
            lines += record + b"\n"
            if len(lines) >= BLOCK_BYTES:
                yield LinesBlock(shard, stream.moved(), None, path, "record", False, first, None, first, bytes(lines))
                first += lines.count(b"\n")
                lines.clear()
    except (ValueError, RecursionError) as error:
        fault = stream.fault or f"the array cannot be read from here on: {error}"
    yield LinesBlock(shard, stream.moved(), fault, path, "record", False, first, None, first, bytes(lines))


def _array_records(stream: Stream) -> Iterator[bytes]:
    """Yield the JSON of each record of an array, in one line.

    Raises:
        ValueError: what follows is no array, or it is not read to its end.
    """
    decode = json.JSONDecoder().raw_decode
    to_text = codecs.getincrementaldecoder("utf-8-sig")().decode
    held = to_text(stream.read(BLOCK_BYTES))
    at, is_between = held.index("[") + 1, False
    while True:
        while at < len(held) and (held[at].isspace() or (is_between and held[at] == ",")):
            is_between = is_between and held[at] != ","
            at += 1
        if held[at : at + 1] == "]":
            if held[at + 1 :].strip() or stream.read(_READ_BYTES).strip():
                raise ValueError("the array ends here, but the file continues")
            return
        try:
            if is_between and at < len(held):
                raise ValueError("expected a comma between two records")
            _, stop = decode(held, at)
        except json.JSONDecodeError as error:
            more = to_text(stream.read(BLOCK_BYTES))
            if not more or len(held) - at > MAX_RECORD_BYTES:
                raise ValueError(f"{error.msg}, and the record does not end") from error
            held, at = held[at:] + more, 0
            continue
        # Line ends stand between the parts of a record only: strings have none.
        yield held[at:stop].replace("\n", " ").encode()
        at, is_between = stop, True


# Tables: Parquet files, and what `datasets` streams


def rows_blocks(
    tables: Iterator[pa.Table | pa.RecordBatch], column: str, shard: int, where: str, size_of_row: float = 0.0
) -> Iterator[RowsBlock]:
    """Join small tables to blocks of one column; raises what `tables` raises."""
    import pyarrow as pa

    held: list[pa.Array] = []
    first = 0
    for table in itertools.chain(tables, [None]):
        if table is not None:
            if column not in table.schema.names:
                raise CorpusError(f"{where}: no column {column!r}; it has {', '.join(table.schema.names)}.")
            values = table.column(column)
            held.extend(values.chunks if isinstance(values, pa.ChunkedArray) else [values])
        if held and (table is None or sum(chunk.nbytes for chunk in held) >= BLOCK_BYTES):
            rows = pa.chunked_array(held)
            yield RowsBlock(shard, int(size_of_row * len(rows)), None, where, first, rows)
            held, first = [], first + len(rows)


def parquet_blocks(path: str, shard: int, size: int, column: str) -> Iterator[Block]:
    """Read one column of a Parquet file; damage ends it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    reached = 0
    try:
        with pq.ParquetFile(path, buffer_size=1 << 20) as file:
            wanted = [column] if column in file.schema_arrow.names else None
            tables = file.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False)
            for block in rows_blocks(tables, column, shard, path, size / max(1, file.metadata.num_rows)):
                yield block
                reached = block.first + len(block.data or ())
    except (OSError, pa.ArrowException) as error:
        yield RowsBlock(shard, 0, f"damaged Parquet file: {str(error).rstrip('.')}", path, reached, None)


def parquet_rows(path: str) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a Parquet file, one by one as a row may be large, or what is wrong with the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1):
                yield batch.to_pylist()[0]
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        yield f"{path}: damaged Parquet file: {str(error).rstrip('.')}."
