"""The type of a target on a CPU: a 16-bit one only where the processor multiplies in it.

Without such instructions every product is widened first, and 16-bit weights are slower than float32 ones. The processor
is asked for its instructions, not for its speed, so that one machine always gives one text.
"""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import SpeedWarning

_INSTRUCTIONS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Linux' names of the instructions, on x86 and on ARM."""
_ROOM = 0.9
"""Share of the free memory that weights may take."""


def dtype_on_cpu(config: Any) -> torch.dtype | str:
    """Return the type to load a causal language model in: float32, or "auto" for that of its files.

    ``config``: transformers' own, which names the type of the files. Float32 is for 16-bit files that this CPU has no
    instructions for, where it fits into free memory; where it does not, a `SpeedWarning` says so.
    """
    stored = getattr(config, "dtype", None)
    if stored not in _INSTRUCTIONS or _INSTRUCTIONS[stored] & cpu_instructions():
        return "auto"
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        needed = 4 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    free = free_memory_bytes()
    if needed <= _ROOM * free:
        return torch.float32
    warnings.warn(
        f"This CPU has no {str(stored)[6:]} instructions, and float32 would be faster, but takes {needed / 1e9:.1f} GB "
        f"of {free / 1e9:.1f} GB of free memory: the target stays in {str(stored)[6:]}.",
        SpeedWarning,
        stacklevel=4,
    )
    return "auto"


@cache
def cpu_instructions() -> frozenset[str]:
    """Read the names of this CPU's instruction sets from Linux; empty where it lists none."""
    text = _read(Path("/proc/cpuinfo"))
    return frozenset(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)).split())


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory in bytes: the machine's, or less under the limit of its control group."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    limit, used = _read(group / "memory.max").strip(), re.search(r"^anon (\d+)", _read(group / "memory.stat"), re.M)
    return min(free, int(limit) - int(used[1])) if limit.isdigit() and used else free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
