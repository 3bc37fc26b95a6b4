"""The device and the type that a model is loaded on and in."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import SpeedWarning, UsageError, misfit

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INSTRUCTIONS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Linux' names of the instructions that multiply in a type, on x86 and on ARM."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """Read a device; None is the first GPU, else the CPU. Raises `UsageError` for one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device = {str(device)!r} cannot be computed on ({reason}). Use cpu, cuda or cuda:1, or leave it out."
        ) from error
    return place


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the float type that ``dtype`` is or names; None for "auto". Raises `UsageError` for any other."""
    if dtype in (None, "auto"):
        return None
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named not in _DTYPES:
        raise misfit("dtype", f"'auto', {', '.join(map(str, _DTYPES))}", dtype)
    return named


def dtype_on_cpu(config: Any) -> torch.dtype | str:
    """Return the type to load a causal language model in: float32, or "auto" for that of its files.

    Float32 is for 16-bit files that this CPU has no instructions for, as every product would be widened first. Where
    it does not fit into 0.9 of the free memory, a `SpeedWarning` says so. The processor's speed is not asked for, so
    that one machine always gives one text.
    """
    stored = getattr(config, "dtype", None)
    if stored not in _INSTRUCTIONS or _INSTRUCTIONS[stored] & cpu_instructions():
        return "auto"
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        needed = 4 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    free = free_memory_bytes()
    if needed <= 0.9 * free:
        return torch.float32
    what = f"This CPU has no {str(stored)[6:]} instructions, and float32 would be faster"
    sizes = f"{needed / 1e9:.1f} GB of {free / 1e9:.1f} GB of free memory"
    warnings.warn(f"{what}, but takes {sizes}: the target stays in {str(stored)[6:]}.", SpeedWarning, stacklevel=4)
    return "auto"


@cache
def cpu_instructions() -> frozenset[str]:
    """Read the names of this CPU's instruction sets from Linux; empty where it lists none."""
    found = re.findall(r"^(?:flags|Features)\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(" ".join(found).split())


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory in bytes: the machine's, or less under the limit of its control group."""
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)
    free = int(available[1]) * 1024 if available else 0
    limit, used = _read(group / "memory.max").strip(), re.search(r"^anon (\d+)", _read(group / "memory.stat"), re.M)
    return min(free, int(limit) - int(used[1])) if limit.isdigit() and used else free


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
