"""Blocks: the pieces of a corpus that travel to the workers, each a few megabytes, and the records inside them.

A record has a position that does not depend on how the corpus is cut: the byte offset of its first character in a
(decompressed) text file, the row number in a table. Position and shard (the ordinal of the file) make the document
index. Blocks are small and picklable; reading one needs nothing but the block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorpusError

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 4 << 20
MAX_RECORD_BYTES = 32 << 20
TEXT_DOCUMENT_BYTES = 4 << 10
MAX_PARAGRAPH_BYTES = 64 << 10

_POSITION_BITS = 40
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def document_index(shard: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of documents within a source, int64 [documents], from the shard and the positions in it."""
    return (np.int64(shard) << np.int64(_POSITION_BITS)) + positions


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read: where it begins and what is wrong with it."""

    shard: int
    position: int
    reason: str


@dataclass(frozen=True)
class Block:
    """A run of records of one shard.

    Attributes:
        shard: ordinal of the file or of the dataset's shard.
        start: position of the first record.
        stop: position after the last; the next block of the shard starts there.
        size: its share of `OpenCorpus.size`, for the progress bar.
    """

    shard: int
    start: int
    stop: int
    size: int

    def read(self, column: str) -> Records:
        """Load the records; only `column` of each is looked at."""
        raise NotImplementedError


class Records:
    """The records of one block, not yet parsed.

    Attributes:
        positions: int64 [records], ascending.
    """

    positions: NDArray[np.int64]

    def values(self, selected: NDArray[np.int64]) -> Iterator[Any]:
        """Yield the column's value, or a BadRecord, for each selected record (int64 [selected], ascending)."""
        raise NotImplementedError

    def texts(self, selected: NDArray[np.int64]) -> list[str] | None:
        """Return the selected values if all are strings, at a fraction of the cost of `values`; else None."""
        found = list(self.values(selected))
        return found if _all_strings(found) else None


@dataclass(frozen=True)
class FaultBlock(Block):
    """A part of a shard that cannot be read at all: one bad record."""

    reason: str

    def read(self, column: str) -> Records:
        """Return the one bad record."""
        return _Faults(self.shard, self.start, self.reason)


@dataclass(frozen=True)
class BytesBlock(Block):
    """A byte range of the text file `path`, or `data` where the file holds it in another form.

    It is whole lines of JSON, or plain text (`is_text`) cut where `cut_text` says.
    """

    path: str
    is_text: bool
    data: bytes | None = None

    def read(self, column: str) -> Records:
        """Split into lines, of which blank ones are not records, or into documents, see `text_documents`."""
        data = _bytes_of(self.path, self.start, self.stop) if self.data is None else self.data
        if self.is_text:
            return _Texts(self.shard, self.start, data)
        return _JsonLines(self.shard, self.start, data, column)


