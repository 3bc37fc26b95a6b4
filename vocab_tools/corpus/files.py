"""Local corpora: .jsonl, .json (one object per line, or one array), .parquet and .txt, packed or not, folders, globs.

Files are taken in the order of their names. Plain text files are cut into byte ranges that the workers read for
themselves; compressed ones are decompressed here, block by block. Memory never holds more than one block and the
longest record, whatever the file.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ..errors import CorpusError
from ..files import expand_home
from .arrays import array_pieces, begins_array
from .blocks import (
    BLOCK_BYTES,
    MAX_PARAGRAPH_BYTES,
    MAX_RECORD_BYTES,
    Block,
    FaultBlock,
    LinesBlock,
    RowGroupBlock,
    RowsBlock,
    TextBlock,
    cut_text,
    parse_line,
    too_long,
)
from .packed import PACKED, PackedReader, fault_of, is_packed

Format = Literal["jsonl", "json", "parquet", "txt"]
FORMATS: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "txt",
}
_TEXT_FORMATS = ".jsonl, .ndjson, .json (one object per line, or one array of them), .txt"
READABLE = f"{_TEXT_FORMATS}, each also packed ({', '.join(PACKED)}), and .parquet"

_COMPRESSIONS = (*PACKED, ".lz4", ".zip", ".7z", ".tar")
_SCAN_BYTES = 64 << 10
# Records in which a column's kind is looked for.
_ROWS_LOOKED_AT = 1000


@dataclass(frozen=True)
class CorpusFile:
    """One file: path, the name that records of it bear, format, and the state it was found in.

    Of the formats "json" is one array of records; a .json file of one object per line is "jsonl".
    """

    path: str
    name: str
    format: Format
    compressed: bool
    size: int
    modified_ns: int


def looks_local(location: str) -> bool:
    """Whether a location is a path or a glob rather than the id of a Hub dataset or a URL."""
    if "://" in location:
        return False
    if location.startswith((".", "/", "~")) or _is_glob(location):
        return True
    return _format_of(location) is not None or expand_home(location).exists()


def find_files(location: str) -> list[CorpusFile]:
    """List the files of a path, folder (searched through) or glob, by name.

    Raises:
        CorpusError: there are none, one cannot be read, or a file has an unknown format.
    """
    path = expand_home(location)
    if path.is_dir():
        found = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        # Other files are none of the corpus; half of its shards in another compression are.
        known = [file for file in found if _format_of(file.name) is not None or _is_unread(file.name)]
        base = path
        if not known:
            raise CorpusError(
                f"{location}: no corpus file among the {len(found)} in this folder. Readable: {READABLE}."
            )
    elif path.exists():
        known, base = [path], path.parent
    elif _is_glob(location):
        pattern = str(path)
        known = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
        base = _fixed_part(pattern)
        if not known:
            raise CorpusError(f"{location}: no file matches this pattern")
    else:
        raise CorpusError(f"{location}: no such file or folder")
    unique = set(known)
    twice = next((file for file in known if is_packed(file.name) and file.with_suffix("") in unique), None)
    if twice is not None:
        raise CorpusError(
            f"{twice}: stands beside {twice.stem}, so that its text would count twice. Remove one, or name the files "
            "by a glob that leaves it out."
        )
    return [_describe(file, file.relative_to(base).as_posix()) for file in sorted(unique)]


def _describe(path: Path, name: str) -> CorpusFile:
    file_format = _format_of(path.name)
    if file_format is None:
        advice = " Unpack it, or compress it with gzip or zstd." if _is_unread(path.name) else ""
        raise CorpusError(f"{path}: unknown kind of file. Readable: {READABLE}.{advice}")
    try:
        state = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error
    file = CorpusFile(str(path.absolute()), name, file_format, is_packed(path.name), state.st_size, state.st_mtime_ns)
    return replace(file, format="jsonl") if file_format == "json" and not _begins_array(file) else file


def _begins_array(file: CorpusFile) -> bool:
    try:
        with _open(file) as data:
            return begins_array(data.read(_SCAN_BYTES))
    except OSError:
        return False


def _format_of(name: str) -> Format | None:
    path = Path(name)
    if is_packed(name):
        inner = FORMATS.get(Path(path.stem).suffix.lower())
        return None if inner == "parquet" else inner
    return FORMATS.get(path.suffix.lower())


def _is_unread(name: str) -> bool:
    """Whether a name is that of a readable file in a compression in which it is not read."""
    inner = Path(Path(name).stem).suffix.lower()
    return Path(name).suffix.lower() in _COMPRESSIONS and inner in FORMATS and _format_of(name) is None


def _is_glob(location: str) -> bool:
    return any(sign in location for sign in "*?[")


def _fixed_part(pattern: str) -> Path:
    parts = Path(pattern).parts
    fixed = next(position for position, part in enumerate(parts) if _is_glob(part))
    return Path(*parts[:fixed]) if fixed else Path()


def first_values(file: CorpusFile, wanted: Sequence[str]) -> dict[str, Any] | None:
    """First readable record of a file, see `merge_first_values`; None for plain text, and where nothing can be read."""
    if file.format == "txt":
        return None
    return merge_first_values(_first_parquet_rows(file) if file.format == "parquet" else _first_lines(file), wanted)


def merge_first_values(rows: Iterable[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, Any] | None:
    """The first row, its nulls filled in from the next ones until no column of `wanted` is null; None without rows.

    A null does not say what its column holds, and real tables begin with them.
    """
    found: dict[str, Any] | None = None
    for row in itertools.islice(rows, _ROWS_LOOKED_AT):
        known = {} if found is None else {column: value for column, value in found.items() if value is not None}
        found = {**row, **known}
        if all(found[column] is not None for column in wanted if column in found):
            break
    return found


def _first_lines(file: CorpusFile) -> Iterator[dict[str, Any]]:
    try:
        with _open(file) as data:
            for line in itertools.islice(_lines(file, data), _ROWS_LOOKED_AT):
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
    kind = TextBlock if file.format == "txt" else LinesBlock
    with _open(file) as data:
        while start < file.size:
            stop = file.size
            if stop - start > BLOCK_BYTES:
                cut = _text_cut if file.format == "txt" else _line_cut
                stop, whole = cut(data, start, file.size)
                if not whole:
                    yield FaultBlock(shard, start, stop, stop - start, too_long(stop - start))
                    start = stop
                    continue
            yield kind(shard, start, stop, stop - start, file.path)
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
    with _open(file) as stream:
        reached = stream.skip(start) if isinstance(stream, PackedReader) else stream.seek(min(start, file.size))
        if reached < start:
            # The last block goes up to behind the end.
            return
        reported = _compressed_position(stream)
        for piece in array_pieces(stream, start):
            moved = _compressed_position(stream) - reported
            reported += moved
            if piece.fault is None:
                yield LinesBlock(shard, piece.start, piece.stop, moved, file.path, piece.lines)
            else:
                yield FaultBlock(shard, piece.start, piece.stop, moved, piece.fault)


def _packed_blocks(file: CorpusFile, shard: int, start: int) -> Iterator[Block]:
    kind = TextBlock if file.format == "txt" else LinesBlock
    position = 0
    held = b""
    reported = 0
    with PackedReader(file.path) as stream:
        while True:
            wanted = BLOCK_BYTES if len(held) < BLOCK_BYTES else len(held) + BLOCK_BYTES
            held += stream.read(wanted - len(held))
            ended, fault = len(held) < wanted, fault_of(stream)
            if ended or file.format == "txt":
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
                yield from _from(start, kind(shard, position, position + cut, moved, file.path, held[:cut]))
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


def _open(file: CorpusFile) -> BinaryIO:
    try:
        return PackedReader(file.path) if file.compressed else Path(file.path).open("rb")
    except OSError as error:
        raise CorpusError(f"{file.path}: cannot be read: {error.strerror}") from error


def _compressed_position(stream: BinaryIO) -> int:
    return stream.raw.compressed_position if isinstance(stream, PackedReader) else stream.tell()


def inner_block(file: CorpusFile, shard: int, fraction: float) -> Block | None:
    """Return a block from within a large plain file, begun at a line's start; None for other files."""
    if file.compressed or file.format in ("json", "parquet") or file.size < 4 * BLOCK_BYTES:
        return None
    with _open(file) as data:
        data.seek(int(file.size * fraction))
        skipped = data.readline(MAX_RECORD_BYTES)
        start = data.tell()
    return next(_plain_blocks(file, shard, start), None) if skipped.endswith(b"\n") else None


