"""A score's weight in whole numbers: device functions for choosing tokens, and the same in PyTorch.

    distance(score) = floor(2**24 min(largest - score, 32))    int32, 0 the most probable
    weight(distance) = 2**44 exp(-distance / 2**24)            int64, relative error below 2e-8; 0 from 31 on

Whole numbers add up the same in any order, so sums of weights equal those of PyTorch on any device. Below 2**19 tokens
they stay within int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FRACTION_BITS = tl.constexpr(24)
"""Of a distance."""
FAR = tl.constexpr(1 << 29)
"""Largest distance, 32 in scores; its weight is 0."""
ONE = tl.constexpr(1 << 44)
"""Weight of the most probable token."""
MAX_VOCAB = 1 << 19
"""Weights of this many tokens might exceed int64."""
_LOG2_E = tl.constexpr(1549082005)  # 2**30 / ln 2
# 1 - 2**-f = f (C1 - f (C2 - f (C3 - ...))), all in units of 2**-32: interpolated at the Chebyshev nodes of [0, 1].
_C1 = tl.constexpr(2977044447)
_C2 = tl.constexpr(1031763206)
_C3 = tl.constexpr(238367376)
_C4 = tl.constexpr(41218952)
_C5 = tl.constexpr(5547538)
_C6 = tl.constexpr(493577)


@triton.jit
def score_distance(score, largest):
    """Return how far fp32 scores lie below ``largest``, their maximum: int32; 0 for equal ones, infinite or not."""
    below = tl.where(score == largest, 0.0, largest - score)
    return (tl.minimum(below, 32.0) * 16777216.0).to(tl.int32)


@triton.jit
def distance_weight(distance):
    """Return int64 weights of int32 distances, strictly falling until shifted: a step of 1 is 128 of the fraction."""
    exponent = distance.to(tl.int64) * _LOG2_E  # base 2, in units of 2**-54
    half_f = (exponent >> 23) & 0x7FFFFFFF
    lost = _C5 - (half_f * _C6 >> 31)
    lost = _C4 - (half_f * lost >> 31)
    lost = _C3 - (half_f * lost >> 31)
    lost = _C2 - (half_f * lost >> 31)
    lost = half_f * (_C1 - (half_f * lost >> 31)) >> 31
    return ((4294967296 - lost) << 12) >> tl.minimum(exponent >> 54, 63)


def score_distance_ref(scores: Tensor) -> Tensor:
    """Return the distance of float32 [vocab] from the largest: int64 [vocab]."""
    largest = scores.max()
    below = torch.where(scores == largest, 0.0, largest - scores)
    return (below.clamp(max=32.0) * (1 << int(FRACTION_BITS.value))).long()


def distance_weight_ref(distances: Tensor) -> Tensor:
    """Return the weights of int64 distances: int64 of the same shape."""
    exponent = distances * int(_LOG2_E.value)
    half_f = (exponent >> 23) & 0x7FFFFFFF
    lost = torch.full_like(exponent, int(_C6.value))
    for coefficient in (_C5, _C4, _C3, _C2, _C1):
        lost = int(coefficient.value) - (half_f * lost >> 31)
    lost = half_f * lost >> 31
    return ((2**32 - lost) << 12) >> (exponent >> 54).clamp(max=63)
