"""Write one safetensors file tensor by tensor, hashing the bytes as they pass.

The layout is the one `safetensors.torch.save_file` gives (tensors by descending alignment, then by name; compact JSON
header padded to 8 bytes), so the same tensors give the same bytes; but only one chunk is in memory at a time.
Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# The order in which the reference writer sorts dtypes: descending in its own enumeration.
_DTYPE_ORDER = ["F64", "I64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL"]
_ITEM_SIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be written: what it is, and a function that yields its bytes when its turn comes.

    `chunks()` yields CPU tensors of `dtype` whose elements, in order, are the tensor's own in row-major order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]

    @property
    def dtype_name(self) -> str:
        """The dtype as safetensors spells it ("BF16", "I64", ...)."""
        return DTYPE_NAMES[str(self.dtype).removeprefix("torch.")]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * _ITEM_SIZE[self.dtype_name]


@dataclass(frozen=True)
class WrittenFile:
    """What was written: its size and the SHA-256 of its bytes."""

    size_bytes: int
    sha256: str


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of a CPU tensor, without a copy where it is contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())


def whole(tensor: torch.Tensor) -> Callable[[], Iterator[torch.Tensor]]:
    """A `TensorPlan.chunks` for a tensor that is already in memory."""
    return lambda: iter((tensor,))


def array_plan(name: str, array: np.ndarray) -> TensorPlan:
    """The plan of a small NumPy array (int64 or bool maps)."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return TensorPlan(name, tensor.dtype, tuple(tensor.shape), whole(tensor))


def write_safetensors(path: Path, plans: Sequence[TensorPlan], metadata: Mapping[str, str]) -> WrittenFile:
    """Write `plans` to `path`, flushed to the disk, and return the size and SHA-256 of the file.

    Raises:
        ValueError: a plan yielded another dtype or another number of bytes than it declared, or a name occurs twice.
        OSError: the disk refused.
    """
    ordered = sorted(plans, key=lambda plan: (_DTYPE_ORDER.index(plan.dtype_name), plan.name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for plan in ordered:
        if plan.name in header:
            raise ValueError(f"tensor {plan.name} is planned twice")
        header[plan.name] = {
            "dtype": plan.dtype_name,
            "shape": list(plan.shape),
            "data_offsets": [offset, offset + plan.size_bytes],
        }
        offset += plan.size_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        _put(file, digest, len(text).to_bytes(8, "little") + text)
        for plan in ordered:
            written = 0
            for chunk in plan.chunks():
                if chunk.dtype != plan.dtype:
                    raise ValueError(f"tensor {plan.name}: planned as {plan.dtype}, got {chunk.dtype}")
                written += _put(file, digest, tensor_bytes(chunk))
            if written != plan.size_bytes:
                raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {written}")
        os.fsync(file.fileno())
    return WrittenFile(8 + len(text) + offset, digest.hexdigest())


def _put(file: BinaryIO, digest: hashlib._Hash, data: bytes | memoryview) -> int:
    digest.update(data)
    view = memoryview(data)
    while view:
        # A raw file may take less than it was given: a single write(2) moves at most 2 GiB.
        view = view[file.write(view) :]
    return len(data)
