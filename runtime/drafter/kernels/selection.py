"""Exact selection by (value descending, index ascending), without sorting: device functions shared by the kernels.

* `take_best` takes the k best out one after the other, where a row of values lies in half a warp: threads exchange
  them by shuffles alone, and the loop is short. Long straight code is fetched anew at every level, which on an H200
  cost more than it saved.
* `count_greater` ranks each element by counting, in a loop over all, those that come before it: for up to some hundred
  elements spread over a program, where k rounds of reductions would each wait for the whole program.
* `best_k_mask` finds the value of the k-th best bit by bit, then breaks ties by position with a prefix sum: 32 counting
  passes whatever k, for up to 4096 elements.

All are free of atomics and of data-dependent control flow. Values are fp32 without NaN; -inf is a value like any
other; padding carries `LOWEST_KEY`, which every real key exceeds.
"""

import triton
import triton.language as tl

from .weight_stream import unaligned_zero

NO_INDEX = tl.constexpr(0x7FFFFFFF)
"""Rank or index of padding: int32 maximum."""
LOWEST_KEY = tl.constexpr(-9223372036854775807)
"""Key of padding: every real key precedes it."""
THREADS = tl.constexpr(256)
"""Threads of a program of 8 warps."""
LANES = tl.constexpr(16)
"""Threads that share a row in `take_best`; also the most children that a node can have."""


@triton.jit
def sortable_bits(value):
    """Map fp32 to int32 so that the integer order is the order of the values; -0.0 and 0.0 become one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def order_key(value, index):
    """Make an int64 key whose descending order is (value descending, index ascending)."""
    return (sortable_bits(value).to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def key_value(key):
    """Return the fp32 value of an `order_key`."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def key_index(key):
    """Return the int32 index of an `order_key`; 0x7FFFFFFE for `LOWEST_KEY`."""
    return key.to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def max_of_row(value):
    """Return the largest of each LANES neighbours, in the place of each: [ROWS * LANES] like ``value``."""
    ROWS: tl.constexpr = value.shape[0] // LANES
    rows = tl.reshape(value, [ROWS, LANES])
    return tl.reshape(tl.broadcast_to(tl.max(rows, axis=1)[:, None], [ROWS, LANES]), [ROWS * LANES])


@triton.jit
def sum_of_row(value):
    """Add up each LANES neighbours, in the place of each."""
    ROWS: tl.constexpr = value.shape[0] // LANES
    rows = tl.reshape(value, [ROWS, LANES])
    return tl.reshape(tl.broadcast_to(tl.sum(rows, axis=1)[:, None], [ROWS, LANES]), [ROWS * LANES])


@triton.jit
def take_best(key, old_key, lane, TOP_K: tl.constexpr, FOLD: tl.constexpr):
    """Take the TOP_K best keys of each row, lane k of the row holding the k-th; `LOWEST_KEY` where there are no more.

    ``key`` int64 [elements, rows * LANES]: a row's keys lie in LANES neighbours, and its real ones all differ. With
    FOLD, ``old_key`` [rows * LANES] belongs to the rows too. ``lane`` int32 [rows * LANES]; TOP_K <= LANES. Returns
    int64 [rows * LANES].
    """
    best = tl.full(lane.shape, LOWEST_KEY, tl.int64)
    for k in range(0, TOP_K + unaligned_zero()):  # not unrolled
        greatest = tl.max(key, axis=0)
        if FOLD:
            greatest = tl.maximum(greatest, old_key)
        greatest = max_of_row(greatest)
        best = tl.where(lane == k, greatest, best)
        key = tl.where(key == greatest[None, :], LOWEST_KEY, key)
        if FOLD:
            old_key = tl.where(old_key == greatest, LOWEST_KEY, old_key)
    return best


@triton.jit
def each_thread(SIZE: tl.constexpr):
    """Return zeros [SIZE] that make every thread load all of what is addressed by another dimension: int64.

    The compiler deals a load's addresses to threads along the dimension in which they are contiguous, so these claim to
    be; being of unknown alignment too, they are not taken together.
    """
    return tl.max_contiguous((tl.arange(0, SIZE) * unaligned_zero()).to(tl.int64), SIZE)


@triton.jit
def count_greater(key, keys_ptr, count, STRIDE: tl.constexpr, BATCH: tl.constexpr):
    """Count which of ``count`` keys in memory, STRIDE elements apart, exceed each of ``key``: int64 [N] to int32 [N].

    N should be `THREADS` at least, or threads share the keys and exchange what they count. ``count`` >= 1 is rounded
    up to a multiple of BATCH: what lies there must be `LOWEST_KEY`. A thread compares one batch while it loads the
    next; left to itself, the assembler waits for each key in turn.
    """
    greater = tl.zeros(key.shape, tl.int32)
    place = tl.arange(0, BATCH)[:, None] * STRIDE + each_thread(key.shape[0])[None, :]
    last = (count - 1) // BATCH * BATCH
    keys = tl.load(keys_ptr + place)
    for first in tl.range(0, count, BATCH, disable_licm=True):
        following = tl.load(keys_ptr + tl.minimum(first + BATCH, last) * STRIDE + place)
        greater += tl.sum((keys > key[None, :]).to(tl.int32), axis=0)
        keys = following
    return greater


@triton.jit
def best_k_mask(value, valid, k):
    """Mark the k best of [N] by (value descending, position ascending); at least k must be valid. int1 [N]."""
    bits = sortable_bits(value)
    # Largest threshold t with count(bits >= t) >= k, built from the sign downwards; it is the k-th best value itself.
    at_least_zero = tl.sum((valid & (bits >= 0)).to(tl.int32), axis=0)
    threshold = tl.where(at_least_zero >= k, 0, -2147483648).to(tl.int32)
    # Not unrolled: thirty-one reductions one after the other would be a thousand instructions.
    for bit in range(0, 31 + unaligned_zero()):
        trial = threshold | (1 << (30 - bit))
        enough = tl.sum((valid & (bits >= trial)).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, trial, threshold)
    above = valid & (bits > threshold)
    tied = (valid & (bits == threshold)).to(tl.int32)
    room = k - tl.sum(above.to(tl.int32), axis=0)
    return above | ((tied != 0) & (tl.cumsum(tied, axis=0) <= room))
