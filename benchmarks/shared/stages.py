"""Where a draft's time goes, phase by phase: the kernel built with time stamps at both edges of every barrier.

A phase is what lies between two barriers: the work of each program, the wait for the slowest, and the barrier itself.
Stamps are nanoseconds of the GPU's global timer, which ticks about once a microsecond on some chips and every 32 ns on
others: single phases are as coarse as that, their means over levels less so. The tree build comes after the last
barrier and is not among the phases.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.drafter import BufferedDrafter
from eagle_slim.runtime.drafter.kernels import grid_barrier
from eagle_slim.runtime.drafter.launch import check_finished
from torch import Tensor


def phases(cfg: DrafterConfig, split: Mapping[str, int]) -> list[str]:
    """Name what each barrier ends, in order; ``split`` as in `LaunchParams`."""

    def projection(name: str) -> list[str]:
        # A program alone adds up what it multiplied, within the same phase.
        return [name, f"{name} sum"] if split[name] > 1 else [name]

    start = ["rows"]
    fc = projection("fc") if cfg.has_fc else []
    if cfg.kind == "eagle3" and fc:
        start = [*start, *fc, "norm"]
    level = [*projection("qkv"), "attention", "merge", *projection("o"), "mlp", *projection("down"), "head", "pick"]
    level = [*fc, *level] if cfg.kind == "eagle" else level
    return (start + level * (cfg.depth + 1))[:-1]


def stamp_barriers() -> None:
    """Have barriers leave time stamps in every kernel compiled from now on; call before the first is."""
    grid_barrier.TIMED = type(grid_barrier.TIMED)(True)


def time_phases(drafter: BufferedDrafter, rounds: int = 6) -> list[dict[str, float | str]]:
    """Draft ``rounds`` times and summarise the stamps; the first draft is left out.

    One entry a phase, levels together: ``us`` from barrier to barrier, the mean of its ``times``.
    """
    assert drafter.weights.packed is not None
    layout, bufs = drafter.weights.packed.launches.layout, drafter.bufs
    names, programs = phases(drafter.cfg, layout.split), layout.num_programs
    offset = int(getattr(grid_barrier.STAMPS_AT, "value", grid_barrier.STAMPS_AT))
    size = offset + (len(names) + 1) * programs * 2 * 2
    bufs.workspace["barrier"] = torch.zeros(size, dtype=torch.int32, device=drafter.features.device)
    drafts = []
    for index in range(rounds + 1):
        drafter.draft()
        check_finished(bufs)
        stamps = bufs.workspace["barrier"][offset:].view(torch.int64).view(len(names) + 1, programs, 2)
        if index:
            drafts.append(stamps[1:].cpu().double() / 1e3)
    return summarise(names, torch.stack(drafts))


def summarise(names: Sequence[str], stamps_us: Tensor) -> list[dict[str, float | str]]:
    """Turn stamps float64 [drafts, barriers, programs, (arrival, leaving)] into the entries of `time_phases`.

    The first phase has no barrier before it and is left out.
    """
    leaving = stamps_us[..., 1].mean(-1)  # [drafts, barriers]
    total = leaving[:, 1:] - leaving[:, :-1]
    entries: list[dict[str, float | str]] = []
    for name in dict.fromkeys(names[1:]):
        places = [place for place, other in enumerate(names[1:]) if other == name]
        us = float(statistics.median(total[:, places].mean(1).tolist()))
        entries.append({"phase": name, "times": len(places), "us": us})
    return entries
