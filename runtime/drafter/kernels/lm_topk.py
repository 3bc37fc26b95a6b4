"""Streaming top-k over the LM head: the k best rows of ``x @ weight.T`` and its log-sum-exp, without the logits.

    values[r], ids[r] = k best of logits[r] by (logit descending, id ascending);  lse[r] = log sum exp logits[r]

Each program multiplies its block of LM-head rows, tile by tile. A tile of logits passes through a scratch of its own
(fp32 [BLOCK_M, BLOCK_N], which stays in the L2) so that one node's logits lie in one warp, where k rounds of
take-the-largest keep the k best and a running maximum and sum. Per program and node only k (value, id) pairs and two
floats reach memory; merging picks the k best programs by their first pair, then the k best of their k * k pairs.

Bytes moved: the LM head once. Limits: k <= 16, draft vocabulary >= k, logits without NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .selection import (
    LANES,
    LOWEST_KEY,
    NO_INDEX,
    THREADS,
    count_greater,
    each_thread,
    key_index,
    key_value,
    max_of_row,
    order_key,
    sum_of_row,
    take_best,
)
from .weight_stream import Operand, Tile, hidden_zero, stream_matmul, unaligned_zero

SELECT_ROWS = tl.constexpr(16)
"""Nodes selected at a time: with 8 warps, two to a warp."""
LIST_BATCH = tl.constexpr(16)
"""Programs' lists come in multiples of this; those beyond the programs are empty."""


@dataclass(frozen=True)
class Selection:
    """Number of children chosen, and sizes of the lists that they are chosen from."""

    top_k: int
    max_k: int
    """Places in a list: a power of two that holds ``top_k``."""
    groups: int
    """Groups of nodes, of which each has every so many rows of nodes: node n of group g is row ``n * groups + g``."""
    block_m: int
    """Rows of nodes, a power of two: lists of one program."""
    programs: int
    """Power of two that holds the programs."""
    pairs: int
    """Power of two that holds ``max_k`` lists of ``max_k`` places."""

    @property
    def packed(self) -> bool:
        """Tell if nodes in use are brought together before they are selected from: some groups may have none."""
        return self.groups > 1

    @classmethod
    def of(cls, top_k: int, groups: int, block_m: int, num_programs: int) -> Selection:
        """Sizes for ``num_programs`` programs, which select from at most 16 lists of 16 places."""
        threads = int(THREADS.value)
        return cls(
            top_k, list_size(top_k), groups, block_m, max(threads, triton.next_power_of_2(num_programs)), threads
        )


@dataclass(frozen=True)
class HeadTiles:
    """Layout of a program's LM-head rows, stored and read."""

    stored: int
    """Rows of one stored tile, a power of two; the last one may have fewer."""
    owned: int
    """Rows that are stored."""
    hidden: int
    chunk: int
    """Columns stored together."""
    scaled: bool
    """Rows have a scale each."""
    several: bool
    """A launch reads more than one tile."""
    tile: Tile

    @property
    def step(self) -> int:
        """Rows multiplied at a time: they never lie in two stored tiles."""
        return min(self.stored, self.tile.block_n)


class ProgramRows(NamedTuple):
    """This program's rows of the LM head."""

    weight: Any
    """Region [tiles, hidden / chunk, rows of the tile, chunk]."""
    scale: Any
    """fp32 [rows of this program], read when scaled."""
    ids: Any
    """int32 [rows of this program]: id of each row."""
    num_rows: Any
    """Rows in use."""


class Nodes(NamedTuple):
    """Rows of x in use: the first ``rows`` of each of the first ``groups`` groups."""

    groups: Any
    rows: Any


class Lists(NamedTuple):
    """Best rows of each node: of one program, or of all, one after the other."""

    keys: Any
    """int64 [nodes, max_k]: `order_key` of the best so far, then `LOWEST_KEY`."""
    maxima: Any
    """fp32 [nodes]: the largest logit."""
    sums: Any
    """fp32 [nodes]: the sum of exp(logit - maximum)."""


