"""Compile the draft kernel for many configurations side by side, before anything is timed.

Nothing is allocated: tensors are on the "meta" device, and their types, strides and alignment, which is what Triton
specialises on, are those of the launch to come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...compiling.kernels.jobs import Job, recording
from ...compiling.pool import CompilePool
from ..dimensions import DrafterConfig
from ..kernels.persistent import draft_kernel
from ..launch import allocate_buffers, compile_options, kernel_arguments, kernel_constants
from ..launch_params import LaunchParams
from ..packing import Weights, pack_head
from ..tuned_cache import always
from .problem import Dims, random_head


class LaunchCase(NamedTuple):
    """A launch of the draft kernel."""

    dims: Dims
    cfg: DrafterConfig
    params: LaunchParams


def record_launch(case: LaunchCase) -> list[Job]:
    """Record the kernel of one launch."""
    dims, cfg, params = case
    device = torch.device("meta")
    head = random_head(dims, device, cfg.dtype).of_rows(slice(cfg.draft_vocab))
    packed = pack_head(head, cfg, always(params))
    bufs = allocate_buffers(cfg, Weights(head, packed))
    features = torch.empty(cfg.num_slots, 16, cfg.feature_width, dtype=cfg.dtype, device=device)
    jobs: dict[Job, None] = {}
    with recording(jobs):
        draft_kernel[(params.num_programs,)](
            **kernel_arguments(cfg, features, packed, bufs),
            **kernel_constants(cfg, params, packed.draft_vocab),
            **compile_options(params),
            launch_cooperative_grid=True,
        )
    return list(jobs)


def compile_all(cases: Sequence[LaunchCase], capability: int, seconds: float) -> list[bool]:
    """Compile in order for as long as ``seconds``, for a ``capability`` (90 for sm_90); returns which are done.

    What still compiles then goes on, and a failure shows in full at the launch.
    """
    if len(cases) < 2:
        return [False] * len(cases)
    pool, started = CompilePool(capability), time.monotonic()
    launches = [record_launch(case) for case in cases]
    for jobs in launches:
        pool.submit(jobs)
    pool.wait([job for jobs in launches for job in jobs], seconds - (time.monotonic() - started))
    return [pool.are_done(jobs) for jobs in launches]
