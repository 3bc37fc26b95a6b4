"""Rows that become operands of products: embeddings, features and taps, and the factor of their RMSNorm.

    factor[r] = 1 / sqrt(mean(x[r]^2) + eps)

RMSNorm is linear but for this one factor per row. `write_row` and `write_taps` write a row where the next product reads
it, `write_carried_row` one that goes through the head's last RMSNorm first; `norm_factor` has the factor from the sums
of squares that `projections.finish_residual` left, one part of each program. Taps may pass an RMSNorm over all of them
(``input_norm``) or one each (``fc_norm``). In front of FP8 weights they are divided by a number of their own, as pairs
of e4m3 numbers hold values of order one.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .weight_stream import hidden_zero, store_activation


@dataclass(frozen=True)
class RowShape:
    """A row of ``segments`` pieces of ``size`` values each."""

    size: int
    segments: int = 1
    eps: float = 0.0
    """Added to the mean of squares, where a row is normalised."""
    norms: int = 0
    """RMSNorms that `write_taps` applies: none, one over the whole row, or one for each piece."""

    @property
    def block(self) -> int:
        """Power of two that holds a piece."""
        return int(triton.next_power_of_2(self.size))


@triton.jit
def store_row(x, offs, x_ptr, factor_ptr, row, norm_ptr, NORMED: tl.constexpr, SHAPE: tl.constexpr):
    """Store the values of one row, fp32 [block] and 0 beyond its size: as `write_row` does."""
    SIZE: tl.constexpr = SHAPE.size
    mask = offs < SIZE
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + SHAPE.eps)
    tl.store(factor_ptr + row, factor)
    if NORMED:
        x = x * factor * tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    store_activation(x_ptr, row.to(tl.int64), offs, x, mask, SIZE)


@triton.jit
def write_row(source_ptr, x_ptr, factor_ptr, row, norm_ptr, NORMED: tl.constexpr, SHAPE: tl.constexpr):
    """Write one row as an operand, through RMSNorm when NORMED, and its RMSNorm factor."""
    offs = tl.arange(0, SHAPE.block) + hidden_zero()
    x = tl.load(source_ptr + offs, mask=offs < SHAPE.size, other=0.0).to(tl.float32)
    store_row(x, offs, x_ptr, factor_ptr, row, norm_ptr, NORMED, SHAPE)


@triton.jit
def write_rows(source_ptr, source, in_use, x_ptr, factor_ptr, row, norm_ptr, NORMED: tl.constexpr, SHAPE: tl.constexpr):
    """Write rows as `write_row` does one: ``source`` (int64, where each begins), ``in_use`` and ``row`` [rows]."""
    SIZE: tl.constexpr = SHAPE.size
    offs = tl.arange(0, SHAPE.block) + hidden_zero()
    inside = offs < SIZE
    mask = in_use[:, None] & inside[None, :]
    x = tl.load(source_ptr + source[:, None] + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + SHAPE.eps)
    tl.store(factor_ptr + row, factor, mask=in_use)
    if NORMED:
        weight = tl.load(norm_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        x = x * factor[:, None] * weight[None, :]
    store_activation(x_ptr, row.to(tl.int64)[:, None], offs[None, :], x, mask, SIZE)


@triton.jit
def write_carried_row(source_ptr, x_ptr, factor_ptr, row, carry_norm_ptr, norm_ptr, SHAPE: tl.constexpr):
    """Put a row through the RMSNorm of ``carry_norm_ptr`` in its place, then write the result as `write_row` does."""
    offs = tl.arange(0, SHAPE.block) + hidden_zero()
    mask = offs < SHAPE.size
    x = tl.load(source_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SHAPE.size + SHAPE.eps)
    x = x * factor * tl.load(carry_norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(source_ptr + offs, x, mask=mask)
    store_row(x, offs, x_ptr, factor_ptr, row, norm_ptr, True, SHAPE)


@triton.jit
def load_tap(source_ptr, offset_1, offset_2, part, offs, SHAPE: tl.constexpr):
    """Load one piece of a row: fp32, 0 beyond its size. Three lie anywhere, more or fewer one after the other."""
    if SHAPE.segments == 3:  # noqa: SIM108 - this one is decided by the compiler
        start = offset_1 if part == 1 else (offset_2 if part == 2 else 0)
    else:
        start = part * SHAPE.size
    return tl.load(source_ptr + start + offs, mask=offs < SHAPE.size, other=0.0).to(tl.float32)


@triton.jit
def load_normed_tap(source_ptr, offset_1, offset_2, part, offs, norm_ptr, row_factor, SHAPE: tl.constexpr):
    """Load a tap through the RMSNorms of ``norm_ptr`` [all pieces]; ``row_factor`` is that of the whole row."""
    SIZE: tl.constexpr = SHAPE.size
    x = load_tap(source_ptr, offset_1, offset_2, part, offs, SHAPE)
    if SHAPE.norms > 0:
        factor = row_factor
        if SHAPE.norms > 1:
            factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + SHAPE.eps)
        x = x * factor * tl.load(norm_ptr + part * SIZE + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    return x


@triton.jit
def write_taps(
    source_ptr, offset_1, offset_2, x_ptr, row, factor_ptr, norm_ptr, SHAPE: tl.constexpr, SCALED: tl.constexpr
):
    """Write one row of pieces as an operand; SCALED: divided by ``max|row| / 256``, which is stored at ``factor_ptr``.

    ``offset_1`` and ``offset_2``: where the second of three pieces and the third begin, in values from the first.
    ``norm_ptr`` [segments * size]: weights of the RMSNorms, read when there are any.
    """
    SEGMENTS: tl.constexpr = SHAPE.segments
    SIZE: tl.constexpr = SHAPE.size
    BLOCK: tl.constexpr = SHAPE.block
    offs = tl.arange(0, BLOCK) + hidden_zero()
    row_factor = 1.0
    if SHAPE.norms == 1:
        squares = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(SEGMENTS):
            x = load_tap(source_ptr, offset_1, offset_2, part, offs, SHAPE)
            squares += x * x
        row_factor = tl.rsqrt(tl.sum(squares, axis=0) / (SEGMENTS * SIZE) + SHAPE.eps)
    divisor = 1.0
    if SCALED:
        peak = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(SEGMENTS):
            x = load_normed_tap(source_ptr, offset_1, offset_2, part, offs, norm_ptr, row_factor, SHAPE)
            peak = tl.maximum(peak, tl.abs(x))
        divisor = tl.max(peak, axis=0) / 256.0
        divisor = tl.where(divisor > 0, divisor, 1.0)
        tl.store(factor_ptr, divisor)
    for part in tl.static_range(SEGMENTS):
        x = load_normed_tap(source_ptr, offset_1, offset_2, part, offs, norm_ptr, row_factor, SHAPE) / divisor
        store_activation(x_ptr, row.to(tl.int64), part * SIZE + offs, x, offs < SIZE, SEGMENTS * SIZE)


@triton.jit
def norm_factor(squares_ptr, mask_m, PROGRAMS: tl.constexpr, SHAPE: tl.constexpr):
    """Compute RMSNorm's factor of each row, fp32 [BLOCK_M], from partial sums of squares [PROGRAMS, BLOCK_M]."""
    BLOCK_M: tl.constexpr = mask_m.shape[0]
    CHUNK: tl.constexpr = 4096 // BLOCK_M
    zero = hidden_zero()
    offs_p = tl.arange(0, CHUNK) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.static_range(0, PROGRAMS, CHUNK):
        mask = ((first + offs_p) < PROGRAMS)[:, None] & mask_m[None, :]
        part = tl.load(squares_ptr + (first + offs_p)[:, None] * BLOCK_M + offs_m[None, :], mask=mask, other=0.0)
        total += tl.sum(part, axis=0)
    return tl.rsqrt(total / SHAPE.size + SHAPE.eps)
