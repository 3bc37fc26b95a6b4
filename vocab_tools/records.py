"""Blocks: pieces of a corpus of a few megabytes that travel to the workers, and the records in them.

JSON lines and plain text are read as bytes, and each line is parsed by itself: the builders of `datasets` infer types
from whole batches (the text "2024-01-01" comes back as a date, chats with and without tool calls do not fit together)
and drop line breaks. A block of a plain local file is a range of bytes that the worker reads again; blocks of packed
files, arrays, tables and files of the Hub carry bytes or rows. Every field of a .csv or .tsv file is text.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from .errors import CorpusError

if TYPE_CHECKING:
    import pyarrow as pa

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Suffixes of tables of fields, and what separates the fields."""
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Suffixes of packed files, and Arrow's names of their formats."""
BLOCK_BYTES = 4 << 20
TEXT_DOCUMENT_BYTES = 4 << 10
MAX_PARAGRAPH_BYTES = 64 << 10
BATCH_ROWS = 100

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadRecord:
    """Reason why a record cannot be read."""

    reason: str


@dataclass(frozen=True)
class LinesBlock:
    """Lines of JSON, or plain text: the bytes from `start` to `stop` of an (unpacked) file.

    Attributes:
        shard, path: ordinal of the file, and the file or its address on the Hub.
        size: its share of `OpenSource.size`, for the progress bar.
        data: its bytes, where the worker cannot read them.
        first: number of its first line, or its first record of an array, from 0.
    """

    shard: int
    size: int
    path: str
    is_text: bool
    start: int
    stop: int
    data: bytes | None
    first: int
    unit: str = "line"

    def records(self, column: str | None) -> Iterator[tuple[int, Any]]:
        """Yield the number of each record's line, and the column's value (None: the whole row) or a BadRecord."""
        data = self.data
        if data is None:
            with reading(self.path), Path(self.path).open("rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
            if len(data) < self.stop - self.start:
                raise CorpusError(f"{self.path}: it became shorter while it was counted.")
        if self.start == 0:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if self.is_text:
            return _texts(data)
        lines = enumerate(data.split(b"\n"))
        return ((number, _value(line, column)) for number, line in lines if line and not line.isspace())

    def place(self, number: int) -> str:
        """Name the file and the line."""
        return f"{self.path}, {self.unit} {self.first + number + 1}"


@dataclass(frozen=True)
class RowsBlock:
    """Rows of a table, in memory, as `LinesBlock` has lines.

    Attributes:
        where: the file, or the dataset, its split and shard.
        data: the column, or all columns as structs; None where only places are wanted.
    """

    shard: int
    size: int
    where: str
    first: int
    data: pa.ChunkedArray | None

    def records(self, column: str | None) -> Iterator[tuple[int, Any]]:
        """Yield the number of each row and its value; `column` was chosen when the block was read."""
        assert self.data is not None
        yield from enumerate(self.data.to_pylist())

    def place(self, number: int) -> str:
        """Name the file or dataset, and the row, from 0."""
        return f"{self.where}, row {self.first + number}"


Block = LinesBlock | RowsBlock
"""A run of records of one shard: of one file, or of one part of a dataset. `replace(block, data=None)` knows places."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what reading a file raises into a CorpusError that names it."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"{path}: cannot be read: {str(error).rstrip('.')}.") from error


def _value(line: bytes, column: str | None) -> Any:
    try:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            # The standard library accepts NaN, and its messages say more.
            row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return BadRecord(f"not JSON: {error}; one record a line is expected")
    if not isinstance(row, dict):
        return BadRecord(f"expected a JSON object, found {type(row).__name__}")
    if column is None or column in row:
        return row if column is None else row[column]
    return BadRecord(f"no column {column!r}; the line has {', '.join(map(repr, row)) or 'none'}")


def _texts(data: bytes) -> Iterator[tuple[int, Any]]:
    for start, stop in text_documents(data):
        try:
            yield start, data[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            at = start + error.start
            yield data.count(b"\n", 0, at), BadRecord(f"not UTF-8 text: byte 0x{data[at]:02x}, {error.reason}")


def text_documents(data: bytes) -> list[tuple[int, int]]:
    """Split plain text into documents: paragraphs (ended by a blank line), joined until they fill 4 KiB.

    A paragraph longer than 64 KiB is cut, see `cut_text`. Returns each document's (start, stop) in bytes, without gaps.
    """
    stops = [0]
    while (start := stops[-1]) < len(data):
        if found := _BLANK_LINE.search(data, start + TEXT_DOCUMENT_BYTES - 1, start + MAX_PARAGRAPH_BYTES):
            stops.append(found.end())
        elif start + MAX_PARAGRAPH_BYTES < len(data):
            stops.append(start + cut_text(data[start : start + MAX_PARAGRAPH_BYTES]))
        else:
            stops.append(len(data))
    return list(itertools.pairwise(stops))


def cut_text(data: bytes) -> int:
    """Return where to cut text that continues: after the last blank line, else line end, else space, else character."""
    blank_lines = list(_BLANK_LINE.finditer(data))
    if blank_lines:
        return blank_lines[-1].end()
    if cut := (data.rfind(b"\n") + 1 or data.rfind(b" ") + 1):
        return cut
    cut = len(data)
    while cut > max(1, len(data) - 3) and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    # Before a lead byte whose continuation may be beyond the end; bytes that are not UTF-8 are cut anywhere.
    return cut - 1 if cut > 1 and data[cut - 1] >= 0xC0 else len(data)


def file_blocks(path: str, shard: int, form: str) -> Iterator[Block]:
    """Cut a file in the form that a suffix names into blocks, an array whole; raises what reading it raises."""
    import fsspec
    import pyarrow as pa

    is_text = form == ".txt"
    num_read = start = first = 0
    buffer = b""
    suffix = Path(path).suffix.lower()
    is_plain = suffix not in PACKED and "://" not in path
    with fsspec.open(path, "rb") if "://" in path else Path(path).open("rb") as packed:
        file = pa.CompressedInputStream(packed, PACKED[suffix]) if suffix in PACKED else packed
        if form in SEPARATORS:
            # It closes the file once nobody holds it.
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
            yield from _record_blocks(path, shard, _fields(path, text, SEPARATORS[form]), lambda _: packed.tell())
            return
        ahead = file.read(BLOCK_BYTES)
        if b"\0" in ahead[:4]:
            raise CorpusError(f"{path}: not UTF-8 text: NUL among its first bytes, as in UTF-16. Write it in UTF-8.")
        if not is_text and ahead.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
            try:
                records, size = json.loads(ahead + file.read()), packed.tell()
            except (ValueError, RecursionError) as error:
                expected = "Expected one array of records, or one record a line"
                raise CorpusError(f"{path}: not JSON: {error}. {expected}.") from error
            yield from _record_blocks(path, shard, iter(records), lambda number: size * number // len(records))
            return
        while buffer or ahead:
            buffer, ahead = buffer + ahead, file.read(BLOCK_BYTES)
            stop = len(buffer)
            if ahead and is_text:
                begin = max(0, stop - MAX_PARAGRAPH_BYTES)
                stop = begin + cut_text(buffer[begin:])
            elif ahead:
                stop = buffer.rfind(b"\n") + 1
            if stop:
                size, data = packed.tell() - num_read, None if is_plain else buffer[:stop]
                yield LinesBlock(shard, size, path, is_text, start, start + stop, data, first)
                num_read, start, first = num_read + size, start + stop, first + buffer.count(b"\n", 0, stop)
            buffer = buffer[stop:]


def _record_blocks(path: str, shard: int, records: Iterator[Any], bytes_read: Callable[[int], int]) -> Iterator[Block]:
    """Write records as lines of JSON; `bytes_read`: how much of the file has been read with the first N of them."""
    first = num_read = 0
    lines = bytearray()
    for number, line in enumerate(itertools.chain(map(json.dumps, records), [""])):
        if lines and (not line or len(lines) >= BLOCK_BYTES):
            size = bytes_read(number) - num_read
            yield LinesBlock(shard, size, path, False, 0, len(lines), bytes(lines), first, "record")
            first, num_read = number, num_read + size
            lines.clear()
        lines += line.encode() + b"\n"


def _fields(path: str, text: io.TextIOWrapper, separator: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table of fields by the names in its first line; CorpusError with the line where it breaks."""
    # Python's limit, a C long, is the same for every reader of the process, and lower than a long chat.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    table = csv.reader(text, delimiter=separator, strict=True)
    rows = filter(None, table)
    try:
        names = next(rows, [])
        if "\0" in "".join(names):
            raise csv.Error("a column's name holds NUL, as UTF-16 without a byte order mark does: it is not UTF-8 text")
        if len({*names}) < len(names):
            problem = f"two columns have one name, of {', '.join(names)}"
            raise CorpusError(f"{path}, line {table.line_num}: {problem}. Rename one of them.")
        if len(names) == 1 and any(other in names[0] for other in ",;\t|"):
            separated = "fields are separated by commas in .csv, by tabs in .tsv"
            raise csv.Error(f"found one column {names[0]!r}: {separated}")
        for row in rows:
            if len(row) != len(names):
                raise csv.Error(f"expected {len(names)} fields, as in the first line, found {len(row)}")
            yield dict(zip(names, row, strict=True))
    except csv.Error as error:
        advice = "Write it with a CSV writer's quotes, or as .jsonl"
        raise CorpusError(f"{path}, line {table.line_num}: {error}. {advice}.") from error
    except UnicodeDecodeError as error:
        # The piece that cannot be decoded continues what was read.
        line = table.line_num + len((error.object[: error.start] + b"x").splitlines())
        raise CorpusError(f"{path}, line {line}: not UTF-8 text: {error.reason}. Write it in UTF-8.") from error


def rows_blocks(
    tables: Iterator[pa.Table | pa.RecordBatch], column: str, shard: int, where: str, bytes_per_row: float = 0.0
) -> Iterator[RowsBlock]:
    """Join small tables to blocks of one column ("": all of them as structs); raises what `tables` raises."""
    import pyarrow as pa

    chunks: list[pa.Array] = []
    first = 0
    for table in itertools.chain(tables, [None]):
        if table is not None:
            names = table.schema.names
            if column and column not in names:
                raise CorpusError(f"{where}: no column {column!r}; it has {', '.join(names)}.")
            if len({*names}) < len(names):
                raise CorpusError(f"{where}: two columns have one name, of {', '.join(names)}. Rename one of them.")
            values = table.column(column) if column else table.to_struct_array()
            chunks.extend(values.chunks if isinstance(values, pa.ChunkedArray) else [values])
        if chunks and (table is None or sum(chunk.nbytes for chunk in chunks) >= BLOCK_BYTES):
            rows = pa.chunked_array(chunks)
            yield RowsBlock(shard, int(bytes_per_row * len(rows)), where, first, rows)
            chunks, first = [], first + len(rows)


def parquet_blocks(path: str, shard: int, size: int, column: str) -> Iterator[Block]:
    """Read one column of a Parquet file ("": all); raises what the file system or Arrow raises."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=1 << 20) as file:
        wanted = [column] if column in file.schema_arrow.names else None
        tables = file.iter_batches(batch_size=BATCH_ROWS, columns=wanted, use_threads=False)
        yield from rows_blocks(tables, column, shard, path, size / max(1, file.metadata.num_rows))
