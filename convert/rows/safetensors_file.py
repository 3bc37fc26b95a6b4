"""One safetensors file: checked by `safetensors.safe_open`, its data mapped into memory as bytes."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.files import regular_file
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

Bytes = NDArray[np.uint8]

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """One dense tensor as its file describes it: `dtype` in safetensors' spelling ("BF16"), `shape` () for a scalar."""

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


class SafetensorsFile:
    """A safetensors file on disk, mapped read-only; messages name `where`, or the path.

    Attributes:
        tensors: every tensor by name.
        metadata: the strings under `__metadata__`.
        data_offset: bytes before the first tensor's data.

    Raises CheckpointError: the file cannot be opened, or `safetensors` refuses its header.
    """

    def __init__(self, path: Path, where: str = "") -> None:
        self.path = path
        refuse_pointers(path)
        try:
            with safe_open(path, framework="numpy") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise damaged(where or path, f"not a sound safetensors file ({error})") from error
        with path.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.size_bytes = len(mapped)
        self.data_offset = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : self.data_offset])
        header.pop("__metadata__", None)
        self._data = np.frombuffer(mapped, np.uint8)
        self._ends = {name: entry["data_offsets"] for name, entry in header.items()}
        self.tensors = {
            name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), self._ends[name][1] - self._ends[name][0])
            for name, entry in header.items()
        }

    def array(self, name: str) -> Bytes:
        """Return a tensor, uint8 [rows, row_bytes], in the mapped file; KeyError where there is none of that name."""
        info, begin = self.tensors[name], self.offset(name)
        return self._data[begin : begin + info.size_bytes].reshape(info.num_rows, info.row_bytes)

    def offset(self, name: str) -> int:
        """Return where the data of a tensor begins, in bytes from the start of the file."""
        begin: int = self.data_offset + self._ends[name][0]
        return begin


def header_bytes(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the data of a safetensors file: size, and JSON padded to a multiple of 8 bytes.

    Format: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for info in tensors:
        begin, end = end, end + info.size_bytes
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def damaged(where: str | Path, problem: str) -> CheckpointError:
    """Build the error for a file that is not what it claims to be."""
    advice = "The download may have been cut short or the file damaged: delete it and fetch it again."
    return CheckpointError.at(where, f"{problem}.\n{advice}")


def refuse_pointers(path: Path) -> None:
    """Raise CheckpointError for what is no regular file, and for the text that Git LFS leaves in a file's place."""
    if not path.exists():
        raise damaged(path, "not there")
    with regular_file(path, CheckpointError, "file of weights").open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            advice = "Run `git lfs pull` in that folder, or fetch the repository with `hf download`."
            raise CheckpointError.at(path, f"this is a Git LFS pointer, not the weights.\n{advice}")


def shorten(value: object, limit: int = 80) -> str:
    """Return at most `limit` characters of `repr(value)`, for messages that quote what a file claims."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
