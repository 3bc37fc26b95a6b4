"""The products of a target's layer as kernels: a row's result has the same bits whatever stands beside it.

``out[r, n] = sum over k of w[n, k] x[r, k]``: weights are the wide operand of the matrix instructions, rows the narrow
one, so that one row and a hundred take the same instructions. What decides bits is a constant of shape and type: K is
cut into `ProductShape.splits` of `ProductShape.split_size`, each split is summed in order of k by one accumulator,
the splits are added in order. Tiles, warps, stages and who sums which split decide nothing:

* with few tiles each split has a program of its own. When all are done, each adds all splits of its share of the rows
  (``cooperative``), in order; or, where programs cannot wait for one another, the one that is done last adds them all;
* with many (``sums_all_splits``) a program sums all splits of its tile, one after another.

Programs that wait for one another have numbers that follow one another, and a GPU begins programs by number: those that
a waiting one needs have begun, or are the next to begin.

Rows of w that belong together, gate and up or both halves of a head, share a tile: `PAIRED` of the one, then as many of
the other. A thread's part of a product of 16 rows is row r and row r + 8, so a pair is in one thread's hands.

Weights in FP8 are widened to the rows' type, exactly but for a power of two, on their way into the matrix instructions.
A row's scale multiplies its whole sum; scales of 128 columns multiply the sum of each 128 columns, which is then added.

A layer's RMSNorms are folded in: who writes the residual also writes ``residual * gain`` and, for every
`SQUARES_GROUP` columns, the sum of its squares; the product that reads them multiplies by the row's factor at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import SCALE_BLOCK
from .exact_sums import exact_sum
from .machine import let_next_begin, prefetch, wait_for_previous

SQUARES_GROUP = 64
"""Columns of the residual whose squares are summed together."""
_GROUP = tl.constexpr(SQUARES_GROUP)
PAIRED = 8
"""Rows of one kind that follow one another in a tile of pairs."""
_PAIRED = tl.constexpr(PAIRED)
_SCALED = tl.constexpr(SCALE_BLOCK)
LIFT = 2.0**60
"""Factor of bf16 rows that FP8 weights multiply, which are 2^120 too small: operands and sums keep their ranges."""
_LIFT = tl.constexpr(LIFT)


@dataclass(frozen=True)
class ProductShape:
    """Constants that decide the bits of a product; ``size`` and ``depth`` are N and K.

    ``groups``: scales of a row of FP8 weights, 0 for other weights. ``fp4_rows``: rows of a whole `Mxfp4Weight`, of
    which the product takes some; 0 for other weights.
    """

    size: int
    depth: int
    splits: int
    split_size: int
    precision: str
    groups: int = 0
    fp4_rows: int = 0

    @property
    def packed(self) -> int:
        """Weights in an element of w: FP8 and MXFP4 weights are read by words."""
        return 8 if self.fp4_rows else 4 if self.groups else 1


@dataclass(frozen=True)
class ProductTiles:
    """Tiling; never changes results: rows of w, columns of a step, rows of x, warps, stages, and who sums the splits.

    ``ahead``: columns of w that a program asks for before it may read x. ``tma``: w and x are copied by descriptors
    (TMA), without threads' registers and instructions, which bound products of many rows. ``waits``: `_ended` waits.
    ``max_registers`` of a thread, so that more programs share a multiprocessor; None: as many as a compiler takes.
    """

    block_n: int
    block_k: int
    block_rows: int
    num_warps: int
    num_stages: int
    sums_all_splits: bool = False
    ahead: int = 0
    cooperative: bool = False
    tma: bool = False
    waits: bool = False
    max_registers: int | None = None


class SplitScratch(NamedTuple):
    """Sums of splits, which other programs add, and counters of finished splits and of readers, 0 between launches."""

    sums: Tensor
    finished: Tensor


class Operands(NamedTuple):
    """Rows and a weight, what copies their tiles (descriptors with ``tma``), and the weight's scales."""

    x: Tensor
    w: Tensor
    x_tiles: Any
    w_tiles: Any
    scales: Tensor | None


class Tap(NamedTuple):
    """Rows that the residual is copied to, and their distance in elements."""

    rows: Tensor
    stride: int


class FactorArgs(NamedTuple):
    """Arguments of a row's norm factor: sums of squares [rows, groups], and numbers of the norm."""

    squares: Tensor
    eps: float
    unshrink: float


class HeadArgs(NamedTuple):
    """Arguments that turn a row of q, k, v into rotated queries and rows of the cache."""

    bias: Tensor
    norm_q: Tensor
    norm_k: Tensor
    norm_eps: float
    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    kv_rows: Tensor
    query: Tensor
    key_rows: Tensor
    value_rows: Tensor
    stride_slot: int
    stride_head: int


@dataclass(frozen=True)
class HeadShape:
    """Heads of q, k, v as the kernel is compiled for them."""

    heads: int
    kv_heads: int
    head_dim: int
    half_block: int
    has_norms: bool


