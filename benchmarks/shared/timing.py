"""Timing of what the host has queued, the machine's own copy bandwidth, and what stands beside every figure."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from eagle_slim.runtime.drafter.tuning.timing import interleave, time_us


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; elsewhere everything has been done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_queued_us(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Time ``times`` calls in a row, all of which the host has queued behind other work: the mean.

    So launches do not show, and what is timed runs on a busy device, as in the middle of a loop. On a CPU: the mean.
    """
    if device.type != "cuda":
        return time_us(lambda: [run() for _ in range(times)], device) / times
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    other = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    for _ in range(8):
        other.zero_()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e3 / times


def copy_bytes_per_s(device: torch.device, size_bytes: int = 2 << 30, rounds: int = 10) -> float:
    """Measure the device's own copy, bytes read plus bytes written per second: the ceiling that shares refer to."""
    source = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    times = interleave({"copy": lambda: target.copy_(source)}, device, rounds)
    return 2 * size_bytes / median(times["copy"]) * 1e6


def machine(device: torch.device) -> dict[str, str | int]:
    """Describe device, versions and commit, to stand beside every figure."""
    described: dict[str, str | int] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "commit": commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device": properties.name,
            "num_sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": str(torch.version.cuda),
        }
    return described


def commit() -> str:
    """Name the commit measured: ``EAGLE_SLIM_COMMIT``, or git's answer with a "+" for local changes, or "unknown"."""
    describe = f"git -C '{Path(__file__).resolve().parent}' describe --always --dirty=+ --abbrev=12 '--exclude=*'"
    status, answer = subprocess.getstatusoutput(describe)
    return os.environ.get("EAGLE_SLIM_COMMIT") or ("unknown" if status else answer)


def barriers_of(split: Mapping[str, int], depth: int) -> list[str]:
    """Name what ends at each barrier of a draft by an EAGLE-3 head, whose projections are ``split``."""

    def product(name: str, part: str) -> list[str]:
        # The parts of sums wait for each other.
        return [part] * (2 if split[name] > 1 else 1)

    fc = [*product("fc", "fc"), "fc"]
    layer = [*product("qkv", "QKV"), "attention", "attention", *product("o", "output"), "MLP", *product("down", "MLP")]
    level = [*layer, "LM head, top-k", "choose nodes"]
    # The last level chooses the tree after its last barrier.
    return ["inputs", *fc, *(level * (depth + 1))[:-1]]
