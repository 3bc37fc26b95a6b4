"""Time variants on a device: CUDA graphs, and calls of variants in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from ...ops import side_stream


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


def interleave(
    variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Time variants in turn, ``rounds`` times after two to warm up: microseconds of each call, by variant."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(-2, rounds):
        for name, run in variants.items():
            sample = time_us(run, device)
            if index >= 0:
                samples[name].append(sample)
    return samples


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """Record a callable in a CUDA graph after warming it up on the side stream; returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    with side_stream() as stream:
        for _ in range(3):
            run()
        with torch.cuda.graph(graph, stream=stream):
            run()

    # What ``run`` holds must live as long as the graph.
    def replay(_kept: object = run) -> None:
        graph.replay()

    return replay
