"""Tree build on the device: all drafted candidates in, the draft tree in its fixed shapes out; one program a sequence.

The definition is `eagle_slim.runtime.tree.build_tree` (its docstring has the worked example): the best
``total_tokens - 1`` candidates by (fp32 score descending, candidate index ascending), in candidate order, below the
root. A chosen candidate's parent is always chosen, so a parent's node index is found by a table from candidate to node.

Limits: total_tokens <= 128, candidates <= 4096.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_tensors
from .selection import best_k_mask
from .weight_stream import hidden_zero


@triton.jit
def build_tree(
    token_ptr,  # int32 [candidates] of this sequence
    score_ptr,  # fp32 [candidates]
    parent_ptr,  # int32 [candidates]: candidate index, -1 for the root's children
    node_of_ptr,  # int32 [candidates]: scratch, node of each chosen candidate
    chosen_ptr,  # int32 [TOTAL]: scratch, candidate of each node
    root_token,
    slot,
    draft_tokens_ptr,  # int64 [slots, TOTAL]
    parents_ptr,  # int64 [slots, TOTAL]
    tree_mask_ptr,  # bool [slots, 1, TOTAL, TOTAL]
    position_ptr,  # int64 [slots, TOTAL]
    retrieve_ptr,  # int64 [slots, TOTAL, WIDTH]
    num_leaves_ptr,  # int64 [slots]
    CANDIDATES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Choose the nodes and write every output of one slot."""
    zero = hidden_zero()
    offs_c = tl.arange(0, BLOCK_C) + zero
    real = offs_c < CANDIDATES
    score = tl.load(score_ptr + offs_c, mask=real, other=float("-inf"))
    chosen = best_k_mask(score, real, TOTAL - 1)
    node = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(node_of_ptr + offs_c, node, mask=chosen)
    tl.store(chosen_ptr + node, offs_c, mask=chosen)
    tl.debug_barrier()

    offs_t = tl.arange(0, BLOCK_T) + zero
    mask_t = offs_t < TOTAL
    drafted = mask_t & (offs_t > 0)
    candidate = tl.load(chosen_ptr + offs_t, mask=drafted, other=0)
    token = tl.load(token_ptr + candidate, mask=drafted, other=0)
    parent_candidate = tl.load(parent_ptr + candidate, mask=drafted, other=-1)
    parent = tl.load(node_of_ptr + parent_candidate, mask=drafted & (parent_candidate >= 0), other=0)
    parent = tl.where(drafted, parent, -1)
    slot_64 = slot.to(tl.int64)
    row = slot_64 * TOTAL
    tl.store(draft_tokens_ptr + row + offs_t, tl.where(drafted, token, root_token).to(tl.int64), mask=mask_t)
    tl.store(parents_ptr + row + offs_t, parent.to(tl.int64), mask=mask_t)
    tl.debug_barrier()

    # Walk all nodes to the root together: each step marks one more ancestor.
    offs_w = tl.arange(0, BLOCK_W)
    depth = tl.zeros([BLOCK_T], tl.int32)
    current = tl.where(mask_t, offs_t, -1)
    marks = tl.zeros([BLOCK_T, BLOCK_T], tl.int32)
    for _ in range(WIDTH):
        marks = marks | (offs_t[None, :] == current[:, None]).to(tl.int32)
        above = tl.load(parents_ptr + row + current, mask=current >= 0, other=-1).to(tl.int32)
        depth += (above >= 0).to(tl.int32)
        current = above
    mask_tt = mask_t[:, None] & mask_t[None, :]
    mask_offs = (row + offs_t[:, None]) * TOTAL + offs_t[None, :]
    tl.store(tree_mask_ptr + mask_offs, marks != 0, mask=mask_tt)
    tl.store(position_ptr + row + offs_t, depth.to(tl.int64), mask=mask_t)

    is_parent = tl.sum(((parent[:, None] == offs_t[None, :]) & mask_t[:, None]).to(tl.int32), axis=0) > 0
    is_leaf = mask_t & (is_parent == 0)
    leaf_row = tl.cumsum(is_leaf.to(tl.int32), axis=0) - 1
    num_leaves = tl.sum(is_leaf.to(tl.int32), axis=0)
    tl.store(num_leaves_ptr + slot, num_leaves.to(tl.int64))
    mask_tw = mask_t[:, None] & (offs_w < WIDTH)[None, :]
    blank = tl.full([BLOCK_T, BLOCK_W], -1, tl.int64)
    unused = mask_tw & (offs_t >= num_leaves)[:, None]
    tl.store(retrieve_ptr + (row + offs_t[:, None]) * WIDTH + offs_w[None, :], blank, mask=unused)
    path = tl.full([BLOCK_T, BLOCK_W], -1, tl.int32)
    current = tl.where(mask_t, offs_t, -1)
    for step in range(WIDTH):
        here = (offs_w[None, :] == (depth - step)[:, None]) & (current >= 0)[:, None]
        path = tl.where(here, current[:, None], path)
        current = tl.load(parents_ptr + row + current, mask=current >= 0, other=-1).to(tl.int32)
    leaf_offs = (row + leaf_row[:, None]) * WIDTH + offs_w[None, :]
    tl.store(retrieve_ptr + leaf_offs, path.to(tl.int64), mask=mask_tw & is_leaf[:, None])


