"""The layer's projections (fc, qkv, o, down): matrix products cut by rows and by columns.

A program that owned whole rows would read all of the operand for few rows of weights: with 132 programs, 31 rows of
8 KB against 10 nodes of 8 KB, through an L2 that is no faster than it must be. So ``split`` programs form a group that
owns ``group_rows`` rows, and each of them multiplies its share of the columns::

    partial sums: [groups] [split] [group_rows] [BLOCK_M]   fp32, in the L2

After a barrier each program adds up its own block of rows, part by part in a fixed order, so results do not depend
on timing. A group of one needs no barrier over the grid: its rows are the block that it adds up.
"""

import triton
import triton.language as tl

from .weight_stream import hidden_zero, store_activation, stream_matmul


@triton.jit
def stream_parts(
    x_ptr, x_row_0, x_row_1, mask_m,  # see `weight_stream.stream_matmul`
    region_ptr,  # this program's region: its units one after the other
    partial_ptr, split, group_rows,
    num_chunks,  # in_features / BLOCK_K, of all parts together
    segment, row_size,
    NUM_CTAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply this program's share and leave its partial sums. Fewer programs than parts do several in turn."""
    zero = hidden_zero()
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    num_units = tl.maximum(NUM_CTAS // split, 1) * split
    part_chunks = (num_chunks + split - 1) // split
    for index in tl.range(tl.program_id(0), num_units, NUM_CTAS, disable_licm=True):
        unit = index + zero
        part = unit % split
        first_chunk = part * num_chunks // split
        unit_ptr = region_ptr + unit // NUM_CTAS * part_chunks * group_rows * BLOCK_K
        for n0 in tl.range(0, group_rows, BLOCK_N, disable_licm=True):
            acc = stream_matmul(
                x_ptr, x_row_0, x_row_1, mask_m, unit_ptr + n0 * BLOCK_K, group_rows - n0, group_rows * BLOCK_K,
                first_chunk, (part + 1) * num_chunks // split - first_chunk, segment, row_size,
                True, BLOCK_N, BLOCK_K, BLOCK_M, STAGES,
            )  # fmt: skip
            row = unit * group_rows + n0 + offs_n
            mask = (n0 + offs_n < group_rows)[:, None] & mask_m[None, :]
            tl.store(partial_ptr + row[:, None] * BLOCK_M + offs_m[None, :], acc, mask=mask)


@triton.jit
def sum_parts(partial_ptr, feature, offs_m, mask, split, group_rows, BLOCK_M: tl.constexpr):
    """fp32 [features, BLOCK_M]: the product, from all parts of a group."""
    first = feature // group_rows * (split * group_rows) + feature % group_rows
    place = partial_ptr + first[:, None] * BLOCK_M + offs_m[None, :]
    stride = group_rows * BLOCK_M
    num_parts = split + offs_m[None, :] * 0
    part_0 = tl.load(place, mask=mask, other=0.0)
    part_1 = tl.load(place + stride, mask=mask & (num_parts > 1), other=0.0)
    part_2 = tl.load(place + 2 * stride, mask=mask & (num_parts > 2), other=0.0)
    part_3 = tl.load(place + 3 * stride, mask=mask & (num_parts > 3), other=0.0)
    return (part_0 + part_1) + (part_2 + part_3)


@triton.jit
def finish_rows(
    partial_ptr, split, group_rows, mask_m, scale_ptr, row_factor, bias_ptr, out_ptr, operand_ptr, operand_factor,
    N: tl.constexpr, R: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """fc and qkv: out fp32 [rows, N] is the product, times each row's ``row_factor``, plus the bias.

    With OPERAND also stored, times ``operand_factor`` [BLOCK_M], as operand of the next product.
    """
    zero = hidden_zero()
    offs_m = tl.arange(0, BLOCK_M) + zero
    offs_r = tl.arange(0, BLOCK_R) + zero
    for r0 in tl.range(0, R, BLOCK_R, disable_licm=True):
        feature = tl.program_id(0) * R + r0 + offs_r
        mine = (r0 + offs_r < R) & (feature < N)
        mask = mine[:, None] & mask_m[None, :]
        acc = sum_parts(partial_ptr, feature, offs_m, mask, split, group_rows, BLOCK_M) * row_factor[None, :]
        if SCALED:
            acc *= tl.load(scale_ptr + r0 + offs_r, mask=mine, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + offs_m[None, :] * N + feature[:, None], acc, mask=mask)
        if OPERAND:
            row = offs_m.to(tl.int64)[None, :]
            store_activation(operand_ptr, row, feature[:, None], acc * operand_factor[None, :], mask, N)


@triton.jit
def finish_residual(
    partial_ptr, split, group_rows, mask_m, scale_ptr,
    residual_ptr, residual_row, sum_ptr, operand_ptr, norm_ptr, operand_factor, squares_ptr,
    N: tl.constexpr, R: tl.constexpr, SCALED: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """o and down: add the residual; write the sum (fp32), its squares, and it times the next norm's weight.

    ``operand_factor`` brings the rows of that operand to order one where they are stored as FP8 pairs.
    """
    zero = hidden_zero()
    pid = tl.program_id(0) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    offs_r = tl.arange(0, BLOCK_R) + zero
    squares = tl.zeros([BLOCK_M], tl.float32)
    for r0 in tl.range(0, R, BLOCK_R, disable_licm=True):
        feature = pid * R + r0 + offs_r
        mine = (r0 + offs_r < R) & (feature < N)
        mask = mine[:, None] & mask_m[None, :]
        residual = tl.load(residual_ptr + residual_row[None, :] * N + feature[:, None], mask=mask, other=0.0)
        weight = 1.0
        if HAS_NORM:
            weight = tl.load(norm_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
        acc = sum_parts(partial_ptr, feature, offs_m, mask, split, group_rows, BLOCK_M)
        if SCALED:
            acc *= tl.load(scale_ptr + r0 + offs_r, mask=mine, other=0.0)[:, None]
        acc += residual
        squares += tl.sum(acc * acc, axis=0)
        tl.store(sum_ptr + offs_m[None, :] * N + feature[:, None], acc, mask=mask)
        normed = acc * weight * operand_factor[None, :]
        store_activation(operand_ptr, offs_m.to(tl.int64)[None, :], feature[:, None], normed, mask, N)
    tl.store(squares_ptr + pid * BLOCK_M + offs_m, squares)
