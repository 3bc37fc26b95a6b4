"""Counts the bytes that are hashed and the bytes of tensors that are read, in a process that measures them."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..weights.checkpoint import Checkpoint


class ByteCounter:
    """Bytes since the counting began."""

    def __init__(self) -> None:
        self.bytes = 0


def count_sha256() -> ByteCounter:
    """Replace `hashlib.sha256` everywhere in this process by one that counts; there is no way back."""
    counter = ByteCounter()
    real = hashlib.sha256

    class Counted:
        def __init__(self, data: Any = b"", **options: Any) -> None:
            self._real = real(**options)
            self.update(data)

        def update(self, data: Any) -> None:
            counter.bytes += memoryview(data).nbytes
            self._real.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    for module in list(sys.modules.values()):
        if getattr(module, "sha256", None) is real:
            setattr(module, "sha256", Counted)  # noqa: B010  (a module, whose type has no such attribute)
    return counter


def count_reads() -> ByteCounter:
    """Count the bytes of every tensor and row that any `Checkpoint` of this process reads; there is no way back."""
    counter = ByteCounter()
    record = Checkpoint._record

    def counted(self: Checkpoint, name: str, ids: NDArray[np.int64] | None, sha256: str) -> None:
        record(self, name, ids, sha256)
        (file,) = [file for file in self.files if file.path == self.path_of(name)]
        counter.bytes += file.reads[-1].size_bytes

    Checkpoint._record = counted  # type: ignore[method-assign]
    return counter