@triton.jit
def blank_tree(
    slot, draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
    TOTAL: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write an inactive slot's outputs: -1 for tokens, parents and paths, 0 for the rest."""
    offs_t = tl.arange(0, BLOCK_T)
    offs_w = tl.arange(0, BLOCK_W)
    mask_t = offs_t < TOTAL
    row = slot.to(tl.int64) * TOTAL
    minus = tl.full([BLOCK_T], -1, tl.int64)
    tl.store(draft_tokens_ptr + row + offs_t, minus, mask=mask_t)
    tl.store(parents_ptr + row + offs_t, minus, mask=mask_t)
    tl.store(position_ptr + row + offs_t, minus + 1, mask=mask_t)
    mask_tt = mask_t[:, None] & mask_t[None, :]
    none = tl.zeros([BLOCK_T, BLOCK_T], tl.int32) != 0
    tl.store(tree_mask_ptr + (row + offs_t[:, None]) * TOTAL + offs_t[None, :], none, mask=mask_tt)
    mask_tw = mask_t[:, None] & (offs_w < WIDTH)[None, :]
    blank = tl.full([BLOCK_T, BLOCK_W], -1, tl.int64)
    tl.store(retrieve_ptr + (row + offs_t[:, None]) * WIDTH + offs_w[None, :], blank, mask=mask_tw)
    tl.store(num_leaves_ptr + slot, tl.zeros([], tl.int64))


@triton.jit
def _build_tree_kernel(
    token_ptr, score_ptr, parent_ptr, node_of_ptr, chosen_ptr, root_ptr,
    draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
    CANDIDATES: tl.constexpr, BLOCK_C: tl.constexpr, TOTAL: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row = slot.to(tl.int64) * CANDIDATES
    build_tree(
        token_ptr + row, score_ptr + row, parent_ptr + row, node_of_ptr + row, chosen_ptr + slot * TOTAL,
        tl.load(root_ptr + slot), slot,
        draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
        CANDIDATES, BLOCK_C, TOTAL, BLOCK_T, WIDTH, BLOCK_W,
    )  # fmt: skip


def build_tree_on_device(
    root_tokens: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, total_tokens: int, path_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build the trees of a batch: the fields of `eagle_slim.runtime.tree.DraftTree`, in their order.

    ``root_tokens`` int32 [batch]; ``tokens`` int32, ``scores`` fp32, ``parents`` int32 [batch, candidates]. Raises
    `ValueError` for other tensors, beyond 128 nodes or 4096 candidates, or when there are fewer candidates than nodes
    to choose.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [batch, candidates]; got {list(tokens.shape)}")
    batch, candidates = tokens.shape
    check_tensors(
        tokens.device, tokens=(tokens, torch.int32, (batch, candidates)),
        scores=(scores, torch.float32, (batch, candidates)), parents=(parents, torch.int32, (batch, candidates)),
        root_tokens=(root_tokens, torch.int32, (batch,)),
    )  # fmt: skip
    if not 2 <= total_tokens <= min(128, candidates + 1) or candidates > 4096:
        raise ValueError(f"{total_tokens=} must be 2..min(128, {candidates} + 1) and candidates at most 4096")
    device = tokens.device
    int64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    outputs = (
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
        tokens, scores, parents, node_of, chosen, root_tokens, *outputs,
        CANDIDATES=candidates, BLOCK_C=triton.next_power_of_2(candidates), TOTAL=total_tokens,
        BLOCK_T=max(16, triton.next_power_of_2(total_tokens)), WIDTH=path_width,
        BLOCK_W=triton.next_power_of_2(path_width), num_warps=8,
    )  # fmt: skip
    return outputs
