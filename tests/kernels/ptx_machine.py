"""Execute a compiled kernel without a GPU: the C++ of ``ptx/``, built on first use.

It runs PTX, which is what Triton makes of a kernel for a chip, with all programs and warps taking turns at random.
Beside wrong results it finds what Triton's interpreter cannot: accesses that no barrier and no release and acquire puts
in order, copies and products that are not waited for, places outside the tensors, and barriers that not all threads
reach.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("ptx")
BUILD = Path(__file__).parents[2] / "build" / "ptx"
COMPILER = os.environ.get("CXX", "g++")
TIMEOUT = 2_000_000_000
"""Instructions of warps after which a kernel is taken to hang."""


class PtxError(Exception):
    """What is wrong with a kernel, a line each."""


class _Tensor(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("read_only", ctypes.c_uint64))


@cache
def library() -> ctypes.CDLL:
    """Build, unless these sources have been built before, and load."""
    sources = sorted(SOURCES.glob("*.[ch]pp"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    built = BUILD / f"machine-{digest}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        temporary = built.with_suffix(f".{os.getpid()}")
        code = [str(path) for path in sources if path.suffix == ".cpp"]
        flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
        done = subprocess.run([COMPILER, *flags, *code, "-o", str(temporary)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        temporary.replace(built)
    loaded = ctypes.CDLL(str(built))
    loaded.run_ptx.restype = ctypes.c_int64
    return loaded


def execute(
    ptx: str,
    arguments: Sequence[torch.Tensor | int],
    num_programs: int,
    shared_bytes: int = 0,
    inputs: Sequence[torch.Tensor] = (),
    seed: int = 0,
    checks_races: bool = True,
    limit: int = TIMEOUT,
) -> int:
    """Run a kernel on tensors of the CPU; returns how many instructions its warps executed.

    Args:
        ptx: a module with one kernel.
        arguments: in order, one for each parameter.
        num_programs: programs, all of them resident.
        shared_bytes: dynamic shared memory of a program.
        inputs: those of ``arguments`` that the kernel may only read.
        seed: of the order in which warps take turns.
        checks_races: record who accesses what; off, large kernels run two to three times as fast.
        limit: instructions after which the kernel is taken to hang.

    Raises:
        PtxError: the kernel did something that it must not do, or something that is not known here.
    """
    written: dict[int, _Tensor] = {}
    for tensor in arguments:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            read_only = any(tensor is other for other in inputs)
            known = written.get(storage.data_ptr())
            read_only = read_only and (known is None or bool(known.read_only))
            written[storage.data_ptr()] = _Tensor(storage.data_ptr(), storage.nbytes(), read_only)
    values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg & (2**64 - 1) for arg in arguments]
    message = ctypes.create_string_buffer(1 << 16)
    executed: int = library().run_ptx(
        ptx.encode(),
        (ctypes.c_uint64 * len(values))(*values),
        len(values),
        (_Tensor * len(written))(*written.values()),
        len(written),
        num_programs,
        ctypes.c_uint32(shared_bytes),
        ctypes.c_uint32(seed),
        int(checks_races),
        ctypes.c_uint64(limit),
        message,
        ctypes.c_size_t(len(message)),
    )
    if message.value:
        raise PtxError(message.value.decode().rstrip())
    return executed
