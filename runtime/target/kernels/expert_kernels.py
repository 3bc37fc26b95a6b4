"""The experts of a mixture's layer as kernels: a row's result has the same bits whatever stands beside it.

A *pair* is a row and one of the experts that it goes to: pair ``row * top_k + slot``. What decides bits is fixed by
shape and type as in `product_kernels`: the K of a router and of a long last product is cut into
`ProductShape.splits`, added in order, else it is whole; a row's experts are added in the order of its slots. Rows of
one expert share tiles of its weights in the order of their numbers; which rows these are decides nothing but speed.

Launches are as large as the worst case asks for, and programs without work end at once, or they take what there is in
turn. Of few pairs each program finds those of its expert by itself; of more, `group_kernel` lists them, by expert and
in order. Only integers are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .exact_sums import exact_sum
from .machine import let_next_begin, wait_for_previous
from .product_kernels import (
    Operands,
    ask_ahead,
    begin,
    load_squares,
    norm_factor,
    own_pair,
    place,
    plus,
    product,
    put_residual,
    row_scales,
    split_pairs,
    sum_split,
)


@dataclass(frozen=True)
class ExpertGrid:
    """Constants of a launch over experts; but for ``experts`` and ``top_k`` they never change results.

    ``block``: the power of two that all pairs fit in where programs look through them, 0 where they are listed.
    ``by_pair``: a place in the grid for each pair; ``in_turn``: for each expert that has rows, and programs take places
    one after another, as it is not known how many there are; else for each expert. ``shares``: programs that share an
    expert's rows. ``combines``: the program that is done last with some columns adds all experts' results. ``apart``:
    each split of K has a program of its own; nothing is shared then.
    """

    experts: int
    top_k: int
    block: int
    by_pair: bool
    in_turn: bool
    shares: int
    combines: bool
    apart: bool = False

    @property
    def bins(self) -> int:
        """Power of two that the experts fit in."""
        return 1 << (self.experts - 1).bit_length()


class Picks(NamedTuple):
    """Experts of rows: ``experts`` int32 and ``weights`` fp32 [rows, top_k], and what else is written on the way.

    A row that nobody reads has as ``experts`` one more than there are. ``counts`` int32 [experts] and ``members`` int32
    [experts, rows]: pairs of each expert, in order, if they are listed. ``sums`` fp32 [rows, splits, experts]: the
    router's splits. ``finished`` int32: counters of finished programs or pairs, 0 between launches.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    members: Tensor
    sums: Tensor
    finished: Tensor