@dataclass(frozen=True)
class RowGroupBlock(Block):
    """One row group of a Parquet file, read by the worker that counts it."""

    path: str
    row_group: int

    def read(self, column: str) -> Records:
        """Read the one column."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                rows = file.read_row_group(self.row_group, columns=[column], use_threads=False)
            values = rows.column(column)
        except (OSError, pa.ArrowException, KeyError) as error:
            return _Faults(self.shard, self.start, f"row group {self.row_group} cannot be read: {error}")
        return _Rows(self.shard, self.start, values)


@dataclass(frozen=True)
class RowsBlock(Block):
    """Rows that are in memory already: one Arrow column."""

    values: pa.ChunkedArray

    def read(self, column: str) -> Records:
        """Return the rows; `column` was chosen before."""
        return _Rows(self.shard, self.start, self.values)


class _Faults(Records):
    def __init__(self, shard: int, position: int, reason: str) -> None:
        self.positions = np.array([position], np.int64)
        self._bad = BadRecord(shard, position, reason)

    def values(self, selected: NDArray[np.int64]) -> Iterator[Any]:
        for _ in selected:
            yield self._bad


class _JsonLines(Records):
    def __init__(self, shard: int, start: int, data: bytes, column: str) -> None:
        lines = data.split(b"\n")
        lengths = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
        offsets = start + np.cumsum(lengths) - lengths
        if start == 0:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        present = [position for position, line in enumerate(lines) if line and not line.isspace()]
        self.positions = offsets[present]
        self._lines = [lines[position] for position in present]
        self._shard = shard
        self._column = column

    def values(self, selected: NDArray[np.int64]) -> Iterator[Any]:
        column = self._column
        for record in selected.tolist():
            try:
                row = parse_line(self._lines[record])
                value = row[column]
            except ValueError as error:
                yield self._bad(record, str(error))
            except KeyError:
                yield self._bad(record, f"no column {column!r}; the line has {', '.join(map(repr, row)) or 'none'}")
            else:
                yield value

    def texts(self, selected: NDArray[np.int64]) -> list[str] | None:
        from orjson import loads

        column = self._column
        every = len(selected) == len(self._lines)
        lines = self._lines if every else [self._lines[record] for record in selected.tolist()]
        if max(map(len, lines), default=0) > MAX_RECORD_BYTES:
            return None
        try:
            found = [loads(line)[column] for line in lines]
        except (ValueError, KeyError, TypeError):
            return None
        return found if _all_strings(found) else None

    def _bad(self, record: int, reason: str) -> BadRecord:
        return BadRecord(self._shard, int(self.positions[record]), reason)


class _Texts(Records):
    def __init__(self, shard: int, start: int, data: bytes) -> None:
        self._data = data
        self._spans = text_documents(data)
        self._shard = shard
        self.positions = np.array([start + begin for begin, _ in self._spans], np.int64)

    def values(self, selected: NDArray[np.int64]) -> Iterator[Any]:
        for record in selected.tolist():
            begin, end = self._spans[record]
            position = int(self.positions[record])
            piece = self._data[begin:end]
            if position == 0:
                piece = piece.removeprefix(_BYTE_ORDER_MARK)
            try:
                yield piece.decode("utf-8")
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 text: byte 0x{piece[error.start]:02x}, {error.reason}"
                yield BadRecord(self._shard, position + error.start, reason)


class _Rows(Records):
    def __init__(self, shard: int, start: int, values: pa.ChunkedArray) -> None:
        self._values = values
        self._shard = shard
        self.positions = np.arange(start, start + len(values), dtype=np.int64)

    def values(self, selected: NDArray[np.int64]) -> Iterator[Any]:
        every = len(selected) == len(self.positions)
        rows = self._values if every else self._values.take(selected)
        try:
            yield from rows.to_pylist()
        except UnicodeDecodeError:
            pass
        else:
            return
        # Arrow does not promise that its strings are UTF-8: find the row that is not.
        for row, record in zip(rows, selected.tolist(), strict=True):
            try:
                yield row.as_py()
            except UnicodeDecodeError as error:
                yield BadRecord(self._shard, int(self.positions[record]), f"not UTF-8 text: {error.reason}")


def _all_strings(values: list[Any]) -> bool:
    return set(map(type, values)) <= {str}


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line of a JSON-lines file.

    Raises:
        ValueError: it is too long, not UTF-8, not JSON, or not an object; the message says which.
    """
    import orjson

    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(too_long(len(line)))
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
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: byte 0x{line[error.start]:02x}, column {error.start + 1}") from error
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not readable: JSON nested too deeply") from error
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is not a character") from error
    return row


def too_long(size: int | None) -> str:
    """Return the reason given for a record over the bound."""
    found = "" if size is None else f", found {size:,} bytes"
    return f"the line is too long: at most {MAX_RECORD_BYTES:,} bytes{found}"


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


def _bytes_of(path: str, start: int, stop: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}.") from error
    if len(data) != stop - start:
        raise CorpusError(
            f"{path}: became shorter while it was being counted. Start again when nothing writes to it any more."
        )
    return data
