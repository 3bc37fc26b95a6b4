"""Write one safetensors file tensor by tensor, with the checksum of each.

The layout is the one `safetensors.torch.save_file` gives (tensors by descending alignment, then by name; compact JSON
header padded to 8 bytes), so the same tensors give the same bytes; but only two chunks are in memory at a time: one is
being read while the one before it is being written.
Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
_FLUSH_BYTES = 64 << 20
_ITEM_SIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be written: what it is, and a function that yields its bytes when its turn comes.

    `chunks()` yields CPU tensors of `dtype` whose elements, in order, are the tensor's own in row-major order.
    `digest()`, where given, is asked after the last chunk for the SHA-256 of the tensor's bytes, by someone who has
    hashed these very bytes already; without it they are hashed here.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]
    digest: Callable[[], str] | None = None

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
    """What was written. Header and tensors together are every byte of the file.

    Attributes:
        size_bytes: size of the file.
        header_sha256: SHA-256 of all bytes before the first tensor's data.
        tensors: tensor name to the SHA-256 of its bytes.
    """

    size_bytes: int
    header_sha256: str
    tensors: dict[str, str]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of a CPU tensor, without a copy where it is contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def whole(tensor: torch.Tensor) -> Callable[[], Iterator[torch.Tensor]]:
    """A `TensorPlan.chunks` for a tensor that is already in memory."""
    return lambda: iter((tensor,))


def array_plan(name: str, array: NDArray[Any]) -> TensorPlan:
    """The plan of a small NumPy array (int64 or bool maps)."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return TensorPlan(name, tensor.dtype, tuple(tensor.shape), whole(tensor))


def write_safetensors(path: Path, plans: Sequence[TensorPlan], metadata: Mapping[str, str]) -> WrittenFile:
    """Write `plans` to `path`, flushed to the disk, and return the size and checksums of what was written.

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
    start = len(text).to_bytes(8, "little") + text

    digests: dict[str, str] = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, start)
        with ThreadPoolExecutor(1, thread_name_prefix="write") as writer, _Flusher(descriptor) as flusher:
            for plan in ordered:
                digests[plan.name] = _write_tensor(descriptor, plan, writer, flusher)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return WrittenFile(len(start) + offset, hashlib.sha256(start).hexdigest(), digests)


class _Flusher:
    """Sends what has been written on to the disk while the next part is being read and hashed.

    Otherwise the last fsync, which waits for all of the file, comes on top of everything else.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._running: Future[None] | None = None
        self._waiting_bytes = 0

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        # A disk error is reported once, to whoever flushes first: it must not be lost here.
        if kind is None and self._running is not None:
            self._running.result()

    def wrote(self, size_bytes: int) -> None:
        """Begin to flush once enough has come together; never waits. Raises OSError where the flush before failed."""
        self._waiting_bytes += size_bytes
        if self._waiting_bytes >= _FLUSH_BYTES and (self._running is None or self._running.done()):
            if self._running is not None:
                self._running.result()
            self._waiting_bytes = 0
            self._running = self._pool.submit(os.fdatasync, self._descriptor)


def _write_tensor(descriptor: int, plan: TensorPlan, writer: ThreadPoolExecutor, flusher: _Flusher) -> str:
    digest = hashlib.sha256() if plan.digest is None else None

    def put(data: memoryview) -> None:
        if digest is not None:
            digest.update(data)
        _write_all(descriptor, data)
        flusher.wrote(len(data))

    written = 0
    before: Future[None] | None = None
    for chunk in plan.chunks():
        if chunk.dtype != plan.dtype:
            raise ValueError(f"tensor {plan.name}: planned as {plan.dtype}, got {chunk.dtype}")
        data = tensor_bytes(chunk)
        written += len(data)
        if before is not None:
            before.result()
        before = writer.submit(put, data)
    if before is not None:
        before.result()
    if written != plan.size_bytes:
        raise ValueError(f"tensor {plan.name}: planned {plan.size_bytes} bytes, got {written}")
    if plan.digest is not None:
        return plan.digest()
    assert digest is not None
    return digest.hexdigest()


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        # One write(2) takes at most 2 GiB, and may take less than it was given.
        view = view[os.write(descriptor, view) :]