@triton.jit
def update_best(
    scratch_ptr,  # fp32 [block_m, BLOCK_N], this program's
    row_ids_ptr,  # int32: id of each column of the tile
    num_columns,
    lists,  # `Lists` of this program
    first_row,  # of SELECT_ROWS nodes, as they lie in the scratch
    nodes,  # `Nodes`
    tile_start,  # first row of this tile; at 0 there is nothing to fold into
    SELECT: tl.constexpr,  # `Selection`; if it is packed, rows of the scratch are numbers of the nodes in use
    BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr,  # whether there is more than one tile
):
    """Fold one tile of logits into this program's best keys and log-sum-exp, for SELECT_ROWS nodes.

    Logits are taken as [BLOCK_N / LANES, SELECT_ROWS * LANES]: a thread to each of the second dimension, the first in
    its registers. Wider accesses would regroup them, hence a zero of unknown alignment.
    """
    MAX_K: tl.constexpr = SELECT.max_k
    zero = unaligned_zero()
    numbers = tl.arange(0, SELECT_ROWS * LANES)
    thread = numbers + zero
    lane = numbers % LANES + zero
    row = first_row + numbers // LANES + zero
    if SELECT.packed:
        row = row // nodes.groups * SELECT.groups + row % nodes.groups
    in_use = (row % SELECT.groups < nodes.groups) & (row // SELECT.groups < nodes.rows)
    element = tl.arange(0, BLOCK_N // LANES)
    column = element[:, None] * LANES + lane[None, :]
    real = in_use[None, :] & (column < num_columns)
    ids = tl.load(row_ids_ptr + column, mask=real, other=NO_INDEX)
    group_ptr = scratch_ptr + first_row * BLOCK_N
    place = element[:, None] * (SELECT_ROWS * LANES) + thread[None, :]
    logits = tl.load(group_ptr + place, mask=real, other=float("-inf"))
    folds = in_use & (tile_start > 0)
    old_max = tl.load(lists.maxima + row, mask=folds, other=float("-inf"))
    old_sum = tl.load(lists.sums + row, mask=folds, other=0.0)
    new_max = tl.maximum(old_max, max_of_row(tl.max(logits, axis=0)))
    # A row of -inf only would make -inf - -inf; subtracting 0 instead leaves exp(-inf) = 0.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    new_sum = old_sum * tl.exp(old_max - shift) + sum_of_row(tl.sum(tl.exp(logits - shift[None, :]), axis=0))
    tl.store(lists.maxima + row, new_max, mask=in_use & (lane == 0))
    tl.store(lists.sums + row, new_sum, mask=in_use & (lane == 0))

    kept = in_use & (lane < MAX_K)
    old_key = tl.full(lane.shape, LOWEST_KEY, tl.int64)
    if FOLD:
        old_key = tl.load(lists.keys + row * MAX_K + lane, mask=kept & (tile_start > 0), other=LOWEST_KEY)
    best = take_best(tl.where(real, order_key(logits, ids), LOWEST_KEY), old_key, lane, SELECT.top_k, FOLD)
    tl.store(lists.keys + row * MAX_K + lane, best, mask=kept)


@triton.jit
def lists_at(lists, place, SELECT: tl.constexpr):
    """Return the `Lists` from the ``place``-th on; a program has ``block_m`` of them."""
    return Lists(lists.keys + place * SELECT.max_k, lists.maxima + place, lists.sums + place)


@triton.jit
def clear_lists(keys_ptr, SELECT: tl.constexpr):
    """Empty the lists of one program, [block_m, max_k]."""
    SIZE: tl.constexpr = SELECT.block_m * SELECT.max_k
    offs = tl.arange(0, SIZE)
    tl.store(keys_ptr + offs, tl.full([SIZE], LOWEST_KEY, tl.int64))


@triton.jit
def stream_topk(
    x_ptr,
    row_scale,  # fp32 [block_m]: multiplies each row's logits (the folded RMSNorm), 1.0 for none
    x_row,  # int64 [block_m]: where each row of x starts
    mask_m,  # int1 [block_m]: rows in use
    nodes,  # `Nodes`: the same, counted
    head,  # `ProgramRows`
    scratch_ptr,  # fp32 [block_m, block_n], this program's
    lists,  # `Lists` of this program
    SELECT: tl.constexpr,  # `Selection`
    HEAD: tl.constexpr,  # `HeadTiles`
):
    """Fill this program's best keys, maxima and sums for every node in use; a program without rows has empty lists."""
    TILE: tl.constexpr = HEAD.tile
    BLOCK_N: tl.constexpr = TILE.block_n
    HIDDEN: tl.constexpr = HEAD.hidden
    CHUNK: tl.constexpr = HEAD.chunk
    STORED: tl.constexpr = HEAD.stored
    OWNED: tl.constexpr = HEAD.owned
    zero = hidden_zero()
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_m = tl.arange(0, SELECT.block_m) + zero
    num_rows = nodes.groups * nodes.rows
    scratch_row = offs_m
    if SELECT.packed:
        scratch_row = offs_m // SELECT.groups * nodes.groups + offs_m % SELECT.groups
    if head.num_rows <= 0:
        clear_lists(lists.keys, SELECT)
    for n0 in tl.range(0, head.num_rows, HEAD.step, disable_licm=True):
        left = tl.minimum(head.num_rows - n0, HEAD.step)
        tile_start = n0 // STORED * STORED
        tile_rows = OWNED if OWNED <= STORED else tl.minimum(OWNED - tile_start, STORED)
        x = Operand(x_ptr, x_row, x_row, mask_m, HIDDEN // CHUNK, HIDDEN)
        w_ptr = head.weight + tile_start * HIDDEN + (n0 - tile_start) * CHUNK
        acc = stream_matmul(x, w_ptr, left, tile_rows * CHUNK, 0, HIDDEN // CHUNK + zero, False, CHUNK, TILE)
        if HEAD.scaled:
            acc *= tl.load(head.scale + n0 + offs_n, mask=offs_n < left, other=0.0)[:, None]
        acc *= row_scale[None, :]
        tl.debug_barrier()
        # [groups, BLOCK_N / LANES, 16 rows, LANES]: the LANES threads of each of 16 rows read 256 neighbours.
        row, column = scratch_row[None, :], offs_n[:, None]
        group = row // SELECT_ROWS * (SELECT_ROWS * BLOCK_N)
        place = group + column // LANES * (SELECT_ROWS * LANES) + row % SELECT_ROWS * LANES + column % LANES
        tl.store(scratch_ptr + place, acc, mask=mask_m[None, :])
        tl.debug_barrier()
        for first in tl.range(0, num_rows, SELECT_ROWS, disable_licm=True):
            update_best(scratch_ptr, head.ids + n0, left, lists, first, nodes, n0, SELECT, BLOCK_N, HEAD.several)
        tl.debug_barrier()


@triton.jit
def merge_best(
    lists,  # `Lists`, from this node's list of program 0 on
    owner_ptr,  # int32 [max_k]: scratch of this program
    num_lists,  # programs that own at least one row
    SELECT: tl.constexpr,  # `Selection`
):
    """Merge all programs' lists of one node.

    Returns rank (top_k or more unless among the best), value and id of the pairs that can be among the best, int32,
    fp32 and int32 [pairs], and the log-sum-exp.
    """
    TOP_K: tl.constexpr = SELECT.top_k
    MAX_K: tl.constexpr = SELECT.max_k
    PAIRS: tl.constexpr = SELECT.pairs
    STRIDE_LIST: tl.constexpr = SELECT.block_m * MAX_K
    keys_ptr = lists.keys
    zero = hidden_zero()
    program = tl.arange(0, SELECT.programs) + zero
    mask = program < num_lists
    first = tl.load(keys_ptr + program * STRIDE_LIST, mask=mask, other=LOWEST_KEY)
    maxima = tl.load(lists.maxima + program * SELECT.block_m, mask=mask, other=float("-inf"))
    sums = tl.load(lists.sums + program * SELECT.block_m, mask=mask, other=0.0)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = shift + tl.log(tl.sum(sums * tl.exp(maxima - shift), axis=0))

    rank = count_greater(first, keys_ptr, num_lists, STRIDE_LIST, LIST_BATCH)
    tl.store(owner_ptr + rank, program, mask=mask & (rank < TOP_K))
    tl.debug_barrier()
    # Pair MAX_K * r + j is the j-th best of the program whose own best ranks r-th.
    pair = tl.arange(0, PAIRS) + zero
    num_owners = tl.minimum(num_lists, TOP_K)
    mask = pair // MAX_K < num_owners
    place = tl.load(owner_ptr + pair // MAX_K, mask=mask, other=0) * STRIDE_LIST + pair % MAX_K
    key = tl.load(keys_ptr + place, mask=mask, other=LOWEST_KEY)
    # As `count_greater`, one owner's list after the other.
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


def list_size(top_k: int) -> int:
    """Return the places of a list of the ``top_k`` best: a power of two."""
    return max(2, int(triton.next_power_of_2(top_k)))


def len_lists(num_programs: int) -> int:
    """Round the number of programs up to whole batches of lists."""
    return -(-num_programs // int(LIST_BATCH.value)) * int(LIST_BATCH.value)
