"""Measuring on a device: medians with their spread, variants interleaved, and the machine's own copy bandwidth."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Times:
    """Microseconds of one variant."""

    median_us: float
    low_us: float
    """10th percentile."""
    high_us: float
    """90th percentile."""
    samples: int

    @classmethod
    def of(cls, samples_us: list[float]) -> Times:
        """Summarise samples."""
        ordered = sorted(samples_us)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; elsewhere everything has been done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_us(run: Callable[[], object], device: torch.device) -> float:
    """Time one call from an idle device to an idle device: CUDA events, or the clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e3


def time_queued_us(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Mean time of ``times`` calls in a row, all of which the host has queued behind other work.

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


def interleave(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    seldom: frozenset[str] = frozenset(),
) -> dict[str, Times]:
    """Time variants in turn, ``rounds`` times after two to warm up; those in ``seldom`` every fourth time."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(-2, rounds):
        for name, run in variants.items():
            if name in seldom and index % 4:
                continue
            sample = time_us(run, device)
            if index >= 0:
                samples[name].append(sample)
    return {name: Times.of(values) for name, values in samples.items()}


def copy_bytes_per_s(device: torch.device, size_bytes: int = 2 << 30, rounds: int = 10) -> float:
    """Bytes read plus bytes written per second by the device's own copy: the ceiling that shares refer to."""
    source = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    times = interleave({"copy": lambda: target.copy_(source)}, device, rounds)
    return 2 * size_bytes / times["copy"].median_us * 1e6


def machine(device: torch.device) -> dict[str, str | int]:
    """Device, versions and commit, to stand beside every figure."""
    from importlib.metadata import version

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
    """The commit measured: ``EAGLE_SLIM_COMMIT``, or git's answer with a "+" for local changes, or "unknown"."""
    if named := os.environ.get("EAGLE_SLIM_COMMIT"):
        return named
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).resolve().parent,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()
