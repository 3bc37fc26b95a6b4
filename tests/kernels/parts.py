"""The parts of the drafting kernel that stand alone, one launch for each: what their tests call."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.drafter.kernels.ancestor_attention import (
    AttentionParts,
    AttentionShape,
    KVCache,
    Rope,
    attend_unit,
    cache_at,
    heads_per_attention_unit,
    merge_parts,
    parts_at,
    query_place,
    unit_of,
)
from eagle_slim.runtime.drafter.kernels.frontier import ROWS, Frontier, choose_frontier
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
from eagle_slim.runtime.drafter.kernels.row_operands import RowShape, norm_factor, write_taps
from eagle_slim.runtime.drafter.kernels.selection import LOWEST_KEY, order_key
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
def _frontier_kernel(
    score_ptr, key_ptr, level, num_nodes, first_candidate, frontier, chain_ptr, next_chain_ptr, SELECT: tl.constexpr
):
    MAX_K: tl.constexpr = SELECT.max_k
    place = tl.arange(0, SELECT.pairs)
    node = place // MAX_K
    child = place % MAX_K
    real = (node < num_nodes) & (child < SELECT.top_k)
    candidate = node * SELECT.top_k + child
    score = tl.load(score_ptr + candidate, mask=real, other=0.0)
    tl.store(key_ptr + place, tl.where(real, order_key(score, candidate), LOWEST_KEY))
    tl.debug_barrier()
    choose_frontier(key_ptr, num_nodes, first_candidate, level, frontier, chain_ptr, next_chain_ptr, SELECT)


def frontier_on_device(scores: Tensor, chains: Tensor, level: int, top_k: int) -> tuple[Frontier, Tensor]:
    """Choose the next level's nodes; arguments as `frontier_ref`, ``top_k`` 1 to 16."""
    nodes = 1 if level == 0 else top_k
    select = Selection.of(top_k, 16, 16, 1)
    keys = torch.empty(select.pairs, dtype=torch.int64, device=scores.device)
    frontier = Frontier(scores.new_empty(16), *(chains.new_empty(16) for _ in range(3)))
    longer = torch.empty_like(chains)
    first = 0 if level == 0 else top_k + (level - 1) * top_k**2
    _frontier_kernel[(1,)](scores, keys, level, nodes, first, frontier, chains, longer, select, num_warps=8)
    return Frontier(*(field[:top_k] for field in frontier)), longer[:top_k]


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
def _attention_kernel(
    qkv_ptr, norm_ptr, cache, rope, chain_ptr, parts, prefix_ptr, num_new_ptr, level, SHAPE: tl.constexpr
):
    group = tl.program_id(0)
    num_parts = tl.num_programs(1)
    slot, unit = unit_of(group, tl.program_id(1), num_parts, SHAPE)
    attend_unit(
        qkv_ptr + slot * ROWS * SHAPE.qkv_size, norm_ptr, cache_at(cache, slot.to(tl.int64), unit.kv_head), rope,
        chain_ptr + slot * ROWS * SHAPE.max_depth, parts_at(parts, group.to(tl.int64) * num_parts, SHAPE), unit,
        tl.load(prefix_ptr + slot), tl.load(num_new_ptr + slot), level + slot * 0, SHAPE, True,
    )  # fmt: skip


@triton.jit
def _merge_parts_kernel(parts, out_ptr, num_parts, SHAPE: tl.constexpr):
    slot, node = tl.program_id(0), tl.program_id(1)
    head = tl.program_id(2) + tl.arange(0, 1)
    group, row = query_place(slot, node, head, SHAPE)
    merge_parts(
        parts, group.to(tl.int64) * num_parts, row, head * 0 + num_parts, head >= 0,
        out_ptr, head * 0 + slot * ROWS + node, head, SHAPE,
    )  # fmt: skip


def ancestor_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, chain: Tensor,
    prefix: Tensor, num_new: Tensor, level: int, heads: int, kv_heads: int, top_k: int,
    num_parts: int = 1, block_t: int = 64, window: int | None = None, norms: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attend one pass of drafted nodes, and append their keys and values to the cache.

    Arguments as `ancestor_attention_ref`. Returns [slots, 16, heads * head_dim] of the cache's dtype; rows that do not
    query are undefined. The caller sees to it that all positions are within the cache.
    """
    slots, head_dim = keys.shape[0], keys.shape[3]
    shape = AttentionShape(
        heads, kv_heads, head_dim, top_k, chain.shape[-1], heads_per_attention_unit(heads // kv_heads, head_dim),
        block_t, slots, max_parts=max(2, triton.next_power_of_2(num_parts)), window=window or 0,
        head_norms=norms is not None, norm_eps=eps,
    )  # fmt: skip
    groups = slots * shape.groups
    out = torch.empty(slots, 16, heads * head_dim, dtype=keys.dtype, device=qkv.device)
    parts = AttentionParts(
        qkv.new_empty(groups, num_parts, 2, shape.group_rows),
        qkv.new_empty(groups, num_parts, shape.group_rows, shape.block_d),
    )
    cached = KVCache(keys, values, keys.stride(0), keys.stride(1))
    _attention_kernel[(groups, num_parts)](
        qkv, norms, cached, Rope(cos, sin), chain, parts, prefix, num_new, level, shape, num_warps=8
    )
    nodes = 1 if level == 0 else top_k
    _merge_parts_kernel[(slots, nodes, heads)](parts, out, num_parts, shape, num_warps=4)
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


@triton.jit
def _taps_kernel(
    source_ptr, offset_1, offset_2, x_ptr, factor_ptr, norm_ptr, stride, SHAPE: tl.constexpr, SCALED: tl.constexpr
):
    row = tl.program_id(0)
    write_taps(source_ptr + row * stride, offset_1, offset_2, x_ptr, row, factor_ptr + row, norm_ptr, SHAPE, SCALED)


@triton.jit
def _factor_kernel(squares_ptr, out_ptr, num_rows, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, SHAPE: tl.constexpr):
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    tl.store(out_ptr + offs_m, norm_factor(squares_ptr, mask_m, PROGRAMS, SHAPE), mask=mask_m)


def tap_operands(
    taps: tuple[Tensor, ...], scaled: bool, norm: Tensor | None = None, norms: int = 1, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Join one tap or three, [rows, size] of one dtype, as operands: `tap_operands_ref` on the device, fp32.

    ``norms``: one, or as many as pieces; one tensor is cut into so many.
    """
    first = taps[0]
    rows, size = first.shape
    segments = norms if len(taps) == 1 else len(taps)
    piece = size * len(taps) // segments
    offsets = [(tap.data_ptr() - first.data_ptr()) // first.element_size() for tap in (*taps, first, first)[1:3]]
    if len(taps) == 1:
        offsets = [piece, 2 * piece]
    x = torch.empty(rows, len(taps) * size, device=first.device)
    divisor = torch.ones(rows, device=first.device)
    shape = RowShape(piece, segments, eps, 0 if norm is None else norms)
    _taps_kernel[(rows,)](first, *offsets, x, divisor, first if norm is None else norm, first.stride(0), shape, scaled)
    return x, divisor


def norm_factors(squares: Tensor, size: int, eps: float) -> Tensor:
    """Compute `norm_factors_ref` on the device, for up to 256 rows."""
    programs, rows = squares.shape
    block_m = max(16, triton.next_power_of_2(rows))
    padded = squares.new_full((programs, block_m), float("nan"))
    padded[:, :rows] = squares
    out = squares.new_empty(rows)
    _factor_kernel[(1,)](padded, out, rows, programs, block_m, RowShape(size, eps=eps))
    return out
