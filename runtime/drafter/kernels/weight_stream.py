"""The matrix product of the persistent drafter, which reads each program's stream of weights (`packing`).

Weights are the left operand of `tl.dot`, the drafted nodes the right one. In front of FP8 weights the right operand is
a pair of e4m3 numbers for each value (`store_activation`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_ZERO_ASM = tl.constexpr("mov.u32 $0, 0;")


@dataclass(frozen=True)
class Tile:
    """One product: ``block_n`` rows and ``block_k`` columns of weights at a time, ``stages`` of them in flight."""

    block_n: int
    block_k: int
    stages: int


class Operand(NamedTuple):
    """The rows of x in a product: [BLOCK_M] rows, each in one piece or in two.

    A row's chunks before ``segment`` lie from ``row`` on, those from there on from ``next_row`` on.
    """

    ptr: Any
    row: Any
    """int64 [BLOCK_M]: where each row starts, in values."""
    next_row: Any
    """int64 [BLOCK_M]: where its second piece starts."""
    mask: Any
    """int1 [BLOCK_M]: rows in use."""
    segment: Any
    """Stored chunks of the first piece."""
    row_size: Any
    """Values in a stored row."""


class NextOperand(NamedTuple):
    """The operand that a phase leaves for the next product, and the factor of each of its rows."""

    ptr: Any
    factor: Any
    """fp32 [BLOCK_M]: brings rows to order one where they are stored as FP8 pairs."""


@triton.jit
def unaligned_zero():
    """Return 0 of an alignment that the compiler does not know: accesses displaced by it are not widened."""
    if INTERPRETED:
        return 0
    else:
        return tl.inline_asm_elementwise(_ZERO_ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def hidden_zero():
    """Return 0 that the compiler cannot see through.

    Added to the index vectors of a phase, it keeps their address arithmetic inside the phase: hoisted out of the level
    loop, the addresses of all phases together would be live at once and spill.
    """
    if INTERPRETED:
        return 0
    else:
        zero = tl.inline_asm_elementwise(_ZERO_ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        return tl.multiple_of(zero, 4096)


@triton.jit
def round_to_e4m3(value):
    """Return the nearest e4m3 number (ties to even) of fp32 within +-448, still as fp32.

    In arithmetic on fp32, because Triton 3.6 mixes elements up when it widens e4m3 in small tiles.
    """
    bits = value.to(tl.int32, bitcast=True)
    # Keep 3 of 23 mantissa bits.
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    # Below 2**-6 e4m3 is a grid of 2**-9: adding 1.5 * 2**14 leaves just that many bits.
    subnormal = (value + 24576.0) - 24576.0
    return tl.where(tl.abs(value) < 0.015625, subnormal, rounded)


@triton.jit
def store_activation(x_ptr, row, column, value, mask, ROW_SIZE: tl.constexpr):
    """Store fp32 values as operands of the next product: in the model's type, or, in front of FP8 weights, as a pair.

    A pair is two e4m3 numbers, ``value = high + low / 16``: high is the nearest e4m3 (3 bits of mantissa), low 16 times
    what is left, so together they carry about the 8 bits of bf16 and FP8 matrix units multiply weights straight from
    memory. Rows of pairs are stored as [high row][low row]. Values beyond 448 saturate: callers scale rows to order
    one.
    """
    if x_ptr.dtype.element_ty == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        high = round_to_e4m3(value)
        place = x_ptr + row * (2 * ROW_SIZE) + column
        tl.store(place, high.to(tl.float8e4nv), mask=mask)
        tl.store(place + ROW_SIZE, ((value - high) * 16.0).to(tl.float8e4nv), mask=mask)
    else:
        tl.store(x_ptr + row * ROW_SIZE + column, value.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def operand_rows(x_ptr, x_row, row_size):
    """Return the element offsets of the operand's columns: one per row, or high and low side by side for pairs."""
    if x_ptr.dtype.element_ty == tl.float8e4nv:
        high = x_row * 2
        both = tl.reshape(tl.join(high, high + row_size), [2 * x_row.shape[0]])
        return tl.multiple_of(both, 16)  # which the compiler cannot see through join: without it, loads go byte by byte
    else:
        return x_row


