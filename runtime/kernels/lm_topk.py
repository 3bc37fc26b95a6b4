"""Streaming top-k over the LM head: the k best rows of ``x @ weight.T`` and its log-sum-exp, without the logits.

    values[r], ids[r] = k best of logits[r] by (logit descending, id ascending);  lse[r] = log sum exp logits[r]

Each program multiplies its block of LM-head rows, tile by tile. A tile of logits passes through a scratch of its own
(fp32 [BLOCK_M, BLOCK_N], which stays in the L2) so that one node's logits lie in one warp, where k rounds of
take-the-largest keep the k best and a running maximum and sum. Per program and node only k (value, id) pairs and two
floats reach memory; merging picks the k best programs by their first pair, then the k best of their k * k pairs.

Bytes moved: the LM head once. Limits: k <= 16, draft vocabulary >= k, logits without NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .selection import NO_INDEX, place_by_rank, rank_all_pairs
from .weight_stream import assign_rows, chunk_size, cut_tiles, rows_per_program, stream_matmul

SELECT_ROWS = tl.constexpr(16)
"""Nodes selected at a time: 16 rows of 256 logits are 16 registers a thread."""


@triton.jit
def update_best(
    scratch_ptr,  # fp32 [BLOCK_M, BLOCK_N], this program's
    ids,  # int32 [BLOCK_N]: id of each column, NO_INDEX for padding
    values_ptr,  # fp32 [rows, MAX_K] of this program: the best so far
    ids_ptr,  # int32 [rows, MAX_K]
    max_ptr,  # fp32 [rows]
    sum_ptr,  # fp32 [rows]
    row_ids,  # int32 [SELECT_ROWS]
    mask_rows,  # int1 [SELECT_ROWS]
    tile_start,  # first row of this tile; at 0 there is nothing to fold into
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold one tile of logits into this program's best pairs and log-sum-exp, for SELECT_ROWS nodes."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, MAX_K)
    real = (ids != NO_INDEX)[None, :] & mask_rows[:, None]
    logits = tl.load(scratch_ptr + row_ids[:, None] * BLOCK_N + offs_n[None, :], mask=real, other=float("-inf"))
    list_offs = row_ids[:, None] * MAX_K + offs_k[None, :]
    kept = mask_rows[:, None] & (offs_k < TOP_K)[None, :] & (tile_start > 0)
    old_values = tl.load(values_ptr + list_offs, mask=kept, other=float("-inf"))
    old_ids = tl.load(ids_ptr + list_offs, mask=kept, other=NO_INDEX)
    old_max = tl.load(max_ptr + row_ids, mask=mask_rows & (tile_start > 0), other=float("-inf"))
    old_sum = tl.load(sum_ptr + row_ids, mask=mask_rows & (tile_start > 0), other=0.0)

    new_max = tl.maximum(old_max, tl.max(logits, axis=1))
    # A row of -inf only would make -inf - -inf; subtracting 0 instead leaves exp(-inf) = 0.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    new_sum = old_sum * tl.exp(old_max - shift) + tl.sum(tl.exp(logits - shift[:, None]), axis=1)
    tl.store(max_ptr + row_ids, new_max, mask=mask_rows)
    tl.store(sum_ptr + row_ids, new_sum, mask=mask_rows)

    tile_ids = tl.where(real, tl.broadcast_to(ids[None, :], [SELECT_ROWS, BLOCK_N]), NO_INDEX)
    for k in range(TOP_K):
        best = tl.maximum(tl.max(logits, axis=1), tl.max(old_values, axis=1))
        from_tile = tl.min(tl.where(logits == best[:, None], tile_ids, NO_INDEX), axis=1)
        from_old = tl.min(tl.where(old_values == best[:, None], old_ids, NO_INDEX), axis=1)
        best_id = tl.minimum(from_tile, from_old)
        tl.store(values_ptr + row_ids * MAX_K + k, best, mask=mask_rows)
        tl.store(ids_ptr + row_ids * MAX_K + k, best_id, mask=mask_rows)
        taken = (tile_ids == best_id[:, None]) & (tile_ids != NO_INDEX)
        logits = tl.where(taken, float("-inf"), logits)
        tile_ids = tl.where(taken, NO_INDEX, tile_ids)
        taken_old = (old_ids == best_id[:, None]) & (old_ids != NO_INDEX)
        old_values = tl.where(taken_old, float("-inf"), old_values)
        old_ids = tl.where(taken_old, NO_INDEX, old_ids)


@triton.jit
def stream_topk(
    x_ptr,
    x_row,  # int64 [BLOCK_M]
    row_scale,  # fp32 [BLOCK_M]: multiplies each row's logits (the folded RMSNorm), 1.0 for none
    mask_m,
    num_groups,  # rows of x come in groups of GROUP_ROWS; groups in use
    rows_in_group,  # rows in use of each group
    w_ptr,  # this program's LM-head region [tiles, NUM_CHUNKS, TILE, BLOCK_K]
    w_scale_ptr,  # fp32 [rows of this program], used when SCALED
    ids_ptr,  # int32 [rows of this program]: id of each row
    num_rows,  # rows of this program in use
    scratch_ptr,
    values_ptr,
    best_ids_ptr,
    max_ptr,
    sum_ptr,
    next_ptr,
    TILE: tl.constexpr,  # rows of one stored tile, at most BLOCK_N
    NUM_CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    BULK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Fill this program's best pairs, maxima and sums for every node in use."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, SELECT_ROWS)
    for n0 in range(0, num_rows, TILE):
        left = tl.minimum(num_rows - n0, TILE)
        tile_ptr = w_ptr + n0 * (NUM_CHUNKS * BLOCK_K)
        after_ptr = next_ptr
        if AHEAD > 0:
            after_ptr = tl.where(n0 + TILE < num_rows, tile_ptr + TILE * NUM_CHUNKS * BLOCK_K, next_ptr)
        acc = stream_matmul(
            x_ptr, x_row, x_row, x_row, mask_m, tile_ptr, left, after_ptr,
            TILE * BLOCK_K, NUM_CHUNKS, NUM_CHUNKS, NUM_CHUNKS, BLOCK_N, BLOCK_K, BLOCK_M, STAGES, AHEAD, BULK,
        )  # fmt: skip
        if SCALED:
            acc *= tl.load(w_scale_ptr + n0 + offs_n, mask=offs_n < left, other=0.0)[:, None]
        acc *= row_scale[None, :]
        ids = tl.load(ids_ptr + n0 + offs_n, mask=offs_n < left, other=NO_INDEX)
        tl.debug_barrier()
        tl.store(scratch_ptr + offs_m[None, :] * BLOCK_N + offs_n[:, None], acc, mask=mask_m[None, :])
        tl.debug_barrier()
        for first in range(0, (num_groups - 1) * GROUP_ROWS + rows_in_group, SELECT_ROWS):
            rows = first + offs_r
            mask_rows = (rows // GROUP_ROWS < num_groups) & (rows % GROUP_ROWS < rows_in_group)
            update_best(
                scratch_ptr, ids, values_ptr, best_ids_ptr, max_ptr, sum_ptr, rows, mask_rows,
                n0, TOP_K, MAX_K, BLOCK_N,
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def merge_best(
    values_ptr,  # fp32: this node's list of program 0
    ids_ptr,  # int32, likewise
    max_ptr,
    sum_ptr,
    stride_list,  # elements from one program's list to the next
    stride_stat,
    num_lists,  # programs that own at least one row: the others wrote nothing
    CTAS: tl.constexpr,  # power of two, at least the number of programs
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
):
    """Merge all programs' lists of one node: (values fp32 [MAX_K], ids int32 [MAX_K], log-sum-exp)."""
    offs_p = tl.arange(0, CTAS)
    mask_p = offs_p < num_lists
    offs_k = tl.arange(0, MAX_K)
    first = tl.load(values_ptr + offs_p * stride_list, mask=mask_p, other=float("-inf"))
    first_id = tl.load(ids_ptr + offs_p * stride_list, mask=mask_p, other=NO_INDEX)
    maxima = tl.load(max_ptr + offs_p * stride_stat, mask=mask_p, other=float("-inf"))
    sums = tl.load(sum_ptr + offs_p * stride_stat, mask=mask_p, other=0.0)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = shift + tl.log(tl.sum(sums * tl.exp(maxima - shift), axis=0))

    owner = place_by_rank(rank_all_pairs(first, first_id), offs_p, first_id, MAX_K)
    mask_o = (offs_k < num_lists)[:, None] & (offs_k < TOP_K)[None, :]
    offs = owner[:, None] * stride_list + offs_k[None, :]
    value = tl.reshape(tl.load(values_ptr + offs, mask=mask_o, other=float("-inf")), [MAX_K * MAX_K])
    index = tl.reshape(tl.load(ids_ptr + offs, mask=mask_o, other=NO_INDEX), [MAX_K * MAX_K])
    rank = rank_all_pairs(value, index)
    return place_by_rank(rank, value, index, MAX_K), place_by_rank(rank, index, index, MAX_K), lse