@triton.jit
def place(rows, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Return a program's blocks of rows and of w, split, and rows: splits first, then rows, that share w in the L2."""
    SPLITS: tl.constexpr = 1 if TILES.sums_all_splits else SHAPE.splits
    blocks = tl.cdiv(rows, TILES.block_rows)
    at = tl.program_id(0) // SPLITS
    block, tile, split = at % blocks, at // blocks, tl.program_id(0) % SPLITS
    return block, tile, split, block * TILES.block_rows + tl.arange(0, TILES.block_rows)


@triton.jit
def _own_rows(block, split, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Return the rows whose result this program writes, if it does."""
    if TILES.cooperative:
        SHARE: tl.constexpr = TILES.block_rows // SHAPE.splits
        return block * TILES.block_rows + split * SHARE + tl.arange(0, SHARE)
    else:
        return block * TILES.block_rows + tl.arange(0, TILES.block_rows)


@triton.jit
def _is_even(SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Report whether all steps are whole, of FP8 weights with a scale a row: instructions bound their product."""
    return SHAPE.groups == 1 and SHAPE.depth % SHAPE.split_size == 0 and SHAPE.split_size % TILES.block_k == 0


@triton.jit
def _weights(w_at, n_inside, k, stop, SHAPE: tl.constexpr, TILES: tl.constexpr):
    if _is_even(SHAPE, TILES):
        return tl.load(w_at, mask=n_inside[:, None], other=0)
    else:
        return tl.load(w_at, mask=n_inside[:, None] & (k < stop)[None, :], other=0)


@triton.jit
def _columns(x_at, inside, k, stop, SHAPE: tl.constexpr, TILES: tl.constexpr):
    if _is_even(SHAPE, TILES):
        return tl.load(x_at, mask=inside[None, :], other=0.0)
    else:
        return tl.load(x_at, mask=inside[None, :] & (k < stop)[:, None], other=0.0)


@triton.jit
def _half(words, place: tl.constexpr, kind: tl.constexpr):
    return (words >> 16 * place).to(tl.uint16).to(kind, bitcast=True)


@triton.jit
def _widened(words, kind: tl.constexpr):
    """Widen FP8 weights [rows, words] to another type [rows, 4 * words], in their own order (`Fp8Weight`).

    Sign, exponent and mantissa move to their places; nothing is multiplied. As the exponent's bias stays e4m3's, bf16
    numbers are 2^120 and fp16 numbers 2^8 too small, subnormals too: `row_scales` and rows make up for it.
    """
    words = words.to(tl.uint32, bitcast=True)
    if kind == tl.bfloat16:
        first = words & 0x87F087F0
        other = (words << 4 & 0x80F080F0) | (words >> 4 & 0x07000700)
    else:
        tl.static_assert(kind == tl.float16)
        first = (words & 0x80008000) | (words << 3 & 0x3F803F80)
        other = (words << 4 & 0x80008000) | (words << 7 & 0x07800780) | (words >> 1 & 0x38003800)
    a, c = _half(first, 0, kind), _half(first, 1, kind)
    b, d = _half(other, 0, kind), _half(other, 1, kind)
    # Of 16 columns word t has columns 2 t and 2 t + 1, a and c, and 8 columns on, b and d.
    SIZE: tl.constexpr = words.shape[0]
    apart = tl.join(tl.join(a, c), tl.join(b, d))
    apart = tl.permute(tl.reshape(apart, (SIZE, words.shape[1] // 4, 4, 2, 2)), (0, 1, 4, 2, 3))
    return tl.reshape(apart, (SIZE, 4 * words.shape[1]))


@triton.jit
def _scaled(pairs, scale, kind: tl.constexpr):
    """Return both numbers of each pair, which lack a factor 2^126, times 2^(scale - 127) without it."""
    if kind == tl.bfloat16:
        # Both at once, and numbers below the normal ones as they are; minus zero is added.
        times: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
        pairs = tl.inline_asm_elementwise(times, "=r,r,r", [pairs, scale * 0x800080], tl.uint32, is_pure=True, pack=1)
        return tl.join(_half(pairs, 0, kind), _half(pairs, 1, kind))
    else:
        factor = (scale << 23).to(tl.float32, bitcast=True)
        first, second = (pairs << 16).to(tl.float32, bitcast=True), (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.join((first * factor).to(kind), (second * factor).to(kind))


@triton.jit
def _widened_fp4(words, scale_ptr, n, n_inside, at, kind: tl.constexpr, SHAPE: tl.constexpr):
    """Widen MXFP4 weights [rows, words] from column ``at`` on to [rows, 8 * words], as `Mxfp4Weight` orders them."""
    SIZE: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    FOURS: tl.constexpr = WORDS // 16
    scale_at = scale_ptr + at // 128 * SHAPE.fp4_rows + n
    scales = tl.load(scale_at, mask=n_inside, other=0)
    if FOURS == 2:
        more = tl.load(scale_at + SHAPE.fp4_rows, mask=n_inside & (at + 128 < SHAPE.depth), other=0)
        scales = tl.join(scales, more)
    else:
        scales = scales[:, None]
    scales = scales.to(tl.uint32, bitcast=True)
    # Views of loads alone, so that a compiler loads all of it as instructions take it.
    scale = tl.join(tl.join(scales & 255, scales >> 16 & 255), tl.join(scales >> 8 & 255, scales >> 24))
    scale = tl.broadcast_to(tl.reshape(scale, (SIZE, 4 * FOURS, 1)), (SIZE, 4 * FOURS, 4))
    scale = tl.reshape(scale, (SIZE, WORDS))
    words = words.to(tl.uint32, bitcast=True)
    a = _scaled(words & 0x81C081C0, scale, kind)
    # Masked twice, as the interpreter shifts signs in.
    b = _scaled((words >> 6 & 0x03FFFFFF | words << 26) & 0x81C081C0, scale, kind)
    c = _scaled(words << 4 & 0x81C081C0, scale, kind)
    d = _scaled((words << 6 & 0x80C080C0) | (words >> 2 & 0x01000100), scale, kind)
    # Of 32 columns word t has columns 2 t and 2 t + 1 in a, and 8, 16 and 24 columns on in b, c, d.
    apart = tl.join(tl.join(a, b), tl.join(c, d))
    apart = tl.permute(tl.reshape(apart, (SIZE, WORDS // 4, 4, 2, 2, 2)), (0, 1, 5, 4, 2, 3))
    return tl.reshape(apart, (SIZE, 8 * WORDS))


@triton.jit
def _ended(acc, TILES: tl.constexpr):
    """Return a sum once its products have ended, as its value is read in the loop.

    On sm_90 products run on while a loop goes on, and read widened weights from registers. Triton 3.6 to 3.8 write the
    next step's weights into them before all of these products have ended (its issue 9433).
    """
    if TILES.waits:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def _step(w, x, acc, scale_ptr, n, n_inside, at, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Add the product of the columns of a step, from column ``at`` on, to ``acc``."""
    if SHAPE.fp4_rows > 0:
        w = _widened_fp4(w, scale_ptr, n, n_inside, at, x.dtype, SHAPE)
        return _ended(tl.dot(w, x, acc, input_precision=SHAPE.precision), TILES)
    elif SHAPE.groups == 0:
        return tl.dot(w, x, acc, input_precision=SHAPE.precision)
    elif SHAPE.groups == 1:
        return _ended(tl.dot(_widened(w, x.dtype), x, acc), TILES)
    else:
        tl.static_assert(TILES.block_k == _SCALED)
        scale = tl.load(scale_ptr + n.to(tl.int64) * SHAPE.groups + at // _SCALED, mask=n_inside, other=0.0)
        return tl.fma(tl.broadcast_to(scale[:, None], acc.shape), tl.dot(_widened(w, x.dtype), x), acc)


@triton.jit
def sum_split(operands, row, inside, n, n_inside, split, begun, acc, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Add a split's columns from ``begun`` on to ``acc`` [block_n, block_rows]."""
    k = tl.arange(0, TILES.block_k)
    element = tl.arange(0, TILES.block_k // SHAPE.packed)
    start = split * SHAPE.split_size
    stop = tl.minimum(start + SHAPE.split_size, SHAPE.depth)
    w_at = operands.w + n.to(tl.int64)[:, None] * (SHAPE.depth // SHAPE.packed) + element[None, :]
    x_at = operands.x + row.to(tl.int64)[None, :] * SHAPE.depth + k[:, None]
    for at in tl.range(start + begun, stop, TILES.block_k, num_stages=TILES.num_stages):
        first = at // SHAPE.packed
        w = _weights(w_at + first, n_inside, first + element, stop // SHAPE.packed, SHAPE, TILES)
        x = _columns(x_at + at, inside, at + k, stop, SHAPE, TILES)
        acc = _step(w, x, acc, operands.scales, n, n_inside, at, SHAPE, TILES)
    return acc


@triton.jit
def _tma_split(
    operands, row, n, n_inside, second, split, SHAPE: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr
):
    """Multiply a split by descriptors: rows of w from the first of ``n`` on, of pairs as many from ``second`` on."""
    row_0, first = tl.min(row, 0), tl.min(n, 0)
    ROWS: tl.constexpr = TILES.block_rows
    start = split * SHAPE.split_size
    stop = tl.minimum(start + SHAPE.split_size, SHAPE.depth)
    if PAIRS and SHAPE.groups == 0:
        one = tl.zeros([TILES.block_n // 2, ROWS], tl.float32)
        two = tl.zeros([TILES.block_n // 2, ROWS], tl.float32)
        for at in tl.range(start, stop, TILES.block_k, num_stages=TILES.num_stages):
            x = operands.x_tiles.load([row_0, at]).T
            one = tl.dot(operands.w_tiles.load([first, at]), x, one, input_precision=SHAPE.precision)
            two = tl.dot(operands.w_tiles.load([second, at]), x, two, input_precision=SHAPE.precision)
        return _interleaved(one, two)
    else:
        # Two products of FP8 weights in a step would wait for one another.
        acc = tl.zeros([n.shape[0], ROWS], tl.float32)
        for at in tl.range(start, stop, TILES.block_k, num_stages=TILES.num_stages):
            x = operands.x_tiles.load([row_0, at]).T
            w = operands.w_tiles.load([first, at // SHAPE.packed])
            if PAIRS:
                w = _interleaved(w, operands.w_tiles.load([second, at // SHAPE.packed]))
            acc = _step(w, x, acc, operands.scales, n, n_inside, at, SHAPE, TILES)
        return acc


@triton.jit
def ask_ahead(w_ptr, n, n_inside, k0, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Have columns from ``k0`` on brought into the L2."""
    if TILES.ahead > 0:
        LINE: tl.constexpr = SHAPE.packed * 128 * 8 // w_ptr.dtype.element_ty.primitive_bitwidth
        AHEAD: tl.constexpr = TILES.ahead
        lines = k0 + tl.arange(0, AHEAD // LINE) * LINE
        # Beyond the matrix the first line is asked for again.
        at = n.to(tl.int64)[:, None] * (SHAPE.depth // SHAPE.packed) + lines[None, :] // SHAPE.packed
        prefetch(w_ptr + tl.where(n_inside[:, None] & (lines < SHAPE.depth)[None, :], at, 0))


@triton.jit
def plus(x, y):
    """Add x and y. Where x is a product of one step, a compiler makes y the start of its sum if it sees an addition."""
    return tl.fma(x, tl.full(x.shape, 1.0, tl.float32), y)


@triton.jit
def _split_at(scratch, split, row, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Return where rows of a split of a program's tile lie until they are added: pointers to fp32 [block_n, rows]."""
    tile = tl.program_id(0) // SHAPE.splits
    SIZE: tl.constexpr = TILES.block_n * TILES.block_rows
    i = (row % TILES.block_rows)[None, :] * TILES.block_n + tl.arange(0, TILES.block_n)[:, None]
    return scratch.sums + (tile.to(tl.int64) * SHAPE.splits + split) * SIZE + i


@triton.jit
def _load_split(scratch, split, row, inside, SHAPE: tl.constexpr, TILES: tl.constexpr):
    # From the L2: what other programs wrote.
    at = _split_at(scratch, split, row, SHAPE, TILES)
    return tl.load(at, mask=inside[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def _whole(scratch, acc, scales, row, inside, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Sum a tile for the rows that this program writes, times `row_scales`: splits, two or four, in order.

    All are on their way before the first is added.
    """
    if not (TILES.sums_all_splits or SHAPE.splits == 1):
        tl.static_assert(SHAPE.splits == 2 or SHAPE.splits == 4)
        first = _load_split(scratch, 0, row, inside, SHAPE, TILES)
        second = _load_split(scratch, 1, row, inside, SHAPE, TILES)
        if SHAPE.splits == 4:
            third = _load_split(scratch, 2, row, inside, SHAPE, TILES)
            fourth = _load_split(scratch, 3, row, inside, SHAPE, TILES)
            acc = ((first + second) + third) + fourth
        else:
            acc = first + second
    return acc * scales[:, None] if SHAPE.groups > 0 else acc


@triton.jit
def row_scales(operands, n, n_inside, SHAPE: tl.constexpr):
    """Return the factor of sums of `_widened` weights: a row's scale if `_step` has applied none, a power of two."""
    POWER: tl.constexpr = _LIFT if operands.x.dtype.element_ty == tl.bfloat16 else 256.0
    if SHAPE.groups == 1:
        return tl.load(operands.scales + n, mask=n_inside, other=0.0) * POWER
    else:
        return tl.full([n.shape[0]], POWER, tl.float32)


@triton.jit
def _may_end(scratch, acc, row, inside, has_own, SHAPE: tl.constexpr, TILES: tl.constexpr):
    """Leave a split, and report whether this program goes on to write rows: all splits can be read then.

    A counter's low byte counts splits that are left, the next one programs that have seen that all are.
    """
    if TILES.sums_all_splits or SHAPE.splits == 1:
        return True
    else:
        SPLITS: tl.constexpr = SHAPE.splits
        at = scratch.finished + tl.program_id(0) // SPLITS
        tl.store(_split_at(scratch, tl.program_id(0) % SPLITS, row, SHAPE, TILES), acc, mask=inside[None, :])
        tl.debug_barrier()
        if TILES.cooperative:
            if has_own:
                found = tl.atomic_add(at, 1, sem="acq_rel") + 1
                while found & 255 < SPLITS:
                    found = tl.atomic_add(at, 0, sem="acquire")
                tl.debug_barrier()
                if tl.atomic_add(at, 256, sem="relaxed") >> 8 == SPLITS - 1:
                    tl.store(at, 0)
            elif tl.atomic_add(at, 257, sem="release") >> 8 == SPLITS - 1:
                tl.store(at, 0)
            return has_own
        else:
            is_last = tl.atomic_add(at, 1, sem="acq_rel") == SPLITS - 1
            if is_last:
                tl.store(at, 0)
            return is_last


@triton.jit
def begin(operands, n, n_inside, split, SHAPE: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr):
    """Wait for the kernels before, with the first weights on their way; `product` goes on with them.

    Between both a kernel loads what it needs at its end.
    """
    if TILES.sums_all_splits or TILES.tma:
        if OVERLAP:
            ask_ahead(operands.w, n, n_inside, split * SHAPE.split_size, SHAPE, TILES)
        wait_for_previous(OVERLAP)
        return n
    else:
        k = split * SHAPE.split_size // SHAPE.packed + tl.arange(0, TILES.block_k // SHAPE.packed)
        stop = tl.minimum((split + 1) * SHAPE.split_size, SHAPE.depth) // SHAPE.packed
        w_at = operands.w + n.to(tl.int64)[:, None] * (SHAPE.depth // SHAPE.packed) + k[None, :]
        w = _weights(w_at, n_inside, k, stop, SHAPE, TILES)
        if OVERLAP:
            ask_ahead(operands.w, n, n_inside, split * SHAPE.split_size + TILES.block_k, SHAPE, TILES)
        wait_for_previous(OVERLAP)
        return w


@triton.jit
def product(
    first_weights,
    operands,
    row,
    inside,
    n,
    n_inside,
    second,
    split,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Multiply a tile, [block_n, block_rows], or this program's split of it: `_may_end` and `_whole` end it.

    ``n``: the tile's rows of w; of PAIRS those of the other kind begin at ``second``.
    """
    if TILES.tma:
        acc = _tma_split(operands, row, n, n_inside, second, split, SHAPE, TILES, PAIRS)
        if TILES.sums_all_splits:
            for each in tl.range(1, SHAPE.splits):
                more = _tma_split(operands, row, n, n_inside, second, each, SHAPE, TILES, PAIRS)
                acc = plus(more, acc)
    elif TILES.sums_all_splits:
        acc = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
        acc = sum_split(operands, row, inside, n, n_inside, 0, 0, acc, SHAPE, TILES)
        for each in tl.range(1, SHAPE.splits):
            none = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
            acc = plus(sum_split(operands, row, inside, n, n_inside, each, 0, none, SHAPE, TILES), acc)
    else:
        acc = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
        k = split * SHAPE.split_size + tl.arange(0, TILES.block_k)
        stop = tl.minimum((split + 1) * SHAPE.split_size, SHAPE.depth)
        x = _columns(operands.x + row.to(tl.int64)[None, :] * SHAPE.depth + k[:, None], inside, k, stop, SHAPE, TILES)
        acc = _step(first_weights, x, acc, operands.scales, n, n_inside, split * SHAPE.split_size, SHAPE, TILES)
        acc = sum_split(operands, row, inside, n, n_inside, split, TILES.block_k, acc, SHAPE, TILES)
    return acc


@triton.jit
def split_pairs(acc):
    """Take a tile [block_n, block_rows] apart into both products of each pair, [block_n / 2, block_rows] each."""
    SIZE: tl.constexpr = acc.shape[0] // 2
    ROWS: tl.constexpr = acc.shape[1]
    apart = tl.permute(tl.reshape(acc, (SIZE // _PAIRED, 2, _PAIRED, ROWS)), (0, 2, 3, 1))
    first, second = tl.split(apart)
    return tl.reshape(first, (SIZE, ROWS)), tl.reshape(second, (SIZE, ROWS))


@triton.jit
def _interleaved(first, second):
    """Join both products of each pair, as `split_pairs` takes them apart."""
    SIZE: tl.constexpr = first.shape[0]
    ROWS: tl.constexpr = first.shape[1]
    both = tl.join(
        tl.reshape(first, (SIZE // _PAIRED, _PAIRED, ROWS)), tl.reshape(second, (SIZE // _PAIRED, _PAIRED, ROWS))
    )
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * SIZE, ROWS))


@triton.jit
def own_pair(i):
    """Return the pair of a tile that its row i is of, and whether it is the second of both."""
    return i // (2 * _PAIRED) * _PAIRED + i % _PAIRED, i // _PAIRED % 2


@triton.constexpr_function
def _block_of(count):
    """Return the power of two, at least 2, that ``count`` places fit in."""
    return max(2, 1 << (count - 1).bit_length())


@triton.jit
def load_squares(factor, row, inside, DEPTH: tl.constexpr):
    """Load the sums of squares of some rows, [block_rows, groups]."""
    count: tl.constexpr = (DEPTH + _GROUP - 1) // _GROUP
    GROUPS: tl.constexpr = _block_of(count)
    group = tl.arange(0, GROUPS)
    at = row.to(tl.int64)[:, None] * count + group[None, :]
    return tl.load(factor.squares + at, mask=inside[:, None] & (group < count)[None, :], other=0.0)


@triton.jit
def norm_factor(squares, eps, unshrink, DEPTH: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) of rows, times the inverse of what shrank the gain: fp32 [block_rows]."""
    return tl.rsqrt(exact_sum(squares, 1) / DEPTH + eps) * unshrink


@triton.jit
def put_residual(value, gain, shrink, row, inside, n, n_inside, out, tap, SIZE: tl.constexpr, TAP: tl.constexpr):
    """Write a tile [block_n, block_rows] of the residual, its product with the next norm's gain, and its squares."""
    both = n_inside[:, None] & inside[None, :]
    kind = out.residual.dtype.element_ty
    rounded = value.to(kind)
    at = row.to(tl.int64)[None, :] * SIZE + n[:, None]
    tl.store(out.residual + at, rounded, mask=both)
    if TAP:
        tl.store(tap.rows + row.to(tl.int64)[None, :] * tap.stride + n[:, None], rounded, mask=both)
    value = tl.where(both, rounded.to(tl.float32), 0.0)
    tl.store(out.scaled + at, (value * gain[:, None] * shrink).to(kind), mask=both)
    GROUPS: tl.constexpr = value.shape[0] // _GROUP
    count: tl.constexpr = (SIZE + _GROUP - 1) // _GROUP
    # A whole group at a time, whatever the tile.
    sums = exact_sum(tl.reshape(value * value, (GROUPS, _GROUP, value.shape[1])), 1)
    group = tl.min(n, 0) // _GROUP + tl.arange(0, GROUPS)
    tl.store(
        out.squares + row.to(tl.int64)[None, :] * count + group[:, None],
        sums,
        mask=(group < count)[:, None] & inside[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def embed_kernel(
    table_ptr,
    token_ptr,
    gain_ptr,
    shrink,
    rows,
    out,
    tap,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Put rows of a table into the residual."""
    # Not launched to overlap: it waits for all before it by itself.
    let_next_begin(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(1) * _GROUP + tl.arange(0, _GROUP)
    inside, n_inside = row < rows, n < SIZE
    token = tl.load(token_ptr + row, mask=inside, other=0).to(tl.int64)
    value = tl.load(table_ptr + token[None, :] * SIZE + n[:, None], mask=n_inside[:, None] & inside[None, :], other=0.0)
    gain = tl.load(gain_ptr + n, mask=n_inside, other=0.0).to(tl.float32)
    put_residual(value.to(tl.float32), gain, shrink, row, inside, n, n_inside, out, tap, SIZE, TAP)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    scaled_ptr,
    factor,
    rows,
    out_ptr,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the norm's result, for heads that read it."""
    let_next_begin(OVERLAP)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    both = inside[:, None] & (n < SIZE)[None, :]
    wait_for_previous(OVERLAP)
    times = norm_factor(load_squares(factor, row, inside, SIZE), factor.eps, factor.unshrink, SIZE)
    value = tl.load(scaled_ptr + row.to(tl.int64)[:, None] * SIZE + n[None, :], mask=both, other=0.0).to(tl.float32)
    to = row.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(out_ptr + to, (value * times[:, None]).to(out_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["rows"])
def add_product_kernel(
    x_ptr,
    w_ptr,
    x_tiles,
    w_tiles,
    scale_ptr,
    bias_ptr,
    gain_ptr,
    shrink,
    rows,
    out,
    tap,
    scratch,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    BIAS: tl.constexpr,
    TAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add a product to the residual."""
    let_next_begin(OVERLAP)
    block, tile, split, row = place(rows, SHAPE, TILES)
    own = _own_rows(block, split, SHAPE, TILES)
    n = tile * TILES.block_n + tl.arange(0, TILES.block_n)
    inside, own_inside, n_inside = row < rows, own < rows, n < SHAPE.size
    operands = Operands(x_ptr, w_ptr, x_tiles, w_tiles, scale_ptr)
    w = begin(operands, n, n_inside, split, SHAPE, TILES, OVERLAP)
    residual_at = out.residual + own.to(tl.int64)[None, :] * SHAPE.size + n[:, None]
    before = tl.load(residual_at, mask=n_inside[:, None] & own_inside[None, :], other=0.0)
    scales = row_scales(operands, n, n_inside, SHAPE)
    acc = product(w, operands, row, inside, n, n_inside, 0, split, SHAPE, TILES, False)
    if _may_end(scratch, acc, row, inside, tl.min(own, 0) < rows, SHAPE, TILES):
        gain = tl.load(gain_ptr + n, mask=n_inside, other=0.0).to(tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=n_inside, other=0.0).to(tl.float32)
        total = _whole(scratch, acc, scales, own, own_inside, SHAPE, TILES)
        if BIAS:
            total = plus(total, tl.broadcast_to(bias[:, None], total.shape))
        put_residual(
            plus(total, before.to(tl.float32)), gain, shrink, own, own_inside, n, n_inside, out, tap, SHAPE.size, TAP
        )


@triton.jit(do_not_specialize=["rows"])
def head_product_kernel(
    x_ptr,
    w_ptr,
    x_tiles,
    w_tiles,
    scale_ptr,
    factor,
    rows,
    out_ptr,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write logits; K is whole."""
    let_next_begin(OVERLAP)
    _, tile, split, row = place(rows, SHAPE, TILES)
    n = tile * TILES.block_n + tl.arange(0, TILES.block_n)
    inside, n_inside = row < rows, n < SHAPE.size
    operands = Operands(x_ptr, w_ptr, x_tiles, w_tiles, scale_ptr)
    w = begin(operands, n, n_inside, split, SHAPE, TILES, OVERLAP)
    squares = load_squares(factor, row, inside, SHAPE.depth)
    acc = product(w, operands, row, inside, n, n_inside, 0, split, SHAPE, TILES, False)
    times = norm_factor(squares, factor.eps, factor.unshrink, SHAPE.depth)
    to = row.to(tl.int64)[None, :] * SHAPE.size + n[:, None]
    value = (acc * times[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to, value, mask=n_inside[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def gated_product_kernel(
    x_ptr,
    w_ptr,
    x_tiles,
    w_tiles,
    scale_ptr,
    bias_ptr,
    factor,
    rows,
    out_ptr,
    scratch,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    LIFT: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the SwiGLU of a product, times LIFT."""
    let_next_begin(OVERLAP)
    SIZE: tl.constexpr = SHAPE.size // 2
    PAIRS: tl.constexpr = TILES.block_n // 2
    block, tile, split, row = place(rows, SHAPE, TILES)
    pair, is_up = own_pair(tl.arange(0, TILES.block_n))
    in_tile = tile * PAIRS + pair
    own = _own_rows(block, split, SHAPE, TILES)
    inside, own_inside = row < rows, own < rows
    w_row, w_inside = in_tile + is_up * SIZE, in_tile < SIZE
    operands = Operands(x_ptr, w_ptr, x_tiles, w_tiles, scale_ptr)
    w = begin(operands, w_row, w_inside, split, SHAPE, TILES, OVERLAP)
    squares = load_squares(factor, own, own_inside, SHAPE.depth)
    scales = row_scales(operands, w_row, w_inside, SHAPE)
    halfway = tile * PAIRS + SIZE
    acc = product(w, operands, row, inside, w_row, w_inside, halfway, split, SHAPE, TILES, True)
    if _may_end(scratch, acc, row, inside, tl.min(own, 0) < rows, SHAPE, TILES):
        gate, up = split_pairs(_whole(scratch, acc, scales, own, own_inside, SHAPE, TILES))
        n = tile * PAIRS + tl.arange(0, PAIRS)
        n_inside = n < SIZE
        times = norm_factor(squares, factor.eps, factor.unshrink, SHAPE.depth)
        gate *= times[None, :]
        up *= times[None, :]
        if BIAS:
            gate += tl.load(bias_ptr + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + SIZE + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        to = own.to(tl.int64)[None, :] * SIZE + n[:, None]
        value = (gate * tl.sigmoid(gate) * up * LIFT).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + to, value, mask=n_inside[:, None] & own_inside[None, :])


@triton.jit(do_not_specialize=["nodes", "rows"])
def qkv_product_kernel(
    x_ptr,
    w_ptr,
    x_tiles,
    w_tiles,
    scale_ptr,
    factor,
    heads,
    nodes,
    rows,
    scratch,
    SHAPE: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    SINGLE: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write queries, and keys and values into the cache; a slot has ``nodes`` rows, one where SINGLE."""
    nodes = 1 if SINGLE else nodes
    let_next_begin(OVERLAP)
    HALF: tl.constexpr = HEADS.head_dim // 2
    BLOCK: tl.constexpr = HEADS.half_block
    PAIRS: tl.constexpr = TILES.block_n // 2
    IN_TILE: tl.constexpr = PAIRS // BLOCK
    block, tile, split, row = place(rows, SHAPE, TILES)
    pair, is_second = own_pair(tl.arange(0, TILES.block_n))
    own = _own_rows(block, split, SHAPE, TILES)
    inside, own_inside = row < rows, own < rows
    of_head = tile * IN_TILE + pair // BLOCK
    w_row = of_head * HEADS.head_dim + pair % BLOCK + is_second * HALF
    w_inside = (pair % BLOCK < HALF) & (of_head < HEADS.heads + 2 * HEADS.kv_heads)
    # Written before the pass began, so they can be read before the kernel before has ended.
    position = tl.load(heads.positions + own, mask=own_inside, other=0).to(tl.int64)
    kv_row = tl.load(heads.kv_rows + own, mask=own_inside, other=-1).to(tl.int64)
    slot = tl.load(heads.slots + own // nodes, mask=own_inside, other=0).to(tl.int64)
    operands = Operands(x_ptr, w_ptr, x_tiles, w_tiles, scale_ptr)
    w = begin(operands, w_row, w_inside, split, SHAPE, TILES, OVERLAP)
    squares = load_squares(factor, own, own_inside, SHAPE.depth)
    scales = row_scales(operands, w_row, w_inside, SHAPE)
    halfway = tile * HEADS.head_dim + HALF
    acc = product(w, operands, row, inside, w_row, w_inside, halfway, split, SHAPE, TILES, True)
    if _may_end(scratch, acc, row, inside, tl.min(own, 0) < rows, SHAPE, TILES):
        i = tl.arange(0, PAIRS)
        head, d = tile * IN_TILE + i // BLOCK, i % BLOCK
        n = head * HEADS.head_dim + d
        n_inside = (d < HALF) & (head < HEADS.heads + 2 * HEADS.kv_heads)
        at = position[None, :] * HALF + d[:, None]
        turned = (n_inside & (head < HEADS.heads + HEADS.kv_heads))[:, None] & own_inside[None, :]
        cos = tl.load(heads.cos + at, mask=turned, other=1.0)
        sin = tl.load(heads.sin + at, mask=turned, other=0.0)
        first, second = split_pairs(_whole(scratch, acc, scales, own, own_inside, SHAPE, TILES))
        times = norm_factor(squares, factor.eps, factor.unshrink, SHAPE.depth)
        first *= times[None, :]
        second *= times[None, :]
        if BIAS:
            first += tl.load(heads.bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
            second += tl.load(heads.bias + n + HALF, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        is_query = head < HEADS.heads
        is_value = head >= HEADS.heads + HEADS.kv_heads
        if HEADS.has_norms:
            of_pair = tl.where(n_inside[:, None], first * first + second * second, 0.0)
            sums = exact_sum(tl.reshape(of_pair, (IN_TILE, BLOCK, own.shape[0])), 1)
            scale = tl.rsqrt(sums / HEADS.head_dim + heads.norm_eps)
            scale = tl.reshape(
                tl.broadcast_to(scale[:, None, :], (IN_TILE, BLOCK, own.shape[0])), (i.shape[0], own.shape[0])
            )
            of_query, of_key = n_inside & is_query, n_inside & (head >= HEADS.heads)
            w1 = tl.load(heads.norm_q + d, mask=of_query, other=0.0).to(tl.float32)
            w1 += tl.load(heads.norm_k + d, mask=of_key, other=0.0).to(tl.float32)
            w2 = tl.load(heads.norm_q + HALF + d, mask=of_query, other=0.0).to(tl.float32)
            w2 += tl.load(heads.norm_k + HALF + d, mask=of_key, other=0.0).to(tl.float32)
            first = tl.where(is_value[:, None], first, first * scale * w1[:, None])
            second = tl.where(is_value[:, None], second, second * scale * w2[:, None])
        kind = heads.query.dtype.element_ty
        one = tl.fma(first, cos, -(second * sin)).to(kind)
        two = tl.fma(second, cos, first * sin).to(kind)
        to = own.to(tl.int64)[None, :] * (HEADS.heads * HEADS.head_dim) + n[:, None]
        kept = (n_inside & is_query)[:, None] & own_inside[None, :]
        tl.store(heads.query + to, one, mask=kept)
        tl.store(heads.query + to + HALF, two, mask=kept)
        to = (slot * heads.stride_slot + kv_row * HEADS.head_dim)[None, :] + d[:, None]
        is_kept = (kv_row >= 0)[None, :]
        to_key = to + ((head - HEADS.heads) * heads.stride_head)[:, None]
        kept = (n_inside & (head >= HEADS.heads) & (head < HEADS.heads + HEADS.kv_heads))[:, None] & is_kept
        tl.store(heads.key_rows + to_key, one, mask=kept)
        tl.store(heads.key_rows + to_key + HALF, two, mask=kept)
        to_value = to + ((head - HEADS.heads - HEADS.kv_heads) * heads.stride_head)[:, None]
        kept = (n_inside & is_value)[:, None] & is_kept
        tl.store(heads.value_rows + to_value, one, mask=kept)
        tl.store(heads.value_rows + to_value + HALF, two, mask=kept)
