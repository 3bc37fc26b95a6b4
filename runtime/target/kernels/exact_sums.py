"""Sums whose bits do not depend on their order, so not on tiles, warps or layouts.

Non-negative numbers are rounded to integers in units of a power of two that their largest one decides, so that their
sum stays below 2^30; integers add up to the same whatever the order. A number is off by at most 2^-(30 - log2 n) of
the largest of n, where fp32 addition is off by 2^-24 of the sum at every step.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _bits(size):
    """Return the bits of a number, so that ``size`` of them sum to at most 2^30."""
    return 30 - (size - 1).bit_length()


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent as fp32, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_sum(x, AXIS: tl.constexpr):
    """Sum non-negative fp32 values along an axis of at most 2^20 places; not finite where one of them is not."""
    SIZE: tl.constexpr = x.shape[AXIS]
    BITS: tl.constexpr = _bits(SIZE)
    largest = tl.max(x, AXIS)
    exponent = largest.to(tl.int32, bitcast=True) >> 23  # the largest is below 2^(exponent - 126)
    shift = tl.minimum(BITS + 126 - exponent, 126)
    units = tl.fma(x, tl.expand_dims(power_of_two(shift), AXIS).broadcast_to(x.shape), 0.5).to(tl.int32)
    total = tl.sum(units, AXIS).to(tl.float32) * power_of_two(-shift)
    return tl.where(exponent == 255, largest, total)
