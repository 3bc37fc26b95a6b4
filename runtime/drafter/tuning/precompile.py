"""Compile kernels in parallel processes before anything is timed; Triton's cache on disk hands them over.

Nothing is allocated: tensors are on the "meta" device, and their types, strides and alignment, which is what Triton
specialises on, are those of the launch to come. Workers see no GPU (`kernels.compile_target`), so they take none of its
memory.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import NamedTuple

import torch

from ..dimensions import DrafterConfig
from ..kernels.compile_target import compile_only_for
from ..kernels.persistent import draft_kernel
from ..launch import allocate_buffers, compile_options, kernel_arguments, kernel_constants
from ..launch_params import LaunchParams
from ..packing import Weights, pack_head
from ..tuned_cache import always
from .problem import Dims, random_head

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """A kernel to compile."""

    dims: Dims
    cfg: DrafterConfig
    params: LaunchParams


def compile_one(job: Job) -> None:
    """Compile the kernel of one configuration into the cache."""
    dims, cfg, params = job
    device = torch.device("meta")
    head = random_head(dims, device, cfg.dtype).of_rows(slice(cfg.draft_vocab))
    packed = pack_head(head, cfg, always(params))
    bufs = allocate_buffers(cfg, Weights(head, packed))
    features = torch.empty(cfg.num_slots, 16, cfg.feature_width, dtype=cfg.dtype, device=device)
    draft_kernel.warmup(
        grid=(params.num_programs,),
        **kernel_arguments(cfg, features, packed, bufs),
        **kernel_constants(cfg, params, packed.draft_vocab),
        **compile_options(params),
        launch_cooperative_grid=True,
    )


def compile_all(jobs: Sequence[Job], capability: int, seconds: float) -> list[bool]:
    """Compile in order for as long as ``seconds``, for a ``capability`` (90 for sm_90); returns which are done.

    A failure shows again, in full, at the launch. An interrupt is this process's alone: a pool whose workers it ends
    can wait for them forever.
    """
    processes = max(1, min(12, (os.cpu_count() or 2) - 2))
    if len(jobs) < 2 or processes < 2:
        return [False] * len(jobs)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(jobs)), context, begin_worker, (capability,))
    futures = [pool.submit(compile_one, job) for job in jobs]
    try:
        wait(futures, timeout=seconds)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    done = [future.done() and future.exception() is None for future in futures]
    failed = [future.exception() for future in futures if future.done() and future.exception() is not None]
    if failed:
        logger.warning("%d compilations failed: %r", len(failed), failed[0])
    # What still compiles may go on.
    pool.shutdown(wait=all(future.done() for future in futures), cancel_futures=True)
    return done


def begin_worker(capability: int) -> None:
    """Make this process one that only compiles: it ignores interrupts and can reach no GPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    compile_only_for(capability)
