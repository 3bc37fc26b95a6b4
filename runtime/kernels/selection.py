"""Exact selection by (value descending, index ascending), without sorting: device functions shared by the kernels.

* `rank_best` pulls the k best out one after the other, each with one reduction over an integer key that holds both
  criteria. The loop is short. Comparing all pairs at once is less work on paper and was three
  times slower on an H200: long straight code is fetched anew at every level.
* `best_k_mask` finds the value of the k-th best bit by bit, then breaks ties by position with a prefix sum: 32 counting
  passes whatever k, for up to 4096 elements.

Both are free of atomics and of data-dependent control flow. Values are fp32 without NaN; -inf is a value like any
other; padding carries `NO_INDEX`, which every real index precedes.
"""

import triton
import triton.language as tl

NO_INDEX = tl.constexpr(0x7FFFFFFF)
"""Index of padding: int32 maximum."""
LOWEST_KEY = tl.constexpr(-9223372036854775807)
"""A key that every other precedes."""


@triton.jit
def sortable_bits(value):
    """Map fp32 to int32 so that the integer order is the order of the values; -0.0 and 0.0 become one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def order_key(value, index):
    """int64 key whose descending order is (value descending, index ascending)."""
    return (sortable_bits(value).to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def rank_best(key, TOP_K: tl.constexpr):
    """Rank the TOP_K best keys of [N]: int32 [N], 0 for the best; NO_INDEX for all others and for spent padding.

    Real keys differ; padding may share a rank.
    """
    rank = tl.full(key.shape, NO_INDEX, tl.int32)
    for k in range(TOP_K):
        hit = key == tl.max(key, axis=0)
        rank = tl.where(hit & (rank == NO_INDEX), k, rank)
        key = tl.where(hit, LOWEST_KEY, key)
    return rank


@triton.jit
def best_k_mask(value, valid, k):
    """Mark the k best of [N] by (value descending, position ascending); at least k must be valid. int1 [N]."""
    bits = sortable_bits(value)
    # Largest threshold t with count(bits >= t) >= k, built from the sign downwards; it is the k-th best value itself.
    at_least_zero = tl.sum((valid & (bits >= 0)).to(tl.int32), axis=0)
    threshold = tl.where(at_least_zero >= k, 0, -2147483648).to(tl.int32)
    for bit in range(0, 31):
        trial = threshold | (1 << (30 - bit))
        enough = tl.sum((valid & (bits >= trial)).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, trial, threshold)
    above = valid & (bits > threshold)
    tied = (valid & (bits == threshold)).to(tl.int32)
    room = k - tl.sum(above.to(tl.int32), axis=0)
    return above | ((tied != 0) & (tl.cumsum(tied, axis=0) <= room))
