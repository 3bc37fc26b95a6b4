"""Write one safetensors file through `safetensors.serialize_file`, with the checksum of each tensor.

`serialize_file` is what `safetensors.torch.save_file` calls, without torch: same tensors, same bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from ..artifact.checksums import sha256_of
from .checkpoint import Hashed
from .dtypes import LONG_NAMES, item_size
from .safetensors_file import Bytes, SafetensorsFile

Chunks = Callable[[], Generator[Bytes, None, str]]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be written.

    Attributes:
        name: of the tensor.
        dtype: safetensors spelling.
        shape: one integer per dimension.
        chunks: yields uint8 arrays that are, one after another, the tensor's bytes in row-major order, and returns the
            SHA-256 of them all.
        array: the same bytes at once, where they lie in memory or in a mapped file; None where they are gathered.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Chunks
    array: Bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True)
class WrittenFile:
    """Size of a written file, SHA-256 of its bytes before the first tensor's data, and of each tensor by name."""

    size_bytes: int
    header_sha256: str
    tensors: dict[str, str]


def whole(raw: Bytes) -> Chunks:
    """Make a `TensorPlan.chunks` of bytes that are in memory."""

    def chunks() -> Generator[Bytes, None, str]:
        yield raw
        return sha256_of(raw.reshape(-1).data)

    return chunks


def array_plan(name: str, array: NDArray[Any]) -> TensorPlan:
    """Plan a small array in memory, of a dtype that NumPy has."""
    dtype = next(short for short, long_name in LONG_NAMES.items() if long_name == array.dtype.name)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return TensorPlan(name, dtype, array.shape, whole(raw), raw)


def zeros_plan(name: str, dtype: str, size: int) -> TensorPlan:
    """Plan a vector [size] of zeros of any dtype."""
    raw = np.zeros(size * item_size(dtype), np.uint8)
    return TensorPlan(name, dtype, (size,), whole(raw), raw)


def write_safetensors(path: Path, plans: Sequence[TensorPlan], metadata: Mapping[str, str]) -> WrittenFile:
    """Write `plans` to a new file `path`, flushed to the disk, and return the size and checksums of what was written.

    Gathered tensors, which are never whole in memory, are written as zeros first and then filled in.

    Raises:
        ValueError: a plan yielded another number of bytes than it declared.
        OSError: the disk refused.
    """
    # In the order of the file, in which a manifest lists what was read.
    plans = sorted(plans, key=lambda plan: (-item_size(plan.dtype), plan.name))
    streams = {plan.name: Hashed(plan.chunks()) for plan in plans}
    # Memory that is only read stays the one page of zeros that the kernel has.
    data = {plan.name: np.zeros(plan.size_bytes, np.uint8) if plan.array is None else plan.array for plan in plans}
    specs = {plan.name: _spec(plan, data[plan.name]) for plan in plans}
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(serialize_file, specs, path, dict(metadata))
        digests = {plan.name: streams[plan.name].read_all() for plan in plans if plan.array is not None}
        writing.result()
        # The library makes a file that only its owner may read.
        path.chmod(mode)
        written = SafetensorsFile(path)
        with path.open("r+b") as file:
            for plan in plans:
                if plan.array is None:
                    file.seek(written.offset(plan.name))
                    digests[plan.name] = _fill(file, plan, streams[plan.name])
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            start = file.read(written.data_offset)
    return WrittenFile(written.size_bytes, sha256_of(start), {plan.name: digests[plan.name] for plan in plans})


def _spec(plan: TensorPlan, data: Bytes) -> TensorSpec:
    if data.nbytes != plan.size_bytes:
        raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {data.nbytes}")
    return TensorSpec(dtype=LONG_NAMES[plan.dtype], shape=plan.shape, data_ptr=data.ctypes.data, data_len=data.nbytes)


def _fill(file: BinaryIO, plan: TensorPlan, chunks: Hashed) -> str:
    """Write the chunks of a plan from the file's position on and return the SHA-256 of its bytes."""
    num_bytes = sum(file.write(chunk.reshape(-1).data) for chunk in chunks)
    if num_bytes != plan.size_bytes:
        raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {num_bytes}")
    return chunks.sha256