def line_of(file: CorpusFile, position: int) -> int:
    """Line number, from 1, of the byte at a position; reads the file up to there."""
    line, left = 1, position
    with _open(file) as data:
        while left > 0 and (window := data.read(min(left, BLOCK_BYTES))):
            line += window.count(b"\n")
            left -= len(window)
    return line


def check_unchanged(files: Sequence[CorpusFile]) -> None:
    """Check that no file changed since it was listed.

    Raises:
        CorpusError: one did.
    """
    for file in files:
        try:
            state = os.stat(file.path)
        except OSError as error:
            raise CorpusError(f"{file.path}: gone while it was being counted: {error.strerror}") from error
        if (state.st_size, state.st_mtime_ns) != (file.size, file.modified_ns):
            raise CorpusError(f"{file.path}: changed while it was being counted. Start again when the file is at rest.")


class FileHasher:
    """SHA-256 of the files while they are counted, in a thread beside the counting.

    Of a plain text file only the part that was counted is hashed; of a compressed file or a table, all.
    """

    def __init__(self, files: Sequence[CorpusFile]) -> None:
        self._files = files
        self._hashes = [hashlib.sha256() for _ in files]
        self._done = [0] * len(files)
        self._orders: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="corpus-hash")
        self._thread.start()

    def reached(self, shard: int, position: int) -> None:
        """Say that the counting of a file has come to this position; -1 stands for its end."""
        self._orders.put((shard, position))

    def finish(self) -> list[dict[str, Any]]:
        """Name, number of bytes and SHA-256 of every file that was read from.

        Raises:
            CorpusError: a file could not be read.
        """
        self.close()
        if self._error is not None:
            raise CorpusError(f"cannot be read: {self._error}") from self._error
        return [
            {"name": file.name, "bytes": done, "sha256": digest.hexdigest()}
            for file, done, digest in zip(self._files, self._done, self._hashes, strict=True)
            if done
        ]

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            shard, position = order
            file = self._files[shard]
            whole = position < 0 or file.compressed or file.format == "parquet"
            try:
                self._advance(shard, file.size if whole else min(position, file.size))
            except OSError as error:
                self._error = error
                return

    def _advance(self, shard: int, stop: int) -> None:
        if stop <= self._done[shard]:
            return
        with Path(self._files[shard].path).open("rb") as data:
            data.seek(self._done[shard])
            while self._done[shard] < stop:
                window = data.read(min(1 << 20, stop - self._done[shard]))
                if not window:
                    return
                self._hashes[shard].update(window)
                self._done[shard] += len(window)
