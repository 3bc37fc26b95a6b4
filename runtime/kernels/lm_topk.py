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

from .selection import NO_INDEX, order_key, rank_best
from .weight_stream import assign_rows, chunk_size, cut_tiles, hidden_zero, prefetch_l2, rows_per_program, stream_matmul

SELECT_ROWS = tl.constexpr(16)
"""Nodes selected at a time: 16 rows of 256 logits are 16 registers a thread."""


@triton.jit
def update_best(
    scratch_ptr,  # fp32 [BLOCK_M, BLOCK_N], this program's
    row_ids_ptr,  # int32: id of each column of the tile
    num_columns,
    values_ptr,  # fp32 [rows, MAX_K] of this program: the best so far
    ids_ptr,  # int32 [rows, MAX_K]
    max_ptr,  # fp32 [rows]
    sum_ptr,  # fp32 [rows]
    first_row,  # of SELECT_ROWS nodes
    num_groups,
    rows_in_group,
    tile_start,  # first row of this tile; at 0 there is nothing to fold into
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr,  # whether there is more than one tile
):
    """Fold one tile of logits into this program's best pairs and log-sum-exp, for SELECT_ROWS nodes.

    Logits are taken as [SELECT_ROWS, BLOCK_N / LANES, LANES], so that a node's row stays inside one warp.
    """
    LANES: tl.constexpr = 128 if BLOCK_N > 128 else BLOCK_N
    zero = hidden_zero()
    row_ids = first_row + tl.arange(0, SELECT_ROWS) + zero
    mask_rows = (row_ids // GROUP_ROWS < num_groups) & (row_ids % GROUP_ROWS < rows_in_group)
    column = (tl.arange(0, BLOCK_N // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]) + zero
    real = mask_rows[:, None, None] & (column < num_columns)
    ids = tl.load(row_ids_ptr + column, mask=column < num_columns, other=NO_INDEX)
    logits = tl.load(scratch_ptr + row_ids[:, None, None] * BLOCK_N + column, mask=real, other=float("-inf"))
    old_max = tl.load(max_ptr + row_ids, mask=mask_rows & (tile_start > 0), other=float("-inf"))
    old_sum = tl.load(sum_ptr + row_ids, mask=mask_rows & (tile_start > 0), other=0.0)
    new_max = tl.maximum(old_max, tl.max(tl.max(logits, axis=1), axis=1))
    # A row of -inf only would make -inf - -inf; subtracting 0 instead leaves exp(-inf) = 0.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp(logits - shift[:, None, None])
    new_sum = old_sum * tl.exp(old_max - shift) + tl.sum(tl.sum(weights, axis=1), axis=1)
    tl.store(max_ptr + row_ids, new_max, mask=mask_rows)
    tl.store(sum_ptr + row_ids, new_sum, mask=mask_rows)

    ids = tl.where(real, ids, NO_INDEX)
    left = logits  # what is not yet ranked; ids of ranked columns become NO_INDEX
    left_ids = ids
    rank = tl.full(logits.shape, NO_INDEX, tl.int32)
    lists = row_ids[:, None, None] * MAX_K
    if FOLD:
        # The old list is ranked together with the tile; all of it is read before anything is written.
        offs_k = tl.arange(0, MAX_K)[None, None, :] + zero
        kept = mask_rows[:, None, None] & (offs_k < TOP_K) & (tile_start > 0)
        old_value = tl.load(values_ptr + lists + offs_k, mask=kept, other=float("-inf"))
        old_id = tl.load(ids_ptr + lists + offs_k, mask=kept, other=NO_INDEX)
        old_left = old_value
        old_left_ids = old_id
        old_rank = tl.full(old_value.shape, NO_INDEX, tl.int32)
    for k in range(TOP_K):
        best = tl.max(tl.max(left, axis=1), axis=1)
        if FOLD:
            best = tl.maximum(best, tl.max(tl.max(old_left, axis=1), axis=1))
        ties = tl.where(left == best[:, None, None], left_ids, NO_INDEX)
        best_id = tl.min(tl.min(ties, axis=1), axis=1)
        if FOLD:
            ties = tl.where(old_left == best[:, None, None], old_left_ids, NO_INDEX)
            best_id = tl.minimum(best_id, tl.min(tl.min(ties, axis=1), axis=1))
            hit = (old_left_ids == best_id[:, None, None]) & (old_left_ids != NO_INDEX)
            old_rank = tl.where(hit, k, old_rank)
            old_left = tl.where(hit, float("-inf"), old_left)
            old_left_ids = tl.where(hit, NO_INDEX, old_left_ids)
        hit = (left_ids == best_id[:, None, None]) & (left_ids != NO_INDEX)
        rank = tl.where(hit, k, rank)
        left = tl.where(hit, float("-inf"), left)
        left_ids = tl.where(hit, NO_INDEX, left_ids)
    if FOLD:
        tl.debug_barrier()
        placed = kept & (old_rank < TOP_K)
        tl.store(values_ptr + lists + old_rank, old_value, mask=placed)
        tl.store(ids_ptr + lists + old_rank, old_id, mask=placed)
    placed = real & (rank < TOP_K)
    tl.store(values_ptr + lists + rank, logits, mask=placed)
    tl.store(ids_ptr + lists + rank, ids, mask=placed)
    if tile_start == 0:
        # A tile of fewer than TOP_K rows leaves places open; they must read as empty.
        offs_k = tl.arange(0, MAX_K)[None, None, :] + zero
        open_place = mask_rows[:, None, None] & (offs_k >= num_columns) & (offs_k < TOP_K)
        tl.store(
            values_ptr + lists + offs_k, tl.full([SELECT_ROWS, 1, MAX_K], float("-inf"), tl.float32), mask=open_place
        )
        tl.store(ids_ptr + lists + offs_k, tl.full([SELECT_ROWS, 1, MAX_K], NO_INDEX, tl.int32), mask=open_place)


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
    PREFETCH: tl.constexpr,  # bytes asked for at next_ptr once the last tile is multiplied
    BULK: tl.constexpr,
    SCALED: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Fill this program's best pairs, maxima and sums for every node in use."""
    zero = hidden_zero()
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    for n0 in range(0, num_rows, TILE):
        left = tl.minimum(num_rows - n0, TILE)
        acc = stream_matmul(
            x_ptr, x_row, x_row, x_row, mask_m, w_ptr + n0 * (NUM_CHUNKS * BLOCK_K), left,
            TILE * BLOCK_K, NUM_CHUNKS, NUM_CHUNKS, NUM_CHUNKS, NUM_CHUNKS * BLOCK_K, BLOCK_N, BLOCK_K, BLOCK_M, STAGES,
        )  # fmt: skip
        if n0 + TILE >= num_rows:
            prefetch_l2(next_ptr, PREFETCH, BULK)
        if SCALED:
            acc *= tl.load(w_scale_ptr + n0 + offs_n, mask=offs_n < left, other=0.0)[:, None]
        acc *= row_scale[None, :]
        tl.debug_barrier()
        tl.store(scratch_ptr + offs_m[None, :] * BLOCK_N + offs_n[:, None], acc, mask=mask_m[None, :])
        tl.debug_barrier()
        for first in range(0, (num_groups - 1) * GROUP_ROWS + rows_in_group, SELECT_ROWS):
            update_best(
                scratch_ptr, ids_ptr + n0, left, values_ptr, best_ids_ptr, max_ptr, sum_ptr, first, num_groups,
                rows_in_group, n0, TOP_K, MAX_K, GROUP_ROWS, BLOCK_N, FOLD,
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def merge_best(
    values_ptr,  # fp32: this node's list of program 0
    ids_ptr,  # int32, likewise
    max_ptr,
    sum_ptr,
    owner_ptr,  # int32 [MAX_K]: scratch of this program
    stride_list,  # elements from one program's list to the next
    stride_stat,
    num_lists,  # programs that own at least one row: the others wrote nothing
    CTAS: tl.constexpr,  # power of two, at least the number of programs
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    PAIRS: tl.constexpr,  # MAX_K squared
):
    """Merge all programs' lists of one node.

    Returns rank (NO_INDEX unless among the TOP_K), value and id of the pairs that can be among the best, int32, fp32
    and int32 [PAIRS], and the log-sum-exp.
    """
    zero = hidden_zero()
    program = tl.arange(0, CTAS) + zero
    mask = program < num_lists
    first = tl.load(values_ptr + program * stride_list, mask=mask, other=float("-inf"))
    first_id = tl.load(ids_ptr + program * stride_list, mask=mask, other=NO_INDEX)
    maxima = tl.load(max_ptr + program * stride_stat, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + program * stride_stat, mask=mask, other=0.0)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = shift + tl.log(tl.sum(sums * tl.exp(maxima - shift), axis=0))

    rank = rank_best(order_key(first, first_id), TOP_K)
    tl.store(owner_ptr + rank, program, mask=mask & (rank < TOP_K))
    tl.debug_barrier()
    # Pair MAX_K * r + j is the j-th best of the program whose own best ranks r-th.
    pair = tl.arange(0, PAIRS) + zero
    mask = (pair // MAX_K < tl.minimum(num_lists, TOP_K)) & (pair % MAX_K < TOP_K)
    place = tl.load(owner_ptr + pair // MAX_K, mask=mask, other=0) * stride_list + pair % MAX_K
    value = tl.load(values_ptr + place, mask=mask, other=float("-inf"))
    index = tl.load(ids_ptr + place, mask=mask, other=NO_INDEX)
    rank = tl.where(index != NO_INDEX, rank_best(order_key(value, index), TOP_K), NO_INDEX)
    tl.debug_barrier()
    return rank, value, index, lse


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
        1, num_rows_x, w_base, w_ptr, ids_ptr + pid * ROWS, mine, scratch_ptr + lists * BLOCK_N, values_ptr + lists *
        MAX_K, best_ids_ptr + lists * MAX_K, max_ptr + lists, sum_ptr + lists, w_base,
        TILE, NUM_CHUNKS, TOP_K, MAX_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_M,
        STAGES, 0, False, False, ROWS > TILE,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    values_ptr, best_ids_ptr, max_ptr, sum_ptr, owner_ptr, out_values_ptr, out_ids_ptr, out_lse_ptr,
    num_lists, BLOCK_M: tl.constexpr, CTAS: tl.constexpr, TOP_K: tl.constexpr, MAX_K: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    rank, value, index, lse = merge_best(
        values_ptr + row * MAX_K, best_ids_ptr + row * MAX_K, max_ptr + row, sum_ptr + row, owner_ptr + row * MAX_K,
        BLOCK_M * MAX_K, BLOCK_M, num_lists, CTAS, TOP_K, MAX_K, PAIRS,
    )  # fmt: skip
    tl.store(out_values_ptr + row * TOP_K + rank, value, mask=rank < TOP_K)
    tl.store(out_ids_ptr + row * TOP_K + rank, index, mask=rank < TOP_K)
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
    max_k = max(2, triton.next_power_of_2(top_k))
    block_m = max(16, triton.next_power_of_2(rows))
    num_warps = 8 if x.is_cuda else 1
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
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_M=block_m, STAGES=3, num_warps=num_warps,
    )  # fmt: skip
    out = (
        torch.empty(rows, top_k, dtype=torch.float32, device=x.device),
        torch.empty(rows, top_k, dtype=torch.int32, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    owner = torch.empty(rows, max_k, dtype=torch.int32, device=x.device)
    _merge_kernel[(rows,)](
        values, ids, maxima, sums, owner, *out, min(num_programs, vocab),
        BLOCK_M=block_m, CTAS=max(2, triton.next_power_of_2(num_programs)), TOP_K=top_k, MAX_K=max_k,
        PAIRS=max_k**2, num_warps=num_warps,
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
