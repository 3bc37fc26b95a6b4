"""The parts of the drafting kernel that stand alone, one launch for each: what their tests call."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.drafter.kernels.gated_mlp import MlpShape, gated_mlp
from eagle_slim.runtime.drafter.kernels.grid_barrier import grid_barrier, leave_grid
from eagle_slim.runtime.drafter.kernels.lm_topk import (
    HeadRows,
    HeadTiles,
    Lists,
    Nodes,
    Selection,
    len_lists,
    lists_at,
    merge_best,
    stream_topk,
)
from eagle_slim.runtime.drafter.kernels.packing import (
    assign_rows,
    chunk_size,
    cut_chunks,
    cut_tiles,
    rows_per_program,
)
from eagle_slim.runtime.drafter.kernels.selection import LOWEST_KEY
from eagle_slim.runtime.drafter.kernels.tree_build import (
    TreeCandidates,
    TreeOutputs,
    TreeShape,
    build_tree,
    candidates_of,
)
from eagle_slim.runtime.drafter.kernels.weight_stream import Tile
from torch import Tensor


@triton.jit
def _mlp_kernel(
    x_ptr, factor_ptr, stream_ptr, bias_ptr, out_ptr, num_rows,
    BLOCK_M: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    factor = tl.load(factor_ptr + offs_m, mask=mask_m, other=0.0)
    region = stream_ptr + tl.program_id(0) * (2 * SHAPE.rows * SHAPE.hidden)
    gated_mlp(x_ptr, factor, mask_m, region, factor_ptr, bias_ptr, out_ptr, SHAPE, TILE)


def gated_mlp_on_device(
    x: Tensor, factor: Tensor, gate: Tensor, up: Tensor, num_programs: int = 1, block_n: int = 64,
    activation: str = "silu", bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `gated_mlp_ref` as the drafter does, in ``x``'s dtype: [rows, intermediate].

    All but ``factor`` of x's dtype; at most 256 rows, hidden a multiple of 16. Packs the weights on each call.
    """
    (rows, hidden), intermediate = x.shape, gate.shape[0]
    block_k = chunk_size(hidden, 64)
    stream = torch.cat([cut_chunks(assign_rows(matrix, num_programs), block_k) for matrix in (gate, up)], 2)
    out = torch.empty(rows, intermediate, dtype=x.dtype, device=x.device)
    rows_each = rows_per_program(intermediate, num_programs)
    shape = MlpShape(hidden, intermediate, rows_each, block_k, False, activation, bias is not None)
    block_m = max(16, triton.next_power_of_2(rows))
    biases = x if bias is None else bias
    _mlp_kernel[(num_programs,)](
        x, factor, stream.contiguous(), biases, out, rows, block_m, shape, Tile(block_n, block_k, 2), num_warps=8
    )
    return out


@triton.jit
def _stream_kernel(
    x_ptr, w_ptr, ids_ptr, scratch_ptr, lists, num_rows_x, num_rows_w, stride_x,
    ROWS: tl.constexpr, SELECT: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_ctas = tl.num_programs(0)
    BLOCK_M: tl.constexpr = SELECT.block_m
    HIDDEN: tl.constexpr = HEAD.hidden
    offs_m = tl.arange(0, BLOCK_M)
    mine = (num_rows_w - pid + num_ctas - 1) // num_ctas
    first_list = pid.to(tl.int64) * BLOCK_M
    head = HeadRows(w_ptr + pid.to(tl.int64) * ROWS * HIDDEN, w_ptr, ids_ptr + pid * ROWS, mine)
    stream_topk(
        x_ptr, tl.full([BLOCK_M], 1.0, tl.float32), offs_m.to(tl.int64) * stride_x, offs_m < num_rows_x,
        Nodes(1, num_rows_x), head, scratch_ptr + first_list * HEAD.tile.block_n,
        lists_at(lists, first_list, SELECT), SELECT, HEAD,
    )  # fmt: skip


@triton.jit
def _merge_lists_kernel(lists, owner_ptr, out_values_ptr, out_ids_ptr, out_lse_ptr, num_lists, SELECT: tl.constexpr):
    TOP_K: tl.constexpr = SELECT.top_k
    row = tl.program_id(0)
    owner = owner_ptr + row * SELECT.max_k
    rank, value, index, lse = merge_best(lists_at(lists, row, SELECT), owner, num_lists, SELECT)
    tl.store(out_values_ptr + row * TOP_K + rank, value, mask=rank < TOP_K)
    tl.store(out_ids_ptr + row * TOP_K + rank, index, mask=rank < TOP_K)
    tl.store(out_lse_ptr + row, lse)


def lm_head_topk(
    x: Tensor, weight: Tensor, top_k: int, num_programs: int | None = None, block_n: int = 256, block_k: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lm_head_topk_ref` with the streaming kernel (two launches); ``num_programs``: default one per SM."""
    rows, hidden = x.shape
    vocab = weight.shape[0]
    block_k = chunk_size(hidden, block_k)
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    block_m = max(16, triton.next_power_of_2(rows))
    select = Selection.of(top_k, block_m, block_m, num_programs)
    num_warps = 8 if x.is_cuda else 1
    rows_each = rows_per_program(vocab, num_programs)
    packed = cut_tiles(assign_rows(weight, num_programs, dealt=True), block_n, block_k)
    all_ids = torch.arange(vocab, dtype=torch.int32, device=x.device)
    row_ids = assign_rows(all_ids, num_programs, dealt=True).contiguous()
    lists = Lists(
        torch.full(
            (len_lists(num_programs), block_m, select.max_k), LOWEST_KEY.value, dtype=torch.int64, device=x.device
        ),
        torch.empty(num_programs, block_m, dtype=torch.float32, device=x.device),
        torch.empty(num_programs, block_m, dtype=torch.float32, device=x.device),
    )
    scratch = torch.empty(num_programs, block_m, block_n, dtype=torch.float32, device=x.device)
    _stream_kernel[(num_programs,)](
        x, packed, row_ids, scratch, lists, rows, vocab, x.stride(0), rows_each, select,
        HeadTiles(block_n, rows_each, hidden, block_k, False, rows_each > block_n, Tile(block_n, block_k, 3)),
        num_warps=num_warps,
    )  # fmt: skip
    out = (
        torch.empty(rows, top_k, dtype=torch.float32, device=x.device),
        torch.empty(rows, top_k, dtype=torch.int32, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    owner = torch.empty(rows, select.max_k, dtype=torch.int32, device=x.device)
    _merge_lists_kernel[(rows,)](lists, owner, *out, min(num_programs, vocab), select, num_warps=num_warps)
    return out


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
