"""The drafting kernel's barrier in a launch of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.drafter.kernels.grid_barrier import grid_barrier, leave_grid
from torch import Tensor


@triton.jit
def _count_rounds_kernel(state_ptr, seen_ptr, out_ptr, num_rounds, NUM_CTAS: tl.constexpr):
    """Each round every program publishes the round number and, after the barrier, checks its neighbour's."""
    pid = tl.program_id(0)
    neighbour = (pid + 1) % NUM_CTAS
    good = 0
    for i in range(num_rounds):
        tl.store(seen_ptr + pid, i + 1)
        grid_barrier(state_ptr, 2 * i + 1, NUM_CTAS)
        good += (tl.load(seen_ptr + neighbour, volatile=True) == i + 1).to(tl.int32)
        grid_barrier(state_ptr, 2 * i + 2, NUM_CTAS)
    tl.store(out_ptr + pid, good)
    leave_grid(state_ptr, NUM_CTAS)


def count_rounds(state: Tensor, num_programs: int, num_rounds: int, num_warps: int = 8) -> Tensor:
    """Run ``2 * num_rounds`` barriers and return, per program, the rounds that were seen right: int32 [programs].

    ``state``: int32 [4] zeros, on the GPU; its ERROR word tells of a timeout afterwards.
    """
    seen = torch.zeros(num_programs, dtype=torch.int32, device=state.device)
    out = torch.full_like(seen, -1)
    cooperative = {"launch_cooperative_grid": True} if state.is_cuda else {}
    _count_rounds_kernel[(num_programs,)](
        state, seen, out, num_rounds, NUM_CTAS=num_programs, num_warps=num_warps, **cooperative
    )
    return out
