"""Device code of `choose_tokens`: where top-k and top-p cut a row, found without sorting it.

The cut is a distance below the largest score: the smallest up to which tokens (top-k) or their weights (top-p) reach a
goal. It is enclosed in an interval, which each pass over the row narrows with a histogram, and then searched for in a
list of the tokens within. The launches in their order:

    survey, narrow   numbers of tokens in 64 bins of the interval; a smaller interval from them
    survey, narrow   again, for rows whose interval holds too many tokens to list
    collect          the list, and the weight of all that is nearer
    cut              the search in the list

Surveys and collecting run over rows and tiles. The numbers of tokens in the bins tell exactly in which bin the k-th
token lies, and bound the weights, which a bin knows to within its width. Sums are whole numbers, so the order of the
list has no effect.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .choice_kernels import TOP_K, TOP_P, is_skipped, largest_of, load_distances, load_tile, this_row
from .token_weights import FAR, distance_weight

BINS = tl.constexpr(64)
LOW, HIGH, GOAL, COUNT = (tl.constexpr(place) for place in range(4))
"""Places in a row's ``interval``: its ends, the goal, and the number of tokens to list."""


@triton.jit
def bin_shift(low, high):
    """Return the shift for bins of 2**shift distances from ``low`` to ``high``: 32 to 64 bins, or fewer of one each."""
    # The exponent of a float; without its last five bits the width is exact in one.
    return tl.maximum((((high - low) >> 5).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)


@triton.jit
def count_bins(distance, low, high):
    """Count the tokens in each bin of an interval: int32 [BINS]."""
    inside = (distance >= low) & (distance <= high)
    return tl.histogram(tl.where(inside, (distance - low) >> bin_shift(low, high), 0), BINS, mask=inside)


@triton.jit
def narrow_interval(low, high, counts, nearer, goal, WEIGHTED: tl.constexpr):
    """Return the ends of the part of an interval in which the goal is reached, and its tokens up to each end.

    ``nearer``: what of the goal lies below ``low``.
    """
    shift = bin_shift(low, high)
    bins = tl.arange(0, BINS)
    upper = counts.to(tl.int64)
    lower = upper
    if WEIGHTED:
        start = low + (bins << shift)
        upper = upper * distance_weight(start)
        lower = lower * distance_weight(start + (1 << shift) - 1)
    num_below = tl.sum((nearer + tl.cumsum(upper, axis=0) < goal).to(tl.int32), axis=0)
    num_open = tl.sum((nearer + tl.cumsum(lower, axis=0) < goal).to(tl.int32), axis=0)
    count_below = tl.sum(tl.where(bins < num_below, counts, 0), axis=0)
    count_up_to = tl.sum(tl.where(bins <= num_open, counts, 0), axis=0)
    new_low = tl.minimum(low + (num_below << shift), high)
    new_high = tl.minimum(low + ((num_open + 1) << shift) - 1, high)
    return new_low, new_high, count_below, count_up_to


@triton.jit
def goal_of_top_p(total, numbers_ptr):
    """Return the weight that top-p keeps at least of a ``total``; whatever top-p is, the most probable token stays."""
    share = 1.0 - tl.load(numbers_ptr + TOP_P).to(tl.float64)
    return total - tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def load_interval(scratch, row, FIRST: tl.constexpr):
    """Load the ends of a row's interval: everything, the first time."""
    low = tl.full([], 0, tl.int32)
    high = low + (FAR - 1)
    if not FIRST:
        low = tl.load(scratch.interval + row * 4 + LOW).to(tl.int32)
        high = tl.load(scratch.interval + row * 4 + HIGH).to(tl.int32)
    return low, high


@triton.jit(do_not_specialize=["nodes"])
def survey_kernel(logits_ptr, trees, nodes, state, scratch, SHAPE: tl.constexpr, FIRST: tl.constexpr):
    """Count a tile's tokens in the bins, and sum the measure of nearer ones; the first time, of all."""
    if is_skipped(trees, nodes):
        return
    at = this_row(trees, nodes, state)
    if not FIRST:  # noqa: SIM102  # known when compiling
        if tl.load(scratch.interval + at.row * 4 + COUNT) <= SHAPE.few:
            return
    low, high = load_interval(scratch, at.row, FIRST)
    distance = load_tile(logits_ptr, at, state, scratch, SHAPE)
    to = at.row * SHAPE.tiles + tl.program_id(1)
    measure = distance_weight(distance) if SHAPE.weighted else tl.full([SHAPE.tile], 1, tl.int64)
    end = high + 1 if FIRST else low
    tl.store(scratch.mass + to, tl.sum(tl.where(distance < end, measure, 0), axis=0))
    tl.store(scratch.counts + to * BINS + tl.arange(0, BINS), count_bins(distance, low, high))


@triton.jit(do_not_specialize=["nodes"])
def narrow_kernel(trees, nodes, state, scratch, SHAPE: tl.constexpr, FIRST: tl.constexpr):
    """Narrow a row's interval by the counts of its tiles; the first time, set its goal too."""
    if is_skipped(trees, nodes):
        return
    row = tl.program_id(0).to(tl.int64)
    interval_ptr = scratch.interval + row * 4
    if not FIRST:  # noqa: SIM102  # known when compiling
        if tl.load(interval_ptr + COUNT) <= SHAPE.few:
            return
    tile = tl.arange(0, SHAPE.block_tiles)
    bins = tl.arange(0, BINS)
    low, high = load_interval(scratch, row, FIRST)
    mask = tile < SHAPE.tiles
    nearer = tl.sum(tl.load(scratch.mass + row * SHAPE.tiles + tile, mask=mask, other=0), axis=0)
    if not FIRST:
        goal = tl.load(interval_ptr + GOAL)
    elif SHAPE.weighted:
        goal = goal_of_top_p(nearer, state.numbers)
    else:
        goal = tl.load(state.numbers + TOP_K).to(tl.int64)
    if FIRST:
        nearer = tl.full([], 0, tl.int64)
        tl.store(scratch.num_listed + row, 0)
    at = (row * SHAPE.tiles + tile)[:, None] * BINS + bins[None, :]
    counts = tl.load(scratch.counts + at, mask=mask[:, None], other=0)
    low, high, count_below, count_up_to = narrow_interval(
        low, high, tl.sum(counts, axis=0), nearer, goal, SHAPE.weighted
    )
    # With top-k a list begins with the most probable token, as top-p may come after it.
    count = count_up_to - count_below if SHAPE.weighted else nearer + count_up_to
    tl.store(interval_ptr + LOW, low.to(tl.int64))
    tl.store(interval_ptr + HIGH, high.to(tl.int64))
    tl.store(interval_ptr + GOAL, goal)
    tl.store(interval_ptr + COUNT, count.to(tl.int64))


@triton.jit(do_not_specialize=["nodes"])
def collect_kernel(logits_ptr, trees, nodes, state, scratch, SHAPE: tl.constexpr):
    """Add a tile's tokens within the interval to the row's list; with top-p also the weight of those before it."""
    if is_skipped(trees, nodes):
        return
    at = this_row(trees, nodes, state)
    if tl.load(scratch.interval + at.row * 4 + COUNT) > SHAPE.capacity:
        return
    low, high = load_interval(scratch, at.row, False)
    distance = load_tile(logits_ptr, at, state, scratch, SHAPE)
    is_listed = distance <= high
    if SHAPE.weighted:
        is_listed = is_listed & (distance >= low)
        weight = tl.where(distance < low, distance_weight(distance), 0)
        tl.store(scratch.mass + at.row * SHAPE.tiles + tl.program_id(1), tl.sum(weight, axis=0))
    listed = is_listed.to(tl.int32)
    count = tl.sum(listed, axis=0)
    if count > 0:
        first = tl.atomic_add(scratch.num_listed + at.row, count)
        to = at.row * SHAPE.capacity + first + tl.cumsum(listed, axis=0) - 1
        tl.store(scratch.listed + to, distance, mask=is_listed)


class RowScan(NamedTuple):
    """A row to scan: its list of ``num_listed`` distances, or, where that is negative, its logits.

    ``before``: what lies nearer than everything listed.
    """

    logits_ptr: Any
    at: Any
    largest: Any
    num_listed: Any
    before: Any
    state: Any
    scratch: Any


@triton.jit
def scan_row(scan, low, high, middle, SHAPE: tl.constexpr, WEIGHTED: tl.constexpr):
    """Sum a row's measure (weights, or numbers of tokens) nearer than ``low`` and up to ``middle``: int64.

    Also the numbers of tokens in the bins from ``low`` to ``high``.
    """
    nearer = tl.full([SHAPE.tile], 0, tl.int64)
    half = tl.full([SHAPE.tile], 0, tl.int64)
    counts = tl.full([BINS], 0, tl.int32)
    for first in range(0, tl.where(scan.num_listed < 0, SHAPE.vocab, scan.num_listed), SHAPE.tile):
        place = first + tl.arange(0, SHAPE.tile)
        if scan.num_listed < 0:
            distance = load_distances(scan.logits_ptr, scan.at, scan.largest, place, scan.state, scan.scratch, SHAPE)
        else:
            list_ptr = scan.scratch.listed + scan.at.row * SHAPE.capacity
            distance = tl.load(list_ptr + place, mask=place < scan.num_listed, other=FAR)
        measure = distance_weight(distance) if WEIGHTED else tl.full([SHAPE.tile], 1, tl.int64)
        nearer += tl.where(distance < low, measure, 0)
        half += tl.where(distance <= middle, measure, 0)
        counts += count_bins(distance, low, high)
    return tl.sum(nearer, axis=0), tl.sum(half, axis=0), counts


@triton.jit
def find_cut(scan, low, high, goal, SHAPE: tl.constexpr, WEIGHTED: tl.constexpr):
    """Find the smallest distance from ``low`` to ``high`` at which the goal is reached; returned with the goal.

    A negative goal stands for what top-p asks of all up to ``high``. What the bounds leave open is halved by an exact
    sum, so that the search ends whatever the bounds.
    """
    while (goal < 0) | (low < high):
        is_first = goal < 0
        middle = tl.where(is_first, high, low + (high - low) // 2)
        nearer, half, counts = scan_row(scan, low, high, middle, SHAPE, WEIGHTED)
        half += scan.before
        if is_first:
            goal = goal_of_top_p(half, scan.state.numbers)
        low, high, _, _ = narrow_interval(low, high, counts, nearer + scan.before, goal, WEIGHTED)
        if is_first == 0:
            if half >= goal:
                high = tl.minimum(high, middle)
            else:
                low = tl.maximum(low, middle + 1)
    return low, goal


@triton.jit(do_not_specialize=["nodes"])
def cut_kernel(logits_ptr, trees, nodes, state, scratch, SHAPE: tl.constexpr):
    """Find the largest distance that top-k and top-p keep, and with top-p how many tokens at it are to be kept."""
    if is_skipped(trees, nodes):
        return
    at = this_row(trees, nodes, state)
    largest = largest_of(scratch, at, SHAPE)
    low, high = load_interval(scratch, at.row, False)
    goal = tl.load(scratch.interval + at.row * 4 + GOAL)
    # Without a list, where too many tokens are nearly as probable, every pass reads the row.
    num_listed = tl.full([], -1, tl.int32)
    before = tl.full([], 0, tl.int64)
    if tl.load(scratch.interval + at.row * 4 + COUNT) <= SHAPE.capacity:
        num_listed = tl.load(scratch.num_listed + at.row)
        if SHAPE.weighted:
            tile = tl.arange(0, SHAPE.block_tiles)
            mass = tl.load(scratch.mass + at.row * SHAPE.tiles + tile, mask=tile < SHAPE.tiles, other=0)
            before = tl.sum(mass, axis=0)
    scan = RowScan(logits_ptr, at, largest, num_listed, before, state, scratch)
    threshold, goal = find_cut(scan, low, high, goal, SHAPE, SHAPE.weighted)
    if SHAPE.has_top_k and SHAPE.has_top_p:
        threshold, goal = find_cut(scan, tl.full([], 0, tl.int32), threshold, tl.full([], -1, tl.int64), SHAPE, True)
    tl.store(scratch.threshold + at.row, threshold)
    if SHAPE.has_top_p:
        nearer, _, _ = scan_row(scan, threshold, threshold, threshold, SHAPE, True)
        weight = tl.maximum(distance_weight(threshold), 1)
        tl.store(scratch.needed + at.row, ((goal - nearer - before + weight - 1) // weight).to(tl.int32))
