"""Device code of `choose_tokens`: where top-k and top-p cut a row, found without sorting it.

The cut is a distance below the largest score: the smallest up to which tokens (top-k) or their weights (top-p) reach a
goal. It is enclosed in an interval, which each pass over the row narrows with a histogram, and then searched for in a
list of the tokens within. The launches in their order:

    survey, narrow   numbers of tokens in 64 bins of the interval; a smaller interval from them
    survey, narrow   again, for rows whose interval holds too many tokens to list them without effort
    collect          the list, and the weight of all that is nearer
    cut              the search in the list

Surveys and the collecting are spread over rows and parts, so that a single row fills no more than its share of the GPU.
Numbers of tokens in the bins tell exactly in which one the k-th token lies; weights they bound, as a bin's are known to
within its width. Everything is added up in whole numbers, and the order of the list is without effect.
"""

import triton
import triton.language as tl

from .choice_kernels import TOP_K, TOP_P, is_row_too_short, largest_of, load_distances, load_part
from .token_weights import FAR, distance_weight

BINS = tl.constexpr(64)
FEW = 1024
"""Tokens in an interval that are not worth another survey."""
LOW, HIGH, GOAL, COUNT = (tl.constexpr(place) for place in range(4))
"""Places in a row's ``interval``: its ends, what is to be reached, and how many tokens a list would have."""


