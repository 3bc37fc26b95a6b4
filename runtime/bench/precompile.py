"""Compile kernels in parallel processes before anything is timed; Triton's cache on disk hands them over.

    python -m eagle_slim.runtime.bench.precompile --model smollm2-135m --sizes 49152 4096 2048 [--follow-rows 512]

compiles what `eagle-compare` will need for these sizes of a head of the model's dimensions, one sequence at a time.
Nothing is allocated: tensors are on the "meta" device, and their types, strides and alignment, which is what Triton
specialises on, are those of the launch to come.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple

import torch

from ..config import TreeConfig
from ..drafter.buffers import Buffers
from ..drafter.config import MAX_NEW_TOKENS, DrafterConfig
from ..drafter.follow import UNIT_ROWS
from ..kernels.launch_params import LaunchParams
from .problem import MODELS, Dims, first_rows, random_head


class Job(NamedTuple):
    """One kernel."""

    dims: Dims
    cfg: DrafterConfig
    params: LaunchParams
    packed_vocab: int | None = None
    """LM-head rows that are packed, where a launch uses fewer of them."""


def job_of(
    model: str, tree: TreeConfig, num_slots: int, capacity: int, draft_vocab: int, device: torch.device,
    packed_vocab: int | None = None, follow_rows: int = 0,
) -> Job:  # fmt: skip
    """The compilation that a `BufferedDrafter` of these dimensions (`problem.MODELS`) on this device will need.

    ``packed_vocab``: LM-head rows that are packed, where it drafts over fewer of them. ``follow_rows``: most rows that
    join.
    """
    from ..kernels.host import chip_of
    from ..kernels.tuned_cache import default_cache

    head = first_rows(random_head(MODELS[model], torch.device("meta")), draft_vocab)
    cfg = DrafterConfig.of(head, tree, num_slots, capacity + MAX_NEW_TOKENS)
    cfg = replace(cfg, tail_rows=-(-follow_rows // UNIT_ROWS) * UNIT_ROWS)
    return Job(MODELS[model], cfg, default_cache().lookup(cfg, chip_of(device)), packed_vocab)


def compile_one(job: Job) -> float:
    """Compile the kernel of one configuration into the cache; seconds it took."""
    from ..kernels import host
    from ..kernels.packed_head import pack_head
    from ..kernels.persistent import draft_kernel
    from ..kernels.tail_rows import allocate_tails
    from ..kernels.tuned_cache import FixedLaunch
    from ..kernels.workspace import allocate_workspace

    start = time.perf_counter()
    dims, cfg, params, packed_vocab = job
    device = torch.device("meta")
    head = first_rows(random_head(dims, device, cfg.dtype), packed_vocab or cfg.draft_vocab)
    packed = pack_head(head, cfg, FixedLaunch(params))
    bufs = Buffers.allocate(cfg, device)
    bufs.workspace.update(allocate_workspace(cfg, params, device))
    bufs = replace(bufs, tails=allocate_tails(cfg, params, device))
    features = torch.empty(cfg.num_slots, 16, cfg.feature_width, dtype=cfg.dtype, device=device)
    draft_kernel.warmup(
        grid=(params.num_programs,),
        **host.kernel_arguments(cfg, features, packed, bufs),
        **host.kernel_constants(cfg, params, packed.draft_vocab),
        **host.compile_options(params),
        launch_cooperative_grid=True,
    )
    return time.perf_counter() - start


def compile_all(jobs: Sequence[Job], seconds: float, processes: int | None = None) -> list[bool]:
    """Compile as many as ``seconds`` allow, in order; which are done. A failure shows again, in full, at the launch."""
    processes = processes or max(1, min(12, (os.cpu_count() or 2) - 2))
    if len(jobs) < 2 or processes < 2:
        return [False] * len(jobs)
    pool = ProcessPoolExecutor(min(processes, len(jobs)), mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(compile_one, job) for job in jobs]
    wait(futures, timeout=seconds)
    done = [future.done() and future.exception() is None for future in futures]
    failed = [future.exception() for future in futures if future.done() and future.exception() is not None]
    if failed:
        print(f"{len(failed)} compilations ahead failed: {failed[0]!r}", flush=True)
    pool.shutdown(wait=all(future.done() for future in futures), cancel_futures=True)
    return done


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="the largest is what is packed")
    parser.add_argument("--follow-rows", type=int, default=0, help="compile each but the largest with such a tail, too")
    parser.add_argument("--tree", type=int, nargs=3, default=(5, 10, 60), metavar=("DEPTH", "TOP_K", "NODES"))
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compiling ahead needs the NVIDIA GPU that the kernels are for")
    started, packed, tree = time.perf_counter(), max(args.sizes), TreeConfig(*args.tree)
    device = torch.device("cuda", torch.cuda.current_device())
    jobs = [
        job_of(args.model, tree, 1, 2048, size, device, packed, rows)
        for size in args.sizes
        for rows in sorted({0, args.follow_rows if size < packed else 0})
    ]
    done = compile_all(jobs, args.seconds)
    print(f"{sum(done)} of {len(jobs)} kernels compiled, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