@triton.jit
def operand_mask(x_ptr, mask_m):
    """Return the mask of the operand's columns."""
    if x_ptr.dtype.element_ty == tl.float8e4nv:
        both = tl.join(mask_m.to(tl.int32), mask_m.to(tl.int32))
        return tl.reshape(both, [2 * mask_m.shape[0]]) != 0
    else:
        return mask_m


@triton.jit
def operand_dot(w, x, acc):
    """Add one chunk's product. FP8 matrix units round their sums to 14 bits, so each chunk's is added up in fp32."""
    if x.dtype == tl.float8e4nv:
        return acc + tl.dot(w, x)
    else:
        return tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")


@triton.jit
def operand_sum(x_ptr, acc):
    """Bring a product back to one column per row: [BLOCK_N, BLOCK_M]."""
    if x_ptr.dtype.element_ty == tl.float8e4nv:
        high, low = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
        return high + low * 0.0625
    else:
        return acc


@triton.jit
def stream_matmul(
    x,  # `Operand`
    w_ptr,  # this program's region, at its first row of this tile
    num_rows,  # rows of this tile
    slab,  # elements from one stored chunk to the next
    first_chunk,  # of x, in stored chunks
    num_chunks,  # stored chunks
    SEGMENTED: tl.constexpr,  # whether rows of x have a second piece
    CHUNK: tl.constexpr,  # columns of a stored chunk: a multiple of block_k, or a power of two below it
    TILE: tl.constexpr,  # `Tile`
):
    """Multiply this tile of weight rows by the rows of x, fp32 [block_n, BLOCK_M], over ``num_chunks`` stored chunks.

    A step of ``block_k`` columns takes a whole chunk, part of one, or several of them.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    PARTS: tl.constexpr = CHUNK // BLOCK_K if CHUNK > BLOCK_K else 1
    WHOLE: tl.constexpr = BLOCK_K // CHUNK if BLOCK_K > CHUNK else 1
    zero = hidden_zero()
    offs_k = tl.arange(0, BLOCK_K) + zero
    offs_n = tl.arange(0, BLOCK_N) + zero
    w_offs = offs_n[:, None] * CHUNK + offs_k[None, :]
    if WHOLE > 1:
        w_offs = offs_n[:, None] * CHUNK + (offs_k // CHUNK * slab + offs_k % CHUNK)[None, :]
    mask_w = (offs_n < num_rows)[:, None]
    mask_x = operand_mask(x.ptr, x.mask)
    x_start = x.ptr + first_chunk * CHUNK
    first = operand_rows(x.ptr, x.row, x.row_size)
    second = first
    if SEGMENTED:
        second = operand_rows(x.ptr, x.next_row, x.row_size) - x.segment * CHUNK
    acc = tl.zeros([BLOCK_N, mask_x.shape[0]], tl.float32)
    for k in tl.range(0, num_chunks * PARTS // WHOLE, num_stages=TILE.stages):
        x_row = first
        if SEGMENTED:
            x_row = tl.where(first_chunk + k // PARTS < x.segment, first, second)
        w_start = w_ptr + k * (WHOLE * slab)
        if PARTS > 1:
            w_start = w_ptr + k // PARTS * slab + k % PARTS * BLOCK_K
        w = tl.load(w_start + w_offs, mask=mask_w, other=0.0)
        chunk = tl.load(x_start + x_row[None, :] + (k * BLOCK_K + offs_k)[:, None], mask=mask_x[None, :], other=0.0)
        acc = operand_dot(w, chunk, acc)
    return operand_sum(x.ptr, acc)
