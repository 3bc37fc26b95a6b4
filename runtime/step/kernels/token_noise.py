"""Noise for every id at a position, and the race in which it chooses a token: device functions, and twins in PyTorch.

    bits(key, id)   = output number id + 1 of SplitMix64 that was seeded with key, its upper 53 bits
    v               = max(bits, 1) / 2**53                     uniform, from 2**-53 to 1 - 2**-53
    noise(key, id)  = floor(2**24 ln(-ln(1 - v)))              int32
    token           = lowest id of those with the smallest  distance(id) + noise(key, id)

-ln(1 - v) is exponentially distributed, and of exponential variables divided by weights the smallest is that of an id
with a probability in proportion to its weight (an exponential race; with the signs turned, the Gumbel-max trick). With
``distance`` in units of 2**-24 below the largest score (`token_weights`) that is the softmax of the scores, each
probability to within 5e-7 of itself. Only ids that the cuts leave take part, none from a distance of 32 on.

A key is a number of 64 bits for (seed, place of the answer, position): `api.sampling.noise_keys`. The race sums nothing
over a vocabulary, so a logit that was rounded differently changes the token only where two ids nearly tie.

All is integer arithmetic but the two logarithms: products and sums of float32 in one order, each rounded (IEEE 754).
Kernels that call these functions are launched with `NO_FUSION`, as a fused product and sum would round once. So every
device, the interpreter and PyTorch give the same noise to the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .token_weights import FAR

NOBODY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""The mark of an id that takes no part."""
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-53)
_LEAST_MANTISSA = tl.constexpr(0x3F3504F3)
"""Bits of the float32 nearest to sqrt(1/2): mantissas lie from it to its double."""
_LN_2 = tl.constexpr(0.693147182464599609375)
_LN_2_FIXED = tl.constexpr(11629080)  # 2**24 ln 2
# ln(1 + f) / f for f from sqrt(1/2) - 1 to sqrt(2) - 1: interpolated at Chebyshev nodes; float32 numbers.
_C0 = tl.constexpr(0.9999999403953552)
_C1 = tl.constexpr(-0.5000036358833313)
_C2 = tl.constexpr(0.33335113525390625)
_C3 = tl.constexpr(-0.24970071017742157)
_C4 = tl.constexpr(0.19898565113544464)
_C5 = tl.constexpr(-0.17247013747692108)
_C6 = tl.constexpr(0.1623418927192688)
_C7 = tl.constexpr(-0.10134056955575943)


@triton.jit
def _split(x):
    """Split positive fp32 into (f, exponent) with x = (1 + f) 2**exponent, and ln(1 + f) / f."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _LEAST_MANTISSA) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    slope = _C7 * f + _C6
    slope = slope * f + _C5
    slope = slope * f + _C4
    slope = slope * f + _C3
    slope = slope * f + _C2
    slope = slope * f + _C1
    return f, exponent, slope * f + _C0


@triton.jit
def token_noise(key, ids):
    """Return the noise of int32 ``ids`` under an int64 key: int32."""
    bits = key.to(tl.uint64) + (ids.to(tl.uint64) + 1) * _STEP
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    bits = tl.maximum(((bits ^ (bits >> 31)) >> 11).to(tl.int64), 1)
    # Both of v and 1 - v have all bits that fp32 has.
    v = bits.to(tl.float32) * _UNIT
    f, exponent, slope = _split((9007199254740992 - bits).to(tl.float32) * _UNIT)
    exponential = tl.where(exponent == 0, v * slope, (0 - exponent).to(tl.float32) * _LN_2 - f * slope)
    f, exponent, slope = _split(exponential)
    return exponent * _LN_2_FIXED + tl.floor(f * slope * 16777216.0).to(tl.int32)


@triton.jit
def token_marks(distance, key, ids, takes_part):
    """Return the marks that the race compares, the smallest wins: distance plus noise above, the id below; int64."""
    mark = (distance + token_noise(key, ids)).to(tl.int64) * 4294967296 + ids
    return tl.where(takes_part & (distance < FAR), mark, NOBODY)


def token_noise_ref(key: int, ids: Tensor) -> Tensor:
    """Definition of `token_noise`: int64 of the shape of int64 ``ids``; ``key`` from -2**63 to 2**63 - 1."""
    bits = key + (ids + 1) * _signed(_STEP)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)
    bits = _shifted(bits ^ _shifted(bits, 31), 11)
    bits = bits.clamp(min=1)
    v = bits.float() * 2.0**-53
    f, exponent, slope = _split_ref((2**53 - bits).float() * 2.0**-53)
    exponential = torch.where(exponent == 0, v * slope, (-exponent).float() * _LN_2.value - f * slope)
    f, exponent, slope = _split_ref(exponential)
    return exponent.long() * int(_LN_2_FIXED.value) + (f * slope * 2.0**24).floor().long()


def race_ref(distances: Tensor, key: int, takes_part: Tensor) -> int:
    """Definition of the race: int64 [vocab] distances, bool [vocab], at least one of them true and below `FAR`."""
    ids = (takes_part & (distances < int(FAR.value))).nonzero()[:, 0]
    marks = (distances[ids] + token_noise_ref(key, ids)) << 32
    return int((marks + ids).min()) & 0xFFFFFFFF


def _split_ref(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bits = x.view(torch.int32)
    exponent = (bits - int(_LEAST_MANTISSA.value)) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    slope = torch.full_like(f, _C7.value)
    for coefficient in (_C6, _C5, _C4, _C3, _C2, _C1, _C0):
        slope = slope * f + float(coefficient.value)
    return f, exponent, slope


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift int64 to the right as if it had no sign."""
    return (bits >> count) & ((1 << 64 - count) - 1)


def _signed(constant: tl.constexpr) -> int:
    return int(constant.value) - (1 << 64)
