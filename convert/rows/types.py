"""Shared by the readers of weights files: descriptions of tensors, records of reads, errors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..files import open_regular

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """One dense tensor as its file describes it; nothing of its data has been read.

    ``dtype`` in safetensors spelling, such as "BF16" or "I64", for every file type; ``shape`` () for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def num_rows(self) -> int:
        """Size of the first dimension; a scalar counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 where the tensor is empty."""
        return self.size_bytes // self.num_rows if self.num_rows else 0


@dataclass
class ReadRecord:
    """One read, for the manifest of what an artifact was made from.

    Attributes:
        rows: number of rows gathered, or None where the whole tensor was read.
        size_bytes: bytes read, which are exactly the bytes hashed.
        sha256: hash of those bytes, in the order in which they were returned; "" until the last of them has been read.
    """

    tensor: str
    rows: int | None
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True)
class FileRecord:
    """One weights file: its size on disk, and every finished read of it in the order in which they began."""

    path: Path
    size_bytes: int
    reads: tuple[ReadRecord, ...]


def damaged(where: str | Path, problem: str) -> CheckpointError:
    """Build the error for a file that is not what it claims to be."""
    advice = "The download may have been cut short or the file damaged: delete it and fetch it again."
    return CheckpointError.at(where, f"{problem}.\n{advice}")


def refuse_pointers(path: Path) -> None:
    """Raise CheckpointError for what is no regular file, and for the text that Git LFS leaves in a file's place."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        raise CheckpointError.at(path, f"cannot be opened: {error.strerror}.\nExpected a file of weights.") from error
    if is_pointer:
        raise CheckpointError.at(
            path,
            "this is a Git LFS pointer, not the weights.\n"
            "Run `git lfs pull` in that folder, or fetch the repository with `hf download`.",
        )


def shorten(value: object, limit: int = 80) -> str:
    """Return at most `limit` characters of `repr(value)`, for messages that quote what a file claims."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
