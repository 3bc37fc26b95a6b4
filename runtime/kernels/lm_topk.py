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

from .packing import assign_rows, chunk_size, cut_tiles, rows_per_program
from .selection import (
    LANES,
    LOWEST_KEY,
    NO_INDEX,
    THREADS,
    count_ahead,
    each_thread,
    key_index,
    key_value,
    max_of_row,
    order_key,
    sum_of_row,
    take_best,
)
from .weight_stream import hidden_zero, stream_matmul, unaligned_zero

SELECT_ROWS = tl.constexpr(16)
"""Nodes selected at a time: with 8 warps, two to a warp."""
LIST_BATCH = tl.constexpr(16)
"""Programs' lists come in multiples of this; those beyond the programs are empty."""


@triton.jit
def scratch_place(row, column, BLOCK_N: tl.constexpr):
    """Where a logit lies in a program's scratch: [BLOCK_M / 16 groups, BLOCK_N / LANES, 16 rows, LANES].

    So the LANES threads of each of 16 rows read 256 neighbours at a time.
    """
    group = row // SELECT_ROWS * (SELECT_ROWS * BLOCK_N)
    return group + column // LANES * (SELECT_ROWS * LANES) + row % SELECT_ROWS * LANES + column % LANES


@triton.jit
def update_best(
    scratch_ptr,  # fp32 [BLOCK_M, BLOCK_N], this program's
    row_ids_ptr,  # int32: id of each column of the tile
    num_columns,
    keys_ptr,  # int64 [rows, MAX_K] of this program: `order_key` of the best so far, then `LOWEST_KEY`
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
    """Fold one tile of logits into this program's best keys and log-sum-exp, for SELECT_ROWS nodes.

    Logits are taken as [BLOCK_N / LANES, SELECT_ROWS * LANES]: a thread to each of the second dimension, the first in
    its registers. Wider accesses would regroup them, hence a zero of unknown alignment.
    """
    zero = unaligned_zero()
    numbers = tl.arange(0, SELECT_ROWS * LANES)
    thread = numbers + zero
    lane = numbers % LANES + zero
    row = first_row + numbers // LANES + zero
    in_use = (row // GROUP_ROWS < num_groups) & (row % GROUP_ROWS < rows_in_group)
    element = tl.arange(0, BLOCK_N // LANES)
    column = element[:, None] * LANES + lane[None, :]
    real = in_use[None, :] & (column < num_columns)
    ids = tl.load(row_ids_ptr + column, mask=real, other=NO_INDEX)
    group_ptr = scratch_ptr + first_row * BLOCK_N
    place = element[:, None] * (SELECT_ROWS * LANES) + thread[None, :]
    logits = tl.load(group_ptr + place, mask=real, other=float("-inf"))
    folds = in_use & (tile_start > 0)
    old_max = tl.load(max_ptr + row, mask=folds, other=float("-inf"))
    old_sum = tl.load(sum_ptr + row, mask=folds, other=0.0)
    new_max = tl.maximum(old_max, max_of_row(tl.max(logits, axis=0)))
    # A row of -inf only would make -inf - -inf; subtracting 0 instead leaves exp(-inf) = 0.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    new_sum = old_sum * tl.exp(old_max - shift) + sum_of_row(tl.sum(tl.exp(logits - shift[None, :]), axis=0))
    tl.store(max_ptr + row, new_max, mask=in_use & (lane == 0))
    tl.store(sum_ptr + row, new_sum, mask=in_use & (lane == 0))

    kept = in_use & (lane < MAX_K)
    old_key = tl.full(lane.shape, LOWEST_KEY, tl.int64)
    if FOLD:
        old_key = tl.load(keys_ptr + row * MAX_K + lane, mask=kept & (tile_start > 0), other=LOWEST_KEY)
    best = take_best(tl.where(real, order_key(logits, ids), LOWEST_KEY), old_key, lane, TOP_K, FOLD)
    tl.store(keys_ptr + row * MAX_K + lane, best, mask=kept)


@triton.jit
def clear_lists(keys_ptr, BLOCK_M: tl.constexpr, MAX_K: tl.constexpr):
    """Empty the lists of one program, [BLOCK_M, MAX_K]."""
    offs = tl.arange(0, BLOCK_M * MAX_K)
    tl.store(keys_ptr + offs, tl.full([BLOCK_M * MAX_K], LOWEST_KEY, tl.int64))


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
    keys_ptr,
    max_ptr,
    sum_ptr,
    TILE: tl.constexpr,  # rows of one stored tile, at most BLOCK_N
    NUM_CHUNKS: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Fill this program's best keys, maxima and sums for every node in use; a program without rows has empty lists."""
    zero = hidden_zero()
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    if num_rows <= 0:
        clear_lists(keys_ptr, BLOCK_M, MAX_K)
    for n0 in tl.range(0, num_rows, TILE, disable_licm=True):
        left = tl.minimum(num_rows - n0, TILE)
        acc = stream_matmul(
            x_ptr, x_row, x_row, mask_m, w_ptr + n0 * (NUM_CHUNKS * BLOCK_K), left, TILE * BLOCK_K,
            0, NUM_CHUNKS + zero, NUM_CHUNKS, NUM_CHUNKS * BLOCK_K, False, BLOCK_N, BLOCK_K, BLOCK_M, STAGES,
        )  # fmt: skip
        if SCALED:
            acc *= tl.load(w_scale_ptr + n0 + offs_n, mask=offs_n < left, other=0.0)[:, None]
        acc *= row_scale[None, :]
        tl.debug_barrier()
        place = scratch_place(offs_m[None, :], offs_n[:, None], BLOCK_N)
        tl.store(scratch_ptr + place, acc, mask=mask_m[None, :])
        tl.debug_barrier()
        for first in tl.range(0, (num_groups - 1) * GROUP_ROWS + rows_in_group, SELECT_ROWS, disable_licm=True):
            update_best(
                scratch_ptr, ids_ptr + n0, left, keys_ptr, max_ptr, sum_ptr, first, num_groups, rows_in_group, n0,
                TOP_K, MAX_K, GROUP_ROWS, BLOCK_N, FOLD,
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def merge_best(
    keys_ptr,  # int64: this node's list of program 0
    max_ptr,
    sum_ptr,
    owner_ptr,  # int32 [MAX_K]: scratch of this program
    num_lists,  # programs that own at least one row
    STRIDE_LIST: tl.constexpr,  # elements from one program's list to the next
    STRIDE_STAT: tl.constexpr,
    CTAS: tl.constexpr,  # power of two, at least the number of programs
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    PAIRS: tl.constexpr,  # power of two, at least MAX_K squared
):
    """Merge all programs' lists of one node.

    Returns rank (TOP_K or more unless among the best), value and id of the pairs that can be among the best, int32,
    fp32 and int32 [PAIRS], and the log-sum-exp.
    """
    zero = hidden_zero()
    program = tl.arange(0, CTAS) + zero
    mask = program < num_lists
    first = tl.load(keys_ptr + program * STRIDE_LIST, mask=mask, other=LOWEST_KEY)
    maxima = tl.load(max_ptr + program * STRIDE_STAT, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + program * STRIDE_STAT, mask=mask, other=0.0)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = shift + tl.log(tl.sum(sums * tl.exp(maxima - shift), axis=0))

    rank = count_ahead(first, keys_ptr, num_lists, STRIDE_LIST, LIST_BATCH)
    tl.store(owner_ptr + rank, program, mask=mask & (rank < TOP_K))
    tl.debug_barrier()
    # Pair MAX_K * r + j is the j-th best of the program whose own best ranks r-th.
    pair = tl.arange(0, PAIRS) + zero
    num_owners = tl.minimum(num_lists, TOP_K)
    mask = pair // MAX_K < num_owners
    place = tl.load(owner_ptr + pair // MAX_K, mask=mask, other=0) * STRIDE_LIST + pair % MAX_K
    key = tl.load(keys_ptr + place, mask=mask, other=LOWEST_KEY)
    # As `count_ahead`, one owner's list after the other.
    rank = tl.zeros([PAIRS], tl.int32)
    place = tl.arange(0, MAX_K)[:, None] + each_thread(PAIRS)[None, :]
    keys = tl.load(keys_ptr + tl.load(owner_ptr) * STRIDE_LIST + place)
    for other in tl.range(1, num_owners + 1, disable_licm=True):
        list_ptr = keys_ptr + tl.load(owner_ptr + other, mask=other < num_owners, other=0) * STRIDE_LIST
        following = tl.load(list_ptr + place)
        rank += tl.sum((keys > key[None, :]).to(tl.int32), axis=0)
        keys = following
    rank = tl.where(key == LOWEST_KEY, NO_INDEX, rank)
    tl.debug_barrier()
    return rank, key_value(key), key_index(key), lse


@triton.jit
def _stream_kernel(
    x_ptr, w_ptr, ids_ptr, scratch_ptr, keys_ptr, max_ptr, sum_ptr,
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
        1, num_rows_x, w_base, w_ptr, ids_ptr + pid * ROWS, mine, scratch_ptr + lists * BLOCK_N,
        keys_ptr + lists * MAX_K, max_ptr + lists, sum_ptr + lists,
        TILE, NUM_CHUNKS, TOP_K, MAX_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_M,
        STAGES, False, ROWS > TILE,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    keys_ptr, max_ptr, sum_ptr, owner_ptr, out_values_ptr, out_ids_ptr, out_lse_ptr,
    num_lists, BLOCK_M: tl.constexpr, CTAS: tl.constexpr, TOP_K: tl.constexpr, MAX_K: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    rank, value, index, lse = merge_best(
        keys_ptr + row * MAX_K, max_ptr + row, sum_ptr + row, owner_ptr + row * MAX_K,
        num_lists, BLOCK_M * MAX_K, BLOCK_M, CTAS, TOP_K, MAX_K, PAIRS,
    )  # fmt: skip
    tl.store(out_values_ptr + row * TOP_K + rank, value, mask=rank < TOP_K)
    tl.store(out_ids_ptr + row * TOP_K + rank, index, mask=rank < TOP_K)
    tl.store(out_lse_ptr + row, lse)


def merge_blocks(num_programs: int) -> dict[str, int]:
    """Sizes of what `merge_best` ranks: programs, and pairs of at most 16 of them and 16 ranks."""
    threads = int(THREADS.value)
    return {"CTAS": max(threads, triton.next_power_of_2(num_programs)), "PAIRS": threads}


def len_lists(num_programs: int) -> int:
    """Lists that hold those of all programs in whole batches."""
    return -(-num_programs // int(LIST_BATCH.value)) * int(LIST_BATCH.value)


def empty_lists(num_programs: int, rows: int, max_k: int, device: torch.device | str) -> Tensor:
    """Lists of best keys, empty: int64 [programs in whole batches, rows, max_k]."""
    return torch.full((len_lists(num_programs), rows, max_k), LOWEST_KEY.value, dtype=torch.int64, device=device)


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
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"x and weight must be matrices; got {tuple(x.shape)} and {tuple(weight.shape)}")
    x = x.contiguous()
    rows, hidden = x.shape
    vocab = weight.shape[0]
    block_k = chunk_size(hidden, block_k)
    if weight.shape[1] != hidden or weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} on {x.device} and weight {tuple(weight.shape)} {weight.dtype} on "
            f"{weight.device} do not match"
        )
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
    keys = empty_lists(*lists, device=x.device)
    maxima = torch.empty(lists[:2], dtype=torch.float32, device=x.device)
    sums = torch.empty(lists[:2], dtype=torch.float32, device=x.device)
    scratch = torch.empty(num_programs, block_m, block_n, dtype=torch.float32, device=x.device)
    _stream_kernel[(num_programs,)](
        x, packed, row_ids, scratch, keys, maxima, sums, rows, vocab, x.stride(0),
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
        keys, maxima, sums, owner, *out, min(num_programs, vocab),
        BLOCK_M=block_m, **merge_blocks(num_programs), TOP_K=top_k, MAX_K=max_k,
        num_warps=num_warps,
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
