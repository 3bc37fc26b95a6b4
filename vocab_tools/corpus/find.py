"""Which local files a location names: a path, a folder (searched through) or a glob; and what each of them is."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from ..errors import CorpusError
from ..files import expand_home, regular_file
from .arrays import begins_array
from .packed import PACKED, PackedReader, is_packed

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

_HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class CorpusFile:
    """One file: path, name in reports, format, and its state when it was listed.

    The format "json" is one array of records; a .json file with one object per line is "jsonl".
    """

    path: str
    name: str
    format: Format
    compressed: bool
    size: int
    modified_ns: int


def looks_local(location: str) -> bool:
    """Whether a location is a path or a glob rather than the id of a Hub dataset."""
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
        # Other files do not belong to the corpus.
        known = [file for file in found if _format_of(file.name) is not None]
        base = path
        if not known:
            raise CorpusError.at(
                location, f"no corpus file among the {len(found)} in this folder. Readable: {READABLE}.", found=0
            )
    elif path.exists():
        known, base = [path], path.parent
    elif _is_glob(location):
        pattern = str(path)
        known = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
        base = _fixed_part(pattern)
        if not known:
            raise CorpusError(f"{location}: no file matches this pattern.", found=0)
    else:
        raise CorpusError(f"{location}: no such file or folder.", missing=location)
    unique = set(known)
    twice = next((file for file in known if is_packed(file.name) and file.with_suffix("") in unique), None)
    if twice is not None:
        raise CorpusError.at(
            twice,
            f"{twice.stem} is there too, so the same text would count twice. Remove one of them, or name the "
            "files by a glob that leaves it out.",
            same_as=str(twice.with_suffix("")),
        )
    return [_describe(file, file.relative_to(base).as_posix()) for file in sorted(unique)]


def open_file(file: CorpusFile) -> BinaryIO:
    """Open a file for reading its (decompressed) bytes.

    Raises:
        CorpusError: it cannot be opened.
    """
    try:
        return PackedReader(file.path) if file.compressed else Path(file.path).open("rb")
    except OSError as error:
        raise CorpusError(f"{file.path}: cannot be read: {error.strerror}.") from error


def _describe(path: Path, name: str) -> CorpusFile:
    file_format = _format_of(path.name)
    if file_format is None:
        raise CorpusError.at(path, f"unknown kind of file. Readable: {READABLE}.", format=None)
    regular_file(path, CorpusError)
    try:
        state = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}.") from error
    file = CorpusFile(
        path=str(path.absolute()),
        name=name,
        format=file_format,
        compressed=is_packed(path.name),
        size=state.st_size,
        modified_ns=state.st_mtime_ns,
    )
    return replace(file, format="jsonl") if file_format == "json" and not _begins_array(file) else file


def _begins_array(file: CorpusFile) -> bool:
    try:
        with open_file(file) as data:
            return begins_array(data.read(_HEAD_BYTES))
    except OSError:
        return False


def _format_of(name: str) -> Format | None:
    path = Path(name)
    if is_packed(name):
        inner = FORMATS.get(Path(path.stem).suffix.lower())
        return None if inner == "parquet" else inner
    return FORMATS.get(path.suffix.lower())


def _is_glob(location: str) -> bool:
    return any(sign in location for sign in "*?[")


def _fixed_part(pattern: str) -> Path:
    parts = Path(pattern).parts
    fixed = next(position for position, part in enumerate(parts) if _is_glob(part))
    return Path(*parts[:fixed]) if fixed else Path()
