"""The layer's projections (fc, qkv, o, down): matrix products cut by rows and by columns.

A program that owned whole rows would read all of the operand for few rows of weights: with 132 programs, 31 rows of
8 KB against 10 nodes of 8 KB, through an L2 that is hardly faster than the memory. So ``split`` programs form a group
that owns ``group_rows`` rows, and each of them multiplies its split of the columns::

    partial sums: [groups] [splits] [group_rows] [BLOCK_M]   fp32, in the L2

After a barrier each program adds up its own block of rows, split by split in a fixed order, so results do not depend
on timing. A group of one needs no barrier over the grid: its rows are the block that it adds up.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .weight_stream import hidden_zero, store_activation, stream_matmul


class PartialSums(NamedTuple):
    """The partial sums of one projection."""

    ptr: Any
    """fp32 [groups, splits, group_rows, BLOCK_M]."""
    num_splits: Any
    """Programs to a group."""
    group_rows: Any


class Residual(NamedTuple):
    """Rows that a product is added to, and where the sums go."""

    rows: Any
    """fp32 [rows, features]."""
    row: Any
    """[BLOCK_M]: the row of it that belongs to each row of the product."""
    factor: Any
    """fp32 [BLOCK_M]: RMSNorm's factor of that row, read when NORMED_RESIDUAL."""
    norm: Any
    """[features]: RMSNorm's weight, read when NORMED_RESIDUAL."""
    out: Any
    """fp32 [BLOCK_M, features]: the new residual."""
    squares: Any
    """fp32 [programs, BLOCK_M]: each program's part of its sum of squares."""
    next_norm: Any
    """[features]: weight of the RMSNorm that follows, read when HAS_NORM."""


@dataclass(frozen=True)
class ProgramOutputs:
    """Outputs of a projection that each program adds up."""

    features: int
    """Outputs of the projection, of all programs."""
    rows: int
    """Outputs of one program."""
    block: int
    """Outputs that it adds up at a time."""
    scaled: bool
    """Each has a scale: the weights are FP8."""


