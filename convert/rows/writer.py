"""Plans of the tensors of a slim head, and the safetensors file that is written from them, with their checksums.

The file is, byte for byte, what `safetensors.torch.save_file` writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import sha256_of
from ..errors import CheckpointError, MismatchError
from .checkpoint import Checkpoint
from .dtypes import LONG_NAMES, first_nonfinite_row, item_size, rounded
from .safetensors_file import Bytes, SafetensorsFile, TensorInfo, header_bytes


@dataclass
class SourceRows:
    """Rows of a checkpoint's tensor on their way to the slim file: as they are, or rounded to another dtype.

    Attributes:
        name: of the tensor in the checkpoint.
        dtype: of the rows that are written.
        where: source in words, for messages.
        row_ids: int64 [rows], the rows wanted, in that order; None for all of them.
        target_ids: int64 [rows], the token of each row, for messages.
        sha256: of the bytes that were read, once all were, where these are not the bytes written.
    """

    source: Checkpoint
    name: str
    dtype: str
    where: str
    row_ids: NDArray[np.int64] | None = None
    target_ids: NDArray[np.int64] | None = None
    sha256: str = field(default="", init=False)

    @property
    def rounded(self) -> bool:
        """Whether the rows change dtype on the way."""
        return self.source.info(self.name).dtype != self.dtype

    def plan(self, name: str) -> TensorPlan:
        """Plan these rows as a tensor of the slim head."""
        info = self.source.info(self.name)
        shape = info.shape if self.row_ids is None else (len(self.row_ids), *info.shape[1:])
        size = int(np.prod(shape)) * item_size(self.dtype)
        return TensorPlan(name, self.dtype, shape, size, self.pieces, self)

    def pieces(self) -> Iterator[Bytes]:
        """Yield the rows in order, uint8 [n, row_bytes].

        Raises:
            CheckpointError: a row holds NaN or infinity.
            MismatchError: a row holds a value too large for the dtype.
        """
        found, start, digest = self.source.info(self.name).dtype, 0, hashlib.sha256()
        for rows in self.source.pieces(self.name, self.row_ids):
            if (row := first_nonfinite_row(rows, found)) is not None:
                problem = f"{self._place(start + row)} holds NaN or infinity"
                raise CheckpointError(f"{problem}.\nThe checkpoint is damaged: fetch it again.")
            if self.rounded:
                digest.update(rows.data)
                rows = rounded(rows, found, self.dtype)
                if (row := first_nonfinite_row(rows, self.dtype)) is not None:
                    problem = f"{self._place(start + row)} holds a value too large for {LONG_NAMES[self.dtype]}"
                    raise MismatchError(f"{problem}.\nConvert a head in the target's dtype, {LONG_NAMES[found]}.")
            start += len(rows)
            yield rows
        self.sha256 = digest.hexdigest() if self.rounded else ""

    def record(self, written_sha256: str) -> dict[str, Any]:
        """Record what was read, for the manifest."""
        info = self.source.info(self.name)
        rows = None if self.row_ids is None else len(self.row_ids)
        size = info.size_bytes if rows is None else rows * info.row_bytes
        return {"tensor": self.name, "rows": rows, "size_bytes": size, "sha256": self.sha256 or written_sha256}

    def _place(self, row: int) -> str:
        token = f"row {row}" if self.target_ids is None else f"row of token {self.target_ids[row]}"
        return f"{self.where}: {self.name}: {token}"


@dataclass(frozen=True)
class TensorPlan(TensorInfo):
    """One tensor to be written.

    Attributes:
        pieces: yields uint8 arrays that are, one after another, the tensor's bytes in row-major order.
        rows: what of a checkpoint they are; None for what a conversion adds.
    """

    pieces: Callable[[], Iterator[Bytes]]
    rows: SourceRows | None = None


@dataclass(frozen=True)
class WrittenFile:
    """Size of a written file, SHA-256 of its bytes before the first tensor's data, and of each tensor by name."""

    size_bytes: int
    header_sha256: str
    tensors: dict[str, str]


def array_plan(name: str, array: NDArray[Any]) -> TensorPlan:
    """Plan a small array in memory, of a dtype that NumPy has."""
    dtype = next(short for short, long_name in LONG_NAMES.items() if long_name == array.dtype.name)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return TensorPlan(name, dtype, array.shape, raw.size, lambda: iter([raw]))


def zeros_plan(name: str, dtype: str, size: int) -> TensorPlan:
    """Plan a vector [size] of zeros of any dtype."""
    raw = np.zeros(size * item_size(dtype), np.uint8)
    return TensorPlan(name, dtype, (size,), raw.size, lambda: iter([raw]))


def write_safetensors(path: Path, plans: Sequence[TensorPlan], metadata: Mapping[str, str]) -> WrittenFile:
    """Write `plans` to a new file `path`, flushed to the disk, and return the size and checksums of what was written.

    Each piece is hashed in the mapped file by a second thread while those after it are written.

    Raises:
        ValueError: a plan yielded another number of bytes than it declared.
        OSError: the disk refused.
    """
    order = list(LONG_NAMES)
    plans = sorted(plans, key=lambda plan: (-order.index(plan.dtype), plan.name))
    header = header_bytes(plans, metadata)
    digests = {plan.name: hashlib.sha256() for plan in plans}
    with path.open("xb") as file, ThreadPoolExecutor(1) as hashing:
        file.write(header)
        file.truncate(len(header) + sum(plan.size_bytes for plan in plans))
        file.flush()
        written = SafetensorsFile(path)
        for plan in plans:
            mapped, end = written.array(plan.name).reshape(-1), 0
            for piece in plan.pieces():
                begin, end = end, end + file.write(piece.reshape(-1).data)
                file.flush()
                hashing.submit(digests[plan.name].update, mapped[begin:end].data)
            if end != plan.size_bytes:
                raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {end}")
        os.fsync(file.fileno())
    tensors = {name: digest.hexdigest() for name, digest in digests.items()}
    return WrittenFile(written.size_bytes, sha256_of(header), tensors)
