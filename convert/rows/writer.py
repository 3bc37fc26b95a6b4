"""Plans of the tensors of a slim head, and the safetensors file that is written from them, with their checksums.

The file is, byte for byte, what `safetensors.torch.save_file` writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import sha256_of
from .checkpoint import SourceRows
from .files import LONG_NAMES, Bytes, SafetensorsFile, TensorInfo, header_bytes, item_size


@dataclass(frozen=True)
class TensorPlan(TensorInfo):
    """One tensor to be written; `pieces` yields uint8 arrays, its bytes in row-major order."""

    pieces: Callable[[], Iterator[Bytes]]

    @classmethod
    def of(cls, name: str, rows: SourceRows) -> TensorPlan:
        """Plan rows of a checkpoint as a tensor of the slim head."""
        info, ids = rows.source.info(rows.name), rows.row_ids
        shape = info.shape if ids is None else (len(ids), *info.shape[1:])
        return cls(name, rows.dtype, shape, math.prod(shape) * item_size(rows.dtype), rows.pieces)


def array_plan(name: str, array: NDArray[Any]) -> TensorPlan:
    """Plan a small array in memory, of a dtype that NumPy has."""
    dtype = next(short for short, long_name in LONG_NAMES.items() if long_name == array.dtype.name)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return TensorPlan(name, dtype, array.shape, raw.size, lambda: iter([raw]))


def zeros_plan(name: str, dtype: str, size: int) -> TensorPlan:
    """Plan a vector [size] of zeros of any dtype."""
    raw = np.zeros(size * item_size(dtype), np.uint8)
    return TensorPlan(name, dtype, (size,), raw.size, lambda: iter([raw]))


def write_safetensors(path: Path, plans: Sequence[TensorPlan]) -> dict[str, Any]:
    """Write `plans` to a new file `path`, flushed to the disk, and return its entry of the manifest.

    Each tensor is hashed in the mapped file by another thread while those after it are written. Raises ValueError where
    a plan yields another number of bytes than it declared.
    """
    order = list(LONG_NAMES)
    plans = sorted(plans, key=lambda plan: (-order.index(plan.dtype), plan.name))
    # Loaders check this metadata.
    header = header_bytes(plans, {"format": "pt"})
    hashing = {}
    with path.open("xb") as file, ThreadPoolExecutor(2) as pool:
        file.write(header)
        file.truncate(len(header) + sum(plan.size_bytes for plan in plans))
        file.flush()
        written = SafetensorsFile(path)
        for plan in plans:
            num_bytes = sum(file.write(piece.reshape(-1).data) for piece in plan.pieces())
            if num_bytes != plan.size_bytes:
                raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {num_bytes}")
            file.flush()
            hashing[plan.name] = pool.submit(sha256_of, written.array(plan.name).reshape(-1).data)
        os.fsync(file.fileno())
    tensors = {name: digest.result() for name, digest in hashing.items()}
    return {"size_bytes": written.size_bytes, "header_sha256": sha256_of(header), "tensors": tensors}