@triton.jit
def multiply_splits(
    x,  # `weight_stream.Operand`
    region_ptr,  # this program's region: its units one after the other
    sums,  # `PartialSums`
    num_chunks,  # stored chunks of all splits together
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of a stored chunk
    TILE: tl.constexpr,  # `weight_stream.Tile`
):
    """Multiply this program's splits and leave their partial sums: several in turn where there are fewer programs."""
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_M: tl.constexpr = x.mask.shape[0]
    num_splits = sums.num_splits
    group_rows = sums.group_rows
    zero = hidden_zero()
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    num_units = tl.maximum(PROGRAMS // num_splits, 1) * num_splits
    split_chunks = (num_chunks + num_splits - 1) // num_splits
    for index in tl.range(tl.program_id(0), num_units, PROGRAMS, disable_licm=True):
        unit = index + zero
        split = unit % num_splits
        first_chunk = split * num_chunks // num_splits
        unit_ptr = region_ptr + unit // PROGRAMS * split_chunks * group_rows * CHUNK
        for n0 in tl.range(0, group_rows, BLOCK_N, disable_licm=True):
            w_ptr = unit_ptr + n0 * CHUNK
            left = group_rows - n0
            slab = group_rows * CHUNK
            chunks = (split + 1) * num_chunks // num_splits - first_chunk
            acc = stream_matmul(x, w_ptr, left, slab, first_chunk, chunks, True, CHUNK, TILE)
            row = unit * group_rows + n0 + offs_n
            mask = (n0 + offs_n < group_rows)[:, None] & x.mask[None, :]
            tl.store(sums.ptr + row[:, None] * BLOCK_M + offs_m[None, :], acc, mask=mask)


@triton.jit
def add_splits(sums, feature, offs_m, mask):
    """Add up all splits of a group: the product, fp32 [features, BLOCK_M]."""
    BLOCK_M: tl.constexpr = offs_m.shape[0]
    first = feature // sums.group_rows * (sums.num_splits * sums.group_rows) + feature % sums.group_rows
    place = sums.ptr + first[:, None] * BLOCK_M + offs_m[None, :]
    stride = sums.group_rows * BLOCK_M
    num_splits = sums.num_splits + offs_m[None, :] * 0
    split_0 = tl.load(place, mask=mask, other=0.0)
    split_1 = tl.load(place + stride, mask=mask & (num_splits > 1), other=0.0)
    split_2 = tl.load(place + 2 * stride, mask=mask & (num_splits > 2), other=0.0)
    split_3 = tl.load(place + 3 * stride, mask=mask & (num_splits > 3), other=0.0)
    return (split_0 + split_1) + (split_2 + split_3)


@triton.jit
def finish_rows(
    sums,  # `PartialSums`
    mask_m,  # int1 [BLOCK_M]: rows in use
    row_factor,  # fp32 [BLOCK_M]: multiplies each row
    scale_ptr,  # fp32 [rows of this program], read when scaled
    bias_ptr,  # [features], read when HAS_BIAS
    out_ptr,  # fp32 [BLOCK_M, features]
    operand,  # `weight_stream.NextOperand`, written when OPERAND
    OUTPUTS: tl.constexpr,  # `ProgramOutputs`
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Finish fc and qkv: out is the product, times each row's factor, plus the bias."""
    N: tl.constexpr = OUTPUTS.features
    R: tl.constexpr = OUTPUTS.rows
    BLOCK_R: tl.constexpr = OUTPUTS.block
    zero = hidden_zero()
    offs_m = tl.arange(0, mask_m.shape[0]) + zero
    offs_r = tl.arange(0, BLOCK_R) + zero
    for r0 in tl.range(0, R, BLOCK_R, disable_licm=True):
        feature = tl.program_id(0) * R + r0 + offs_r
        mine = (r0 + offs_r < R) & (feature < N)
        mask = mine[:, None] & mask_m[None, :]
        acc = add_splits(sums, feature, offs_m, mask) * row_factor[None, :]
        if OUTPUTS.scaled:
            acc *= tl.load(scale_ptr + r0 + offs_r, mask=mine, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + offs_m[None, :] * N + feature[:, None], acc, mask=mask)
        if OPERAND:
            row = offs_m.to(tl.int64)[None, :]
            store_activation(operand.ptr, row, feature[:, None], acc * operand.factor[None, :], mask, N)


@triton.jit
def finish_residual(
    sums,  # `PartialSums`
    mask_m,  # int1 [BLOCK_M]: rows in use
    scale_ptr,  # fp32 [rows of this program], read when scaled
    bias_ptr,  # [features], read when HAS_BIAS
    residual,  # `Residual`
    operand,  # `weight_stream.NextOperand`
    OUTPUTS: tl.constexpr,  # `ProgramOutputs`
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORMED_RESIDUAL: tl.constexpr,
):
    """Finish o and down: the product plus the residual, as it is and, times the norm's weight, as operand.

    NORMED_RESIDUAL: the residual goes through an RMSNorm of its own first.
    """
    N: tl.constexpr = OUTPUTS.features
    R: tl.constexpr = OUTPUTS.rows
    BLOCK_R: tl.constexpr = OUTPUTS.block
    BLOCK_M: tl.constexpr = mask_m.shape[0]
    zero = hidden_zero()
    pid = tl.program_id(0) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    offs_r = tl.arange(0, BLOCK_R) + zero
    squares = tl.zeros([BLOCK_M], tl.float32)
    for r0 in tl.range(0, R, BLOCK_R, disable_licm=True):
        feature = pid * R + r0 + offs_r
        mine = (r0 + offs_r < R) & (feature < N)
        mask = mine[:, None] & mask_m[None, :]
        added = tl.load(residual.rows + residual.row[None, :] * N + feature[:, None], mask=mask, other=0.0)
        if NORMED_RESIDUAL:
            norm_weight = tl.load(residual.norm + feature, mask=mine, other=0.0).to(tl.float32)
            added *= residual.factor[None, :] * norm_weight[:, None]
        weight = 1.0
        if HAS_NORM:
            weight = tl.load(residual.next_norm + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
        acc = add_splits(sums, feature, offs_m, mask)
        if OUTPUTS.scaled:
            acc *= tl.load(scale_ptr + r0 + offs_r, mask=mine, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
        acc += added
        squares += tl.sum(acc * acc, axis=0)
        tl.store(residual.out + offs_m[None, :] * N + feature[:, None], acc, mask=mask)
        normed = acc * weight * operand.factor[None, :]
        store_activation(operand.ptr, offs_m.to(tl.int64)[None, :], feature[:, None], normed, mask, N)
    tl.store(residual.squares + pid * BLOCK_M + offs_m, squares)