@triton.jit
def _ordered(x):
    """Return integers in the order of fp32 numbers, or numbers of such integers; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _of_key(key, COUNT: tl.constexpr):
    """Return the logit and the expert of a key."""
    if key.dtype == tl.int32:
        ordered = key >> 12
        return _unordered((ordered << 13) + tl.where(ordered < 0, 8191, 0)), COUNT - (key & 4095)
    else:
        return _unordered((key >> 32).to(tl.int32)), COUNT - key.to(tl.int32)


@triton.jit
def _choose(
    logits, expert, is_used, GRID: tl.constexpr, NORMALISES: tl.constexpr, OF_CHOSEN: tl.constexpr, SLOTS: tl.constexpr
):
    """Choose the experts of rows by ``logits`` [rows, experts]: their ids, then weights, [rows, SLOTS].

    OF_CHOSEN: the softmax is over the chosen ones, in the order of slots.
    """
    COUNT: tl.constexpr = GRID.experts
    TOP_K: tl.constexpr = GRID.top_k
    tl.static_assert(COUNT < 4096)
    slot = tl.arange(0, SLOTS)
    ordered = _ordered(logits.to(tl.float32))
    # Of equal logits the lower id is the larger key. Of 16 bits, as fp32, the upper 19 tell all apart.
    HALF: tl.constexpr = logits.dtype.primitive_bitwidth == 16
    NONE: tl.constexpr = -(1 << 31) if HALF else -(1 << 63)
    if HALF:
        keys = ((ordered >> 13) << 12) + (COUNT - expert)[None, :]
    else:
        keys = (ordered.to(tl.int64) << 32) + (COUNT - expert)[None, :]
    keys = tl.where((expert < COUNT)[None, :], keys, NONE)
    ids = tl.full((logits.shape[0], SLOTS), COUNT, tl.int32)
    chosen = tl.zeros((logits.shape[0], SLOTS), tl.float32)
    largest, _ = _of_key(tl.max(keys, 1), COUNT)
    all_weights = 1.0
    if not OF_CHOSEN:
        weights = tl.exp(logits.to(tl.float32) - largest[:, None])
        all_weights = exact_sum(tl.where((expert < COUNT)[None, :], weights, 0.0), 1)
    total = tl.zeros((logits.shape[0],), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], NONE, keys)
        logit, id_of = _of_key(best, COUNT)
        probability = tl.exp(logit - largest)
        if not OF_CHOSEN:
            probability /= all_weights
        total += probability
        of_slot = (slot == j)[None, :]
        ids = tl.where(of_slot & is_used[:, None], id_of[:, None], ids)
        chosen = tl.where(of_slot, probability[:, None], chosen)
    return ids, chosen / total[:, None] if NORMALISES or OF_CHOSEN else chosen


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    factor,
    kv_row_ptr,
    rows,
    picks,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    GRID: tl.constexpr,
    NORMALISES: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a router's logits, a split for some experts in each program; the last of some rows chooses theirs."""
    let_next_begin(OVERLAP)
    block, tile, split, row = place(rows, SHAPE, TILES)
    inside = row < rows
    n = tile * TILES.block_n + tl.arange(0, TILES.block_n)
    n_inside = n < SHAPE.size
    kv_row = tl.load(kv_row_ptr + row, mask=inside, other=-1)
    operands = Operands(x_ptr, w_ptr, x_ptr, w_ptr, w_ptr)
    w = begin(operands, n, n_inside, split, SHAPE, TILES, OVERLAP)
    # What the last program needs at its end is on its way meanwhile.
    squares = load_squares(factor, row, inside, SHAPE.depth)
    acc = product(w, operands, row, inside, n, n_inside, 0, split, SHAPE, TILES, False)
    at = (row.to(tl.int64) * SHAPE.splits + split) * SHAPE.size
    tl.store(picks.sums + at[None, :] + n[:, None], acc, mask=n_inside[:, None] & inside[None, :])
    tl.debug_barrier()
    SPLITS: tl.constexpr = SHAPE.splits
    PROGRAMS: tl.constexpr = SPLITS * ((SHAPE.size + TILES.block_n - 1) // TILES.block_n)
    if tl.atomic_add(picks.finished + block, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(picks.finished + block, 0)
        tl.debug_barrier()
        expert = tl.arange(0, BLOCK)
        both = inside[:, None] & (expert < SHAPE.size)[None, :]
        total = tl.zeros((row.shape[0], BLOCK), tl.float32)
        for each in tl.static_range(SPLITS):
            at = (row.to(tl.int64) * SPLITS + each) * SHAPE.size
            total += tl.load(picks.sums + at[:, None] + expert[None, :], mask=both, other=0.0, cache_modifier=".cg")
        times = norm_factor(squares, factor.eps, factor.unshrink, SHAPE.depth)
        kind = x_ptr.dtype.element_ty
        logits = total * times[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert, mask=expert < SHAPE.size, other=0.0).to(tl.float32)
            logits += bias[None, :]
        logits = logits.to(kind)
        ids, weights = _choose(logits, expert, kv_row >= 0, GRID, NORMALISES, bias_ptr is not None, SLOTS)
        slot = tl.arange(0, SLOTS)
        to = row[:, None] * GRID.top_k + slot[None, :]
        kept = inside[:, None] & (slot < GRID.top_k)[None, :]
        tl.store(picks.experts + to, ids, mask=kept)
        tl.store(picks.weights + to, weights.to(kind).to(tl.float32), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def group_kernel(picks, rows, GRID: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """List the pairs of an expert, in order."""
    expert = tl.program_id(0)
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)
    found = 0
    for first in tl.range(0, rows * GRID.top_k, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        of = tl.load(picks.experts + pair, mask=pair < rows * GRID.top_k, other=GRID.experts)
        mine = (of == expert).to(tl.int32)
        to = expert.to(tl.int64) * rows + found + tl.cumsum(mine, 0) - 1
        tl.store(picks.members + to, pair, mask=mine > 0)
        found += tl.sum(mine, 0)
    tl.store(picks.counts + expert, found)


@triton.jit
def _look(picks, rows, GRID: tl.constexpr):
    """Return the experts of pairs, how many pairs go to one, and of experts in turn their places and their number.

    Zeros where pairs are listed.
    """
    if GRID.block == 0:
        return 0, 0, 0, 0
    else:
        pair = tl.arange(0, GRID.block)
        of = tl.load(picks.experts + pair, mask=pair < rows * GRID.top_k, other=GRID.experts, cache_modifier=".cg")
        all_pairs = tl.sum((of < GRID.experts).to(tl.int32), 0)
        if not GRID.in_turn:
            return of, all_pairs, 0, 0
        else:
            has_rows = tl.histogram(of, GRID.bins, mask=of < GRID.experts) > 0
            places = tl.where(has_rows, tl.cumsum(has_rows.to(tl.int32), 0) - 1, -1)
            return of, all_pairs, places, tl.sum(has_rows.to(tl.int32), 0)


@triton.jit
def _find(picks, at, of, places, GRID: tl.constexpr):
    """Return the expert of a place, how many pairs it has, and each pair's place among them if they are looked through.

    Where places are those of pairs, the first pair of an expert stands for all of its.
    """
    if GRID.block == 0:
        return at, tl.load(picks.counts + at, cache_modifier=".cg"), at
    else:
        expert = at
        if GRID.in_turn:
            expert = tl.sum(tl.where(places == at, tl.arange(0, GRID.bins), 0), 0)
        if GRID.by_pair:
            pair = tl.arange(0, GRID.block)
            expert = tl.load(picks.experts + at, cache_modifier=".cg")
            is_first = tl.min(tl.where(of == expert, pair, GRID.block), 0) == at
            of = tl.where(is_first & (expert < GRID.experts), of, GRID.experts + 1)
        mine = (of == expert).to(tl.int32)
        return expert, tl.sum(mine, 0), tl.where(mine > 0, tl.cumsum(mine, 0) - 1, -1)


@triton.jit
def _pairs_of(picks, expert, found, first, count, rows, GRID: tl.constexpr, ROWS: tl.constexpr):
    """Return an expert's pairs from the ``first`` on, [ROWS], and which of them there are."""
    at = first + tl.arange(0, ROWS)
    inside = at < count
    if GRID.block == 0:
        members = picks.members + tl.cast(expert, tl.int64) * rows
        return tl.load(members + at, mask=inside, other=0, cache_modifier=".cg"), inside
    else:
        pair = tl.arange(0, GRID.block)
        return tl.sum(tl.where(found[None, :] == at[:, None], pair[None, :], 0), 1), inside


@triton.jit(do_not_specialize=["rows"])
def gated_experts_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    factor,
    picks,
    rows,
    out_ptr,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    GRID: tl.constexpr,
    CLAMP: tl.constexpr,
    LIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the SwiGLU of all pairs, [pairs, width], times LIFT; of experts with a CLAMP as `experts.Clamp` says."""
    wait_for_previous(OVERLAP)
    # Only now: the next kernel reads ``picks`` before it waits for this one.
    let_next_begin(OVERLAP)
    SIZE: tl.constexpr = SHAPE.size // 2
    PAIRED: tl.constexpr = TILES.block_n // 2
    TILED: tl.constexpr = (SIZE + PAIRED - 1) // PAIRED
    of, _, places, touched = _look(picks, rows, GRID)
    of_pair, is_up = own_pair(tl.arange(0, TILES.block_n))
    operands = Operands(x_ptr, w_ptr, x_ptr, w_ptr, scale_ptr)
    # 0, which a compiler does not know: it would count columns in 64 bits, and not for all threads together.
    split = tl.program_id(1)
    COLUMNS: tl.constexpr = TILES.block_n
    ROWS: tl.constexpr = TILES.block_rows
    none = tl.zeros([COLUMNS, ROWS], tl.float32)
    # Where nothing is taken in turn a loop of one trip, which compilers leave out with its registers.
    end = touched * (GRID.shares * TILED) if GRID.in_turn else tl.program_id(0) + 1
    for item in tl.range(tl.program_id(0), end, tl.num_programs(0) if GRID.in_turn else 1, num_stages=1):
        share, tile = item % GRID.shares, item // GRID.shares % TILED
        expert, count, found = _find(picks, item // (GRID.shares * TILED), of, places, GRID)
        in_tile = tile * PAIRED + of_pair
        first_row = expert * SHAPE.size
        # With a clamp rows of gate and up take turns.
        w_row = first_row + in_tile + is_up * SIZE if CLAMP is None else first_row + 2 * in_tile + is_up
        w_inside = in_tile < SIZE
        n = tile * PAIRED + tl.arange(0, PAIRED)
        for first in tl.range(share * ROWS, count, GRID.shares * ROWS, num_stages=1):
            pair, inside = _pairs_of(picks, expert, found, first, count, rows, GRID, ROWS)
            row = pair // GRID.top_k
            squares = load_squares(factor, row, inside, SHAPE.depth)
            if CLAMP is not None:
                bias_at = bias_ptr + expert * SHAPE.size + 2 * n
                gate_bias = tl.load(bias_at, mask=n < SIZE, other=0.0)
                up_bias = tl.load(bias_at + 1, mask=n < SIZE, other=0.0)
            scales = row_scales(operands, w_row, w_inside, SHAPE)
            acc = sum_split(operands, row, inside, w_row, w_inside, split, 0, none, SHAPE, TILES)
            if SHAPE.groups > 0:
                acc *= scales[:, None]
            gate, up = split_pairs(acc)
            times = norm_factor(squares, factor.eps, factor.unshrink, SHAPE.depth)
            gate *= times[None, :]
            up *= times[None, :]
            if CLAMP is not None:
                ALPHA: tl.constexpr = CLAMP.alpha
                LIMIT: tl.constexpr = CLAMP.limit
                gate += gate_bias.to(tl.float32)[:, None]
                up += up_bias.to(tl.float32)[:, None]
                # Comparisons, so that NaN stays NaN.
                gate = tl.where(gate > LIMIT, LIMIT, gate)
                up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
                value = ((up + 1) * (gate * tl.sigmoid(gate * ALPHA)) * LIFT).to(out_ptr.dtype.element_ty)
            else:
                value = (gate * tl.sigmoid(gate) * up * LIFT).to(out_ptr.dtype.element_ty)
            to = pair.to(tl.int64)[None, :] * SIZE + n[:, None]
            tl.store(out_ptr + to, value, mask=(n < SIZE)[:, None] & inside[None, :])


@triton.jit
def _combine(
    part_ptr,
    picks,
    gain_ptr,
    shrink,
    row,
    rows,
    n,
    out,
    tap,
    SIZE,
    PARTS: tl.constexpr,
    GRID: tl.constexpr,
    TAP: tl.constexpr,
):
    """Add the experts' results of some rows and columns, each in PARTS, to the residual, slot after slot."""
    TOP_K: tl.constexpr = GRID.top_k
    inside, n_inside = row < rows, n < SIZE
    both = n_inside[:, None] & inside[None, :]
    before = tl.load(out.residual + row.to(tl.int64)[None, :] * SIZE + n[:, None], mask=both, other=0.0)
    gain = tl.load(gain_ptr + n, mask=n_inside, other=0.0).to(tl.float32)
    total = tl.zeros((n.shape[0], row.shape[0]), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(picks.experts + pair, mask=inside, other=GRID.experts)
        weight = tl.load(picks.weights + pair, mask=inside, other=0.0)
        at = part_ptr + pair.to(tl.int64)[None, :] * SIZE + n[:, None]
        # Not masked by the expert, which may still be on its way.
        part = tl.load(at, mask=both, other=0.0, cache_modifier=".cg")
        for _ in tl.static_range(1, PARTS):
            at += rows.to(tl.int64) * TOP_K * SIZE
            part += tl.load(at, mask=both, other=0.0, cache_modifier=".cg")
        part = tl.where((expert < GRID.experts)[None, :], part, 0.0)
        total = tl.fma(part, tl.broadcast_to(weight[None, :], part.shape), total)
    value = total + before.to(tl.float32)
    put_residual(value, gain, shrink, row, inside, n, n_inside, out, tap, SIZE, TAP)


@triton.jit(do_not_specialize=["rows"])
def add_experts_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    gain_ptr,
    shrink,
    picks,
    rows,
    part_ptr,
    out,
    tap,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    GRID: tl.constexpr,
    COMBINED: tl.constexpr,
    TAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the last product of all pairs, fp32 [PARTS, pairs, hidden], and add them to the residual if GRID combines.

    ``picks`` were written before the kernel before this one began.
    """
    let_next_begin(OVERLAP)
    TILED: tl.constexpr = (SHAPE.size + TILES.block_n - 1) // TILES.block_n
    PARTS: tl.constexpr = SHAPE.splits if GRID.apart else 1
    SIDE: tl.constexpr = GRID.shares * PARTS
    of, all_pairs, places, touched = _look(picks, rows, GRID)
    operands = Operands(x_ptr, w_ptr, x_ptr, w_ptr, scale_ptr)
    COLUMNS: tl.constexpr = TILES.block_n
    ROWS: tl.constexpr = TILES.block_rows
    none = tl.zeros([COLUMNS, ROWS], tl.float32)
    # One place at least: where there are no pairs at all the first of each tile goes on.
    end = tl.maximum(touched, 1) * (SIDE * TILED) if GRID.in_turn else tl.program_id(0) + 1
    # A program without a place waits, too, as `machine` asks.
    if tl.program_id(0) >= end:
        wait_for_previous(OVERLAP)
    for item in tl.range(tl.program_id(0), end, tl.num_programs(0) if GRID.in_turn else 1, num_stages=1):
        side, tile, place_of = item % SIDE, item // SIDE % TILED, item // (SIDE * TILED)
        share, split = (0, side) if GRID.apart else (side, tl.program_id(1))
        expert, count, found = _find(picks, place_of, of, places, GRID)
        n = tile * TILES.block_n + tl.arange(0, TILES.block_n)
        w_row, n_inside = expert * SHAPE.size + n, n < SHAPE.size
        if item == tl.program_id(0):
            if OVERLAP:
                ask_ahead(w_ptr, w_row, n_inside & (count > 0), split * SHAPE.split_size, SHAPE, TILES)
            wait_for_previous(OVERLAP)
        for first in tl.range(share * ROWS, count, GRID.shares * ROWS, num_stages=1):
            pair, inside = _pairs_of(picks, expert, found, first, count, rows, GRID, ROWS)
            scales = row_scales(operands, w_row, n_inside, SHAPE)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + w_row, mask=n_inside, other=0.0).to(tl.float32)
                bias = tl.where(split == 0, bias, 0.0)
            acc = sum_split(operands, pair, inside, w_row, n_inside, split, 0, none, SHAPE, TILES)
            if SHAPE.groups > 0:
                acc *= scales[:, None]
            if bias_ptr is not None:
                acc = plus(acc, tl.broadcast_to(bias[:, None], acc.shape))
            if not GRID.apart:
                for each in tl.range(1, SHAPE.splits):
                    more = sum_split(operands, pair, inside, w_row, n_inside, each, 0, none, SHAPE, TILES)
                    if SHAPE.groups > 0:
                        more *= scales[:, None]
                    acc = plus(more, acc)
            to = (split * rows.to(tl.int64) * GRID.top_k + pair)[None, :] * SHAPE.size + n[:, None]
            tl.store(part_ptr + to, acc, mask=n_inside[:, None] & inside[None, :])
        if GRID.combines:
            # What has no pairs adds nothing.
            has_part = count > 0 or (all_pairs == 0 and place_of + side == 0)
            if has_part:
                tl.debug_barrier()
                done = tl.atomic_add(picks.finished + tile, count, sem="acq_rel") + count
                if done == all_pairs * PARTS:
                    tl.store(picks.finished + tile, 0)
                    tl.debug_barrier()
                    for first in tl.range(0, rows, COMBINED, num_stages=1):
                        row = first + tl.arange(0, COMBINED)
                        _combine(
                            part_ptr, picks, gain_ptr, shrink, row, rows, n, out, tap, SHAPE.size, PARTS, GRID, TAP
                        )


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    part_ptr,
    picks,
    gain_ptr,
    shrink,
    rows,
    out,
    tap,
    SIZE: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add the experts' results of all pairs to the residual."""
    let_next_begin(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _combine(part_ptr, picks, gain_ptr, shrink, row, rows, n, out, tap, SIZE, 1, GRID, TAP)