@triton.jit
def bin_shift(low, high):
    """Bins of 2**shift distances from ``low`` to ``high``: 32 to 64 of them where the interval is wide enough."""
    # The exponent of a float; without its last five bits the width is exact in one.
    return tl.maximum((((high - low) >> 5).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)


@triton.jit
def count_bins(distance, low, high):
    """Numbers of tokens in each bin of an interval: int32 [BINS]."""
    inside = (distance >= low) & (distance <= high)
    return tl.histogram(tl.where(inside, (distance - low) >> bin_shift(low, high), 0), BINS, mask=inside)


@triton.jit
def narrow_interval(low, high, counts, nearer, goal, WEIGHTED: tl.constexpr):
    """Ends of the part of an interval in which the goal is reached, and how many of its tokens are up to each end.

    ``nearer``: what of the goal lies below ``low``.
    """
    shift = bin_shift(low, high)
    bins = tl.arange(0, BINS)
    most = counts.to(tl.int64)
    least = most
    if WEIGHTED:
        start = low + (bins << shift)
        most = most * distance_weight(start)
        least = least * distance_weight(start + (1 << shift) - 1)
    num_below = tl.sum((nearer + tl.cumsum(most, axis=0) < goal).to(tl.int32), axis=0)
    num_open = tl.sum((nearer + tl.cumsum(least, axis=0) < goal).to(tl.int32), axis=0)
    count_below = tl.sum(tl.where(bins < num_below, counts, 0), axis=0)
    count_up_to = tl.sum(tl.where(bins <= num_open, counts, 0), axis=0)
    new_low = tl.minimum(low + (num_below << shift), high)
    new_high = tl.minimum(low + ((num_open + 1) << shift) - 1, high)
    return new_low, new_high, count_below, count_up_to


@triton.jit
def goal_of_top_p(total, numbers_ptr):
    """Weight that top-p keeps at least of a ``total``; whatever top-p is, the most probable token stays."""
    share = 1.0 - tl.load(numbers_ptr + TOP_P).to(tl.float64)
    return total - tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def survey_kernel(
    logits_ptr, active_slots_ptr, active_count_ptr, positions_ptr, num_generated_ptr,
    penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, best_score_ptr, interval_ptr, counts_ptr, mass_ptr, few,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, FIRST: tl.constexpr, WEIGHTED: tl.constexpr, HAS_PENALTY: tl.constexpr,
    HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Of a part: tokens in the bins, and what lies nearer than the interval; first, the weight of everything."""
    row = tl.program_id(0).to(tl.int64)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        return
    low = tl.zeros([], tl.int32)
    high = low + (FAR - 1)
    if not FIRST:
        if tl.load(interval_ptr + row * 4 + COUNT) <= few:
            return
        low = tl.load(interval_ptr + row * 4 + LOW).to(tl.int32)
        high = tl.load(interval_ptr + row * 4 + HIGH).to(tl.int32)
    distance = load_part(
        logits_ptr, active_slots_ptr, positions_ptr, num_generated_ptr, penalised_ptr, suppressed_ptr, eos_ptr,
        numbers_ptr, best_score_ptr, row,
        NODES, VOCAB, WORDS, PART, PARTS, BLOCK_P, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    part = tl.program_id(1)
    measure = distance_weight(distance) if WEIGHTED else tl.full([PART], 1, tl.int64)
    end = high + 1 if FIRST else low
    tl.store(mass_ptr + row * PARTS + part, tl.sum(tl.where(distance < end, measure, 0), axis=0))
    tl.store(counts_ptr + (row * PARTS + part) * BINS + tl.arange(0, BINS), count_bins(distance, low, high))


@triton.jit
def narrow_kernel(
    active_count_ptr, numbers_ptr, interval_ptr, counts_ptr, mass_ptr, num_listed_ptr, few,
    NODES: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, FIRST: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Narrow a row's interval by what its parts have counted; the first time, set its goal too."""
    row = tl.program_id(0).to(tl.int64)
    if row // NODES >= tl.load(active_count_ptr):
        return
    interval_ptr += row * 4
    part = tl.arange(0, BLOCK_P)
    bins = tl.arange(0, BINS)
    low = tl.zeros([], tl.int32)
    high = low + (FAR - 1)
    if not FIRST:
        if tl.load(interval_ptr + COUNT) <= few:
            return
        low = tl.load(interval_ptr + LOW).to(tl.int32)
        high = tl.load(interval_ptr + HIGH).to(tl.int32)
    nearer = tl.sum(tl.load(mass_ptr + row * PARTS + part, mask=part < PARTS, other=0), axis=0)
    if not FIRST:
        goal = tl.load(interval_ptr + GOAL)
    elif WEIGHTED:
        goal = goal_of_top_p(nearer, numbers_ptr)
    else:
        goal = tl.load(numbers_ptr + TOP_K).to(tl.int64)
    if FIRST:
        nearer = tl.zeros([], tl.int64)
        tl.store(num_listed_ptr + row, 0)
    counts = tl.load(
        counts_ptr + (row * PARTS + part)[:, None] * BINS + bins[None, :], mask=(part < PARTS)[:, None], other=0
    )
    low, high, count_below, count_up_to = narrow_interval(low, high, tl.sum(counts, axis=0), nearer, goal, WEIGHTED)
    # With top-k a list begins with the most probable token, as top-p may come after it.
    count = count_up_to - count_below if WEIGHTED else nearer + count_up_to
    tl.store(interval_ptr + LOW, low.to(tl.int64))
    tl.store(interval_ptr + HIGH, high.to(tl.int64))
    tl.store(interval_ptr + GOAL, goal)
    tl.store(interval_ptr + COUNT, count.to(tl.int64))


@triton.jit
def collect_kernel(
    logits_ptr, active_slots_ptr, active_count_ptr, positions_ptr, num_generated_ptr,
    penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, best_score_ptr, interval_ptr, mass_ptr, listed_ptr,
    num_listed_ptr, capacity,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, WEIGHTED: tl.constexpr, HAS_PENALTY: tl.constexpr, HAS_SUPPRESSED: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Add a part's tokens within the interval to the row's list; with WEIGHTED also the weight of those before it."""
    row = tl.program_id(0).to(tl.int64)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        return
    if tl.load(interval_ptr + row * 4 + COUNT) > capacity:
        return
    low = tl.load(interval_ptr + row * 4 + LOW).to(tl.int32)
    high = tl.load(interval_ptr + row * 4 + HIGH).to(tl.int32)
    distance = load_part(
        logits_ptr, active_slots_ptr, positions_ptr, num_generated_ptr, penalised_ptr, suppressed_ptr, eos_ptr,
        numbers_ptr, best_score_ptr, row,
        NODES, VOCAB, WORDS, PART, PARTS, BLOCK_P, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    part = tl.program_id(1)
    is_listed = distance <= high
    if WEIGHTED:
        is_listed = is_listed & (distance >= low)
        weight = tl.where(distance < low, distance_weight(distance), 0)
        tl.store(mass_ptr + row * PARTS + part, tl.sum(weight, axis=0))
    found = is_listed.to(tl.int32)
    count = tl.sum(found, axis=0)
    if count > 0:
        first = tl.atomic_add(num_listed_ptr + row, count)
        tl.store(listed_ptr + row * capacity + first + tl.cumsum(found, axis=0) - 1, distance, mask=is_listed)


@triton.jit
def scan_row(
    logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, largest, listed_ptr, num_listed,
    low, high, middle, WEIGHTED: tl.constexpr, VOCAB: tl.constexpr, PART: tl.constexpr, HAS_PENALTY: tl.constexpr,
    HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """What of a row lies nearer than ``low``, and up to ``middle`` (weights, or numbers of tokens): int64.

    Also the numbers of tokens in the bins from ``low`` to ``high``. Reads the list where there is one, that is where
    ``num_listed`` is not negative.
    """
    nearer = tl.zeros([PART], tl.int64)
    half = tl.zeros([PART], tl.int64)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, tl.where(num_listed < 0, VOCAB, num_listed), PART):
        place = first + tl.arange(0, PART)
        if num_listed < 0:
            distance = load_distances(
                logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, largest, place,
                VOCAB, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
            )  # fmt: skip
        else:
            distance = tl.load(listed_ptr + place, mask=place < num_listed, other=FAR)
        measure = distance_weight(distance) if WEIGHTED else tl.full([PART], 1, tl.int64)
        nearer += tl.where(distance < low, measure, 0)
        half += tl.where(distance <= middle, measure, 0)
        counts += count_bins(distance, low, high)
    return tl.sum(nearer, axis=0), tl.sum(half, axis=0), counts


@triton.jit
def find_cut(
    logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, largest, listed_ptr, num_listed, before,
    low, high, goal, WEIGHTED: tl.constexpr, VOCAB: tl.constexpr, PART: tl.constexpr, HAS_PENALTY: tl.constexpr,
    HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Smallest distance from ``low`` to ``high`` at which the goal is reached; returned with the goal.

    ``before``: what lies nearer than everything listed. A negative goal stands for what top-p asks of all up to
    ``high``. What the bounds leave open is halved by an exact sum, so that the search ends whatever the bounds.
    """
    while (goal < 0) | (low < high):
        is_first = goal < 0
        middle = tl.where(is_first, high, low + (high - low) // 2)
        nearer, half, counts = scan_row(
            logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, largest, listed_ptr, num_listed,
            low, high, middle, WEIGHTED, VOCAB, PART, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
        )  # fmt: skip
        half += before
        if is_first:
            goal = goal_of_top_p(half, numbers_ptr)
        low, high, _, _ = narrow_interval(low, high, counts, nearer + before, goal, WEIGHTED)
        if is_first == 0:
            if half >= goal:
                high = tl.minimum(high, middle)
            else:
                low = tl.maximum(low, middle + 1)
    return low, goal


@triton.jit
def cut_kernel(
    logits_ptr, active_slots_ptr, active_count_ptr, positions_ptr, num_generated_ptr,
    penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, best_score_ptr, interval_ptr, mass_ptr, listed_ptr,
    num_listed_ptr, capacity, threshold_ptr, goal_ptr,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_PENALTY: tl.constexpr,
    HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Largest distance that top-k and top-p keep, and with top-p the weight that is to be kept."""
    row = tl.program_id(0).to(tl.int64)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        return
    too_short = is_row_too_short(
        row, active_slots_ptr, positions_ptr, num_generated_ptr, numbers_ptr, NODES, HAS_MINIMUM
    )  # fmt: skip
    largest = largest_of(best_score_ptr, row, PARTS, BLOCK_P)
    low = tl.load(interval_ptr + row * 4 + LOW).to(tl.int32)
    high = tl.load(interval_ptr + row * 4 + HIGH).to(tl.int32)
    goal = tl.load(interval_ptr + row * 4 + GOAL)
    # Without a list, where too many tokens are nearly as probable, every pass reads the row.
    num_listed = tl.full([], -1, tl.int32)
    before = tl.zeros([], tl.int64)
    if tl.load(interval_ptr + row * 4 + COUNT) <= capacity:
        num_listed = tl.load(num_listed_ptr + row)
        if not HAS_TOP_K:
            part = tl.arange(0, BLOCK_P)
            before = tl.sum(tl.load(mass_ptr + row * PARTS + part, mask=part < PARTS, other=0), axis=0)
    threshold, goal = find_cut(
        logits_ptr + row * VOCAB, penalised_ptr + row * WORDS, suppressed_ptr, eos_ptr, numbers_ptr, too_short,
        largest, listed_ptr + row * capacity, num_listed, before, low, high, goal,
        not HAS_TOP_K, VOCAB, PART, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    if HAS_TOP_K and HAS_TOP_P:
        threshold, goal = find_cut(
            logits_ptr + row * VOCAB, penalised_ptr + row * WORDS, suppressed_ptr, eos_ptr, numbers_ptr, too_short,
            largest, listed_ptr + row * capacity, num_listed, before, tl.zeros([], tl.int32), threshold,
            tl.full([], -1, tl.int64), True, VOCAB, PART, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
        )  # fmt: skip
    tl.store(goal_ptr + row, goal)
    tl.store(threshold_ptr + row, threshold)