@triton.jit
def _stream_kernel(
    x_ptr, w_ptr, ids_ptr, scratch_ptr, values_ptr, best_ids_ptr, max_ptr, sum_ptr,
    num_rows_x, num_rows_w, stride_x,
    ROWS: tl.constexpr, TILE: tl.constexpr, NUM_CHUNKS: tl.constexpr, TOP_K: tl.constexpr, MAX_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_ctas = tl.num_programs(0)
    offs_m = tl.arange(0, BLOCK_M)
    mine = (num_rows_w - pid + num_ctas - 1) // num_ctas
    lists = pid.to(tl.int64) * BLOCK_M
    w_base = w_ptr + pid.to(tl.int64) * ROWS * NUM_CHUNKS * BLOCK_K
    stream_topk(
        x_ptr, offs_m.to(tl.int64) * stride_x, tl.full([BLOCK_M], 1.0, tl.float32), offs_m < num_rows_x,
        1, num_rows_x, w_base, w_ptr, ids_ptr + pid * ROWS, mine, scratch_ptr + lists * BLOCK_N, values_ptr + lists * MAX_K, best_ids_ptr + lists * MAX_K,
        max_ptr + lists, sum_ptr + lists, w_base,
        TILE, NUM_CHUNKS, TOP_K, MAX_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_M,
        STAGES, 0, False, False,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    values_ptr, best_ids_ptr, max_ptr, sum_ptr, out_values_ptr, out_ids_ptr, out_lse_ptr,
    num_lists, BLOCK_M: tl.constexpr, CTAS: tl.constexpr, TOP_K: tl.constexpr, MAX_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    offs_k = tl.arange(0, MAX_K)
    values, ids, lse = merge_best(
        values_ptr + row * MAX_K, best_ids_ptr + row * MAX_K, max_ptr + row, sum_ptr + row,
        BLOCK_M * MAX_K, BLOCK_M, num_lists, CTAS, TOP_K, MAX_K,
    )  # fmt: skip
    tl.store(out_values_ptr + row * TOP_K + offs_k, values, mask=offs_k < TOP_K)
    tl.store(out_ids_ptr + row * TOP_K + offs_k, ids, mask=offs_k < TOP_K)
    tl.store(out_lse_ptr + row, lse)


def lm_head_topk_ref(x: Tensor, weight: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Definition: values fp32 [rows, k], ids int32 [rows, k], log-sum-exp fp32 [rows]; ties by smaller id."""
    logits = x.float() @ weight.float().T
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    return order.values[:, :top_k], order.indices[:, :top_k].int(), torch.logsumexp(logits, -1)


def lm_head_topk(
    x: Tensor, weight: Tensor, top_k: int, num_programs: int | None = None, block_n: int = 256, block_k: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lm_head_topk_ref` with the streaming kernel (two launches).

    ``x`` [rows, hidden] and ``weight`` [draft_vocab, hidden] of one dtype (bf16, fp16 or fp32), rows <= 256, hidden a
    multiple of 16, 1 <= top_k <= min(16, draft_vocab). ``num_programs``: default one per SM. Packs the weight on each
    call; a drafter packs once. Raises `ValueError` for other shapes.
    """
    rows, hidden = x.shape
    vocab = weight.shape[0]
    block_k = chunk_size(hidden, block_k)
    if weight.shape[1] != hidden or weight.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not match")
    if not 1 <= top_k <= min(16, vocab) or not 1 <= rows <= 256 or block_k == 0:
        raise ValueError(f"{top_k=} must be 1..min(16, {vocab}), {rows=} 1..256, {hidden=} a multiple of 16")
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    max_k = triton.next_power_of_2(top_k)
    block_m = max(16, triton.next_power_of_2(rows))
    tile, rows_each = head_tiles(vocab, num_programs, block_n)
    packed = cut_tiles(assign_rows(weight, num_programs, dealt=True, rows=rows_each), tile, block_k)
    all_ids = torch.arange(vocab, dtype=torch.int32, device=x.device)
    row_ids = assign_rows(all_ids, num_programs, dealt=True, rows=rows_each).contiguous()
    lists = (num_programs, block_m, max_k)
    values = torch.empty(lists, dtype=torch.float32, device=x.device)
    ids = torch.empty(lists, dtype=torch.int32, device=x.device)
    maxima = torch.empty(lists[:2], dtype=torch.float32, device=x.device)
    sums = torch.empty(lists[:2], dtype=torch.float32, device=x.device)
    scratch = torch.empty(num_programs, block_m, block_n, dtype=torch.float32, device=x.device)
    _stream_kernel[(num_programs,)](
        x, packed, row_ids, scratch, values, ids, maxima, sums, rows, vocab, x.stride(0),
        ROWS=rows_each, TILE=tile, NUM_CHUNKS=hidden // block_k, TOP_K=top_k, MAX_K=max_k,
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_M=block_m, STAGES=3, num_warps=8,
    )  # fmt: skip
    out = (
        torch.empty(rows, top_k, dtype=torch.float32, device=x.device),
        torch.empty(rows, top_k, dtype=torch.int32, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    _merge_kernel[(rows,)](
        values, ids, maxima, sums, *out, min(num_programs, vocab),
        BLOCK_M=block_m, CTAS=max(triton.next_power_of_2(num_programs), 2),
        TOP_K=top_k, MAX_K=max_k, num_warps=8,
    )  # fmt: skip
    return out


def head_tiles(vocab: int, num_programs: int, block_n: int) -> tuple[int, int]:
    """Cut a program's LM-head rows into equal tiles of at most ``block_n``: (rows of a tile, rows of a program).

    Example: 128,256 rows over 132 programs are 972 each: 4 tiles of 243, where tiles of 256 would leave one of 204.
    """
    rows = rows_per_program(vocab, num_programs)
    tiles = -(-rows // block_n)
    tile = -(-rows // tiles)
    return tile, tiles * tile
