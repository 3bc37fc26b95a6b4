"""One safetensors file: opened and checked by `safetensors.safe_open`, its data mapped into memory.

The data is mapped as bytes, because NumPy has no bfloat16 and importing torch costs 140 MB of private memory, four
times what a conversion takes.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .types import TensorInfo, damaged, refuse_pointers

Bytes = NDArray[np.uint8]


class SafetensorsFile:
    """A safetensors file on disk, mapped read-only.

    Messages name `where`, or the path.

    Attributes:
        tensors: every tensor by name.
        metadata: the strings under `__metadata__`.
        data_offset: bytes before the first tensor's data.

    Raises:
        CheckpointError: the file cannot be opened, or `safetensors` refuses its header.
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
            self.size_bytes = os.fstat(opened.fileno()).st_size
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.data_offset = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : self.data_offset])
        header.pop("__metadata__", None)
        self._data = np.frombuffer(mapped, np.uint8)[self.data_offset :]
        self._begin: dict[str, int] = {name: entry["data_offsets"][0] for name, entry in header.items()}
        self.tensors = {
            name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - self._begin[name])
            for name, entry in header.items()
        }

    def array(self, name: str) -> Bytes:
        """Return a tensor, uint8 [rows, row_bytes], in the mapped file; KeyError where there is none of that name."""
        info, begin = self.tensors[name], self._begin[name]
        return self._data[begin : begin + info.size_bytes].reshape(info.num_rows, info.row_bytes)

    def offset(self, name: str) -> int:
        """Return where the data of a tensor begins, in bytes from the start of the file."""
        return self.data_offset + self._begin[name]
