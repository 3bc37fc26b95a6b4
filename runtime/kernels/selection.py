"""Exact selection by (value descending, index ascending), without sorting: device functions shared by the kernels.

Two ways, both free of atomics and of data-dependent control flow:

* *rank by all pairs*: an element's rank is the number of elements that precede it. N x N comparisons, no serial chain;
  for N up to 256.
* *bisection*: find the value of the k-th best bit by bit, then break ties by index with a prefix sum. 32 counting
  passes, for N up to 4096.

Values are fp32 without NaN; -inf is a value like any other; padding carries `NO_INDEX`, which every real index precedes.
"""

import triton
import triton.language as tl

NO_INDEX = tl.constexpr(0x7FFFFFFF)
"""Index of padding: int32 maximum."""


@triton.jit
def precedes(value_a, index_a, value_b, index_b):
    """Whether a comes before b: larger value, or equal value and smaller index."""
    return (value_a > value_b) | ((value_a == value_b) & (index_a < index_b))


@triton.jit
def rank_all_pairs(value, index):
    """Rank of each element, int32 [N]: 0 is the best. Indices must differ, except among padding."""
    ahead = precedes(value[:, None], index[:, None], value[None, :], index[None, :])
    return tl.sum(ahead.to(tl.int32), axis=0)


@triton.jit
def place_by_rank(rank, payload, index, N_OUT: tl.constexpr):
    """Return [N_OUT]: payload of the element of rank 0, 1, ...; ``index`` tells padding, which is never placed."""
    hit = (rank[None, :] == tl.arange(0, N_OUT)[:, None]) & (index != NO_INDEX)[None, :]
    return tl.sum(tl.where(hit, payload[None, :], tl.zeros_like(payload)[None, :]), axis=1)


@triton.jit
def sortable_bits(value):
    """Map fp32 to int32 so that the integer order is the order of the values; -0.0 and 0.0 become one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


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
