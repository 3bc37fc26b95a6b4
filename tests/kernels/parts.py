"""The drafting kernel's tree and barrier, a launch of its own for each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.drafter.kernels.grid_barrier import grid_barrier, leave_grid
from eagle_slim.runtime.drafter.kernels.tree_build import (
    TreeCandidates,
    TreeOutputs,
    TreeShape,
    build_tree,
    candidates_of,
)
from torch import Tensor


@triton.jit
def _build_tree_kernel(drafted, root_ptr, out, SHAPE: tl.constexpr):
    slot = tl.program_id(0)
    build_tree(candidates_of(drafted, slot.to(tl.int64), SHAPE), tl.load(root_ptr + slot), slot, out, SHAPE)


def build_tree_on_device(
    root_tokens: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, total_tokens: int, path_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build the trees of a batch: the fields of `eagle_slim.runtime.tree.DraftTree`, in their order.

    ``root_tokens`` int32 [batch]; ``tokens`` int32, ``scores`` fp32, ``parents`` int32 [batch, candidates], of
    which there are as many as nodes to choose, and up to 4096; at most 128 nodes.
    """
    batch, candidates = tokens.shape
    device = tokens.device
    int64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    outputs = TreeOutputs(
        torch.empty(batch, total_tokens, **int64),
        torch.empty(batch, total_tokens, **int64),
        torch.empty(batch, 1, total_tokens, total_tokens, dtype=torch.bool, device=device),
        torch.empty(batch, total_tokens, **int64),
        torch.empty(batch, total_tokens, path_width, **int64),
        torch.empty(batch, **int64),
    )
    node_of = torch.empty(batch, candidates, dtype=torch.int32, device=device)
    chosen = torch.empty(batch, total_tokens, dtype=torch.int32, device=device)
    _build_tree_kernel[(batch,)](
        TreeCandidates(tokens, scores, parents, node_of, chosen), root_tokens, outputs,
        TreeShape(candidates, total_tokens, path_width), num_warps=8,
    )  # fmt: skip
    return outputs


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
