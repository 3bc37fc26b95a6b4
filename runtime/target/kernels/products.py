"""The products of a target's layer, with what stands between them: norms, rotation into the cache, SwiGLU, residual.

Each operation is a host function and a PyTorch twin (``_ref``) of the same arguments, which defines it; the kernels are
`product_kernels`'. Rows are the nodes of one forward. A weight is the model's own [out, in]. Between the products the
rows are `NormedRows`; sums are fp32, and results are rounded to the model's type once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..fp8 import SCALE_BLOCK, Fp8Weight, Weight
from ..mxfp4 import ExpertWeight, Mxfp4Weight
from . import product_kernels as kernels
from .machine import NO_FUSION, major_capability, num_processors, overlapping, overwrites_operands, programs_wait
from .product_kernels import SQUARES_GROUP, FactorArgs, HeadArgs, HeadShape, ProductShape, ProductTiles, SplitScratch
from .product_tiles import ProductKind, enough_tiles, product_tiles

SUMS_VERSION = 4
"""Version of the summation order; bump it when a constant of shape and type changes."""
_SPLIT_UNIT = 128
_MOST_TILES = 384
"""Tiles of 64 rows of FP8 weights from which on K is not cut; other weights' parts take longer, so half as many."""


def lift_of(weight: ExpertWeight | None, dtype: torch.dtype) -> float:
    """Return how many times larger rows of a type must be that a weight multiplies: not 1 for FP8 weights and bf16."""
    return kernels.LIFT if isinstance(weight, Fp8Weight) and dtype == torch.bfloat16 else 1.0


class Norm(NamedTuple):
    """An RMSNorm whose gain [hidden] is applied by whoever writes the residual, its factor by whoever reads it.

    ``shrink`` is a power of two that brings the gain to 1 at most, so that a residual times the gain fits fp16;
    ``lift`` is `lift_of` the weight that multiplies the rows.
    """

    gain: Tensor
    eps: float
    shrink: float
    lift: float = 1.0

    @classmethod
    def of(cls, gain: Tensor, eps: float, weight: ExpertWeight | None = None) -> Norm:
        """Take a norm's gain, and the weight that multiplies what the norm gives; waits for the device."""
        largest = float(gain.detach().abs().max())
        shrink = 2.0 ** -math.ceil(math.log2(largest)) if 1 < largest < math.inf else 1.0
        return cls(gain, eps, shrink, lift_of(weight, gain.dtype))


class NormedRows(NamedTuple):
    """A forward's rows between two products.

    ``residual`` and ``scaled`` (the residual times the next norm's gain, ``shrink`` and ``lift``) [rows, hidden] of the
    model's type; ``squares`` fp32 [rows, groups]: sums of squares of each `SQUARES_GROUP` columns of the residual.
    """

    residual: Tensor
    scaled: Tensor
    squares: Tensor

    def factor(self, norm: Norm) -> Tensor:
        """Return the factor that makes ``scaled`` the norm's result: fp32 [rows, 1]."""
        mean = self.squares.sum(1, keepdim=True) / self.residual.shape[1]
        return torch.rsqrt(mean + norm.eps) / norm.shrink


class HeadRows(NamedTuple):
    """Places that q, k, v of a forward's rows go to, and their rotation.

    ``cos``, ``sin`` fp32 [table, head_dim / 2], halves rotated against each other as in Llama; ``positions`` int32
    [rows] point into them. ``slots`` int32 [places]: row r belongs to place ``r // (rows / places)``; ``kv_rows`` int32
    [rows]: where its key goes, -1 nowhere. ``query`` [rows, heads * head_dim].
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    kv_rows: Tensor
    query: Tensor


def num_groups(hidden: int) -> int:
    """Count the columns of `NormedRows.squares`."""
    return -(-hidden // SQUARES_GROUP)


def product_shape(weight: Weight) -> ProductShape:
    """Return what decides the bits of a product with a weight [size, depth]: constants of its shape and type.

    K is cut where one part would leave multiprocessors without work; small matrices are done before their parts could
    be added.
    """
    size, depth = weight.shape
    splits = 1
    groups = weight.scales.shape[1] if isinstance(weight, Fp8Weight) else 0
    enough = _MOST_TILES if groups else _MOST_TILES // 2
    while splits < 4 and depth >= 2048 * splits and size // 64 * splits < enough:
        splits *= 2
    part = -(-depth // splits // _SPLIT_UNIT) * _SPLIT_UNIT
    return ProductShape(size, depth, -(-depth // part), part, precision_of(source_of(weight)), groups)


def precision_of(weight: Tensor) -> str:
    """Return the precision of products with a weight: fp32 as it is."""
    return "ieee" if weight.dtype == torch.float32 else "tf32"


def has_descriptors(weight: Weight, x: Tensor) -> bool:
    """Report whether descriptors can copy both: rows in two bytes, all rows and both beginnings at whole 16 bytes.

    sm_120 has descriptors, too, but not the shared memory for the tiles that pay with them.
    """
    return (
        major_capability(x.device) in (9, 10)
        and x.itemsize == 2
        and weight.shape[1] % 8 == 0
        and source_of(weight).data_ptr() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def source_of(weight: ExpertWeight) -> Tensor:
    """Return what a kernel reads a weight from."""
    return weight if isinstance(weight, Tensor) else weight.words


def split_scratch(shapes: list[tuple[ProductShape, int]], rows: int, device: torch.device) -> SplitScratch:
    """Allocate for products of up to ``rows`` rows; with each shape, the rows that all tiles of its weight have."""
    tiles = max(-(-size // 64) * -(-rows // 16) for _, size in shapes)
    # FP8 weights leave parts of every tile, of up to 256 by 256 numbers; others of few tiles of up to 128 by 128, or of
    # a matrix of fewer than 192 times 64 rows.
    most = max(enough_tiles(num_processors(device)) * 128 * 128, 192 * 64 * 64)
    parts = max(
        shape.splits * -(-size // 256) * -(-rows // 256) * 65536
        if shape.groups
        else shape.splits * min(size * -(-rows // 128) * 128, most)
        for shape, size in shapes
    )
    return SplitScratch(
        torch.empty(parts, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def tiled_size(size: int) -> int:
    """Count the rows of a weight, in whole tiles."""
    return -(-size // 128) * 128


def tiled_heads(num_heads: int, head_dim: int) -> int:
    """Count the rows of q, k, v in whole tiles, each half of a head filled up to a power of two."""
    half_block = _half_block(head_dim)
    in_tile = max(1, 64 // half_block)
    return -(-num_heads // in_tile) * in_tile * 2 * half_block


def _half_block(head_dim: int) -> int:
    return max(16, 1 << (head_dim // 2 - 1).bit_length())


def embed_ref(table: Tensor, tokens: Tensor, norm: Norm, rows: NormedRows, tap: Tensor | None = None) -> None:
    """Begin a forward: the rows of ``table`` [vocab, hidden] of ``tokens`` int32 [rows], copied to ``tap`` too."""
    put_residual_ref(table[tokens.long()], norm, rows, tap)


def put_residual_ref(value: Tensor, norm: Norm, rows: NormedRows, tap: Tensor | None) -> None:
    """Write fp32 rows as the residual, rounded once, and what the next norm needs of them."""
    rows.residual.copy_(value)
    if tap is not None:
        tap.copy_(rows.residual)
    x = rows.residual.float()
    rows.scaled.copy_(x * norm.gain.float() * norm.shrink * norm.lift)
    padded = F.pad(x * x, (0, -x.shape[1] % SQUARES_GROUP))
    rows.squares.copy_(padded.view(len(x), -1, SQUARES_GROUP).sum(2))


def embed(table: Tensor, tokens: Tensor, norm: Norm, rows: NormedRows, tap: Tensor | None = None) -> None:
    """Run `embed_ref` as one launch."""
    count, hidden = rows.residual.shape
    block = 16
    # Without ``launch_pdl``: it follows kernels that do not let it begin early, and which it must wait for.
    overlaps, _ = overlapping(table.device)
    constants = {"SIZE": hidden, "BLOCK_ROWS": block, "TAP": tap is not None, "OVERLAP": overlaps, "num_warps": 1}
    given = table, tokens, norm.gain, norm.shrink * norm.lift, count, rows, tap_args(rows, tap)
    kernels.embed_kernel[(triton.cdiv(count, block), num_groups(hidden))](*given, **constants, **NO_FUSION)


def norm_rows_ref(rows: NormedRows, norm: Norm, out: Tensor) -> None:
    """Write the norm's result [rows, hidden]; ``out`` may be a column block."""
    out.copy_(rows.scaled.float() * rows.factor(norm))


def norm_rows(rows: NormedRows, norm: Norm, out: Tensor) -> None:
    """Run `norm_rows_ref` as one launch."""
    count, hidden = rows.scaled.shape
    overlaps, options = overlapping(out.device)
    constants = {"SIZE": hidden, "BLOCK_ROWS": 4, "BLOCK": 256, "OVERLAP": overlaps, "num_warps": 4}
    given = rows.scaled, factor_args(rows, norm), count, out, out.stride(0)
    kernels.norm_kernel[(triton.cdiv(count, 4), triton.cdiv(hidden, 256))](*given, **constants, **options)


def multiply(x: Tensor, weight: ExpertWeight) -> Tensor:
    """Multiply rows, `lift_of` times too large, by a weight, in fp32; no FP8 weight is rounded to the rows' type."""
    if isinstance(weight, Mxfp4Weight):
        weight = weight.dequantised(x.dtype)
    if isinstance(weight, Fp8Weight):
        return x.float() / lift_of(weight, x.dtype) @ weight.dequantised(torch.float32).t()
    return (x @ weight.t()).float()


def qkv_product_ref(
    rows: NormedRows,
    norm: Norm,
    weight: Weight,
    bias: Tensor | None,
    head_norms: tuple[Tensor, Tensor] | None,
    out: HeadRows,
    keys: Tensor,
    values: Tensor,
    scratch: SplitScratch | None = None,
) -> None:
    """Turn rows into what attention reads: q into ``out.query``, k and v into the cache.

    ``weight`` [(heads + 2 * kv_heads) * head_dim, hidden], q first; ``bias`` of the same width. ``head_norms``: the
    weights [head_dim] of RMSNorms over each head of q and of k (Qwen3). ``keys``, ``values`` [slots, kv_heads,
    capacity, head_dim].
    """
    count = len(rows.scaled)
    _, kv_heads, _, head_dim = keys.shape
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    qkv = multiply(rows.scaled, weight) * rows.factor(norm)
    if bias is not None:
        qkv += bias.float()
    q, k, v = qkv.view(count, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), 1)
    if head_norms is not None:
        q, k = (_head_norm(x, gain, norm.eps) for x, gain in zip((q, k), head_norms, strict=True))
    at = out.positions.long()
    q, k = (_rotate(x, out.cos[at][:, None], out.sin[at][:, None]) for x in (q, k))
    out.query.copy_(q.flatten(1))
    kept = out.kv_rows >= 0
    slot = out.slots.long().repeat_interleave(count // len(out.slots))[kept]
    keys[slot, :, out.kv_rows[kept].long()] = k[kept].to(keys.dtype)
    values[slot, :, out.kv_rows[kept].long()] = v[kept].to(values.dtype)


def _head_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def qkv_product(
    rows: NormedRows,
    norm: Norm,
    weight: Weight,
    bias: Tensor | None,
    head_norms: tuple[Tensor, Tensor] | None,
    out: HeadRows,
    keys: Tensor,
    values: Tensor,
    scratch: SplitScratch | None = None,
    tiles: ProductTiles | None = None,
) -> None:
    """Run `qkv_product_ref` as one launch."""
    assert scratch is not None
    count = len(rows.scaled)
    _, kv_heads, _, head_dim = keys.shape
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    shape = product_shape(weight)
    tiles = _tiles(shape, count, "pairs", weight, rows.scaled, tiles)
    half_block = _half_block(head_dim)
    tiles = _head_tiles(tiles, half_block, head_dim, shape.groups)
    gains = (norm.gain, norm.gain) if head_norms is None else head_norms
    strides, nodes = (keys.stride(0), keys.stride(1)), count // len(out.slots)
    args = HeadArgs(norm.gain if bias is None else bias, *gains, norm.eps, *out, keys, values, *strides)
    blocks = triton.cdiv(heads + 2 * kv_heads, tiles.block_n // 2 // half_block)
    given = factor_args(rows, norm), args, nodes, count, scratch
    heads_of = HeadShape(heads, kv_heads, head_dim, half_block, head_norms is not None)
    constants = {"HEADS": heads_of, "SINGLE": nodes == 1, "BIAS": bias is not None}
    _launch(kernels.qkv_product_kernel, "pairs", count, rows.scaled, weight, given, constants, shape, tiles, blocks)


def _head_tiles(tiles: ProductTiles, half_block: int, head_dim: int, groups: int) -> ProductTiles:
    """Fit tiles to heads, a whole one at least; ``groups``: of the weight's scales."""
    if 2 * half_block > 128:
        columns, stages = (64, 3) if groups <= 1 else (SCALE_BLOCK, 2)
        tiles = replace(tiles, block_n=2 * half_block, num_warps=8, num_stages=min(tiles.num_stages, stages), tma=False)
        return replace(tiles, block_k=min(tiles.block_k, columns), block_rows=min(tiles.block_rows, 64))
    tiles = replace(tiles, block_n=max(tiles.block_n, 2 * half_block))
    if tiles.tma and head_dim != tiles.block_n:
        # A descriptor's tile is of rows that follow one another: half a head.
        if tiles.block_k > 64 and not groups:
            tiles = replace(tiles, block_k=64, block_rows=64, num_warps=4)  # Of 128 columns too much shared memory.
        warps = max(tiles.num_warps, min(tiles.block_rows // 16, 8))
        tiles = replace(tiles, tma=False, num_warps=warps, num_stages=min(tiles.num_stages, 3))
    return tiles


def add_product_ref(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    norm: Norm,
    rows: NormedRows,
    tap: Tensor | None = None,
    scratch: SplitScratch | None = None,
) -> None:
    """Add ``x`` [rows, in] / `lift_of` times ``weight`` [hidden, in], and ``bias``, to the residual and ``tap``."""
    delta = multiply(x, weight)
    if bias is not None:
        delta += bias.float()
    put_residual_ref(rows.residual.float() + delta, norm, rows, tap)


def add_product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    norm: Norm,
    rows: NormedRows,
    tap: Tensor | None = None,
    scratch: SplitScratch | None = None,
    tiles: ProductTiles | None = None,
) -> None:
    """Run `add_product_ref` as one launch."""
    assert scratch is not None
    norms = norm.gain if bias is None else bias, norm.gain, norm.shrink * norm.lift
    given = *norms, len(x), rows, tap_args(rows, tap), scratch
    constants = {"BIAS": bias is not None, "TAP": tap is not None}
    _launch(kernels.add_product_kernel, "sum", len(x), x, weight, given, constants, product_shape(weight), tiles)


def gated_product_ref(
    rows: NormedRows,
    norm: Norm,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    scratch: SplitScratch | None = None,
    lift: float = 1.0,
) -> None:
    """Write ``silu(gate) * up * lift`` [rows, intermediate]; ``weight`` [2 * intermediate, hidden], gate first."""
    both = multiply(rows.scaled, weight) * rows.factor(norm)
    if bias is not None:
        both += bias.float()
    gate, up = both.chunk(2, -1)
    out.copy_(F.silu(gate) * up * lift)


def gated_product(
    rows: NormedRows,
    norm: Norm,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    scratch: SplitScratch | None = None,
    lift: float = 1.0,
    tiles: ProductTiles | None = None,
) -> None:
    """Run `gated_product_ref` as one launch."""
    assert scratch is not None
    given = norm.gain if bias is None else bias, factor_args(rows, norm), len(out), out, scratch
    constants = {"LIFT": lift, "BIAS": bias is not None}
    shape = product_shape(weight)
    _launch(kernels.gated_product_kernel, "pairs", len(out), rows.scaled, weight, given, constants, shape, tiles)


def head_product_ref(rows: NormedRows, norm: Norm, weight: Tensor, out: Tensor) -> None:
    """Write logits [rows, vocab]; ``weight`` [vocab, hidden]."""
    out.copy_((rows.scaled @ weight.t()).float() * rows.factor(norm))


def head_product(rows: NormedRows, norm: Norm, weight: Tensor, out: Tensor, tiles: ProductTiles | None = None) -> None:
    """Run `head_product_ref` as one launch."""
    # A vocabulary gives every multiprocessor work: one part.
    size, depth = weight.shape
    shape = ProductShape(size, depth, 1, depth, precision_of(weight))
    given = factor_args(rows, norm), len(out), out
    _launch(kernels.head_product_kernel, "logits", len(out), rows.scaled, weight, given, {}, shape, tiles)


def _tiles(
    shape: ProductShape, rows: int, kind: ProductKind, weight: Weight, x: Tensor, given: ProductTiles | None
) -> ProductTiles:
    """Return the tiles of a launch: those of `product_tiles` unless others are given."""
    waits = shape.groups == 1 and overwrites_operands(x.device)
    if given is not None:
        return replace(given, waits=waits)
    tiles = product_tiles(shape, rows, kind, x.itemsize, num_processors(x.device), has_descriptors(weight, x))
    return replace(
        tiles, cooperative=programs_wait(x.device) and shape.splits > 1 and not tiles.sums_all_splits, waits=waits
    )


def _launch(
    kernel: Any,
    kind: ProductKind,
    count: int,
    x: Tensor,
    weight: Weight,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    shape: ProductShape,
    tiles: ProductTiles | None,
    blocks: int | None = None,
) -> None:
    """Launch a product of ``count`` rows; ``blocks``: tiles that cover the weight, else those of ``block_n`` rows."""
    tiles = _tiles(shape, count, kind, weight, x, tiles)
    blocks = triton.cdiv(shape.size, tiles.block_n) if blocks is None else blocks
    programs = blocks * triton.cdiv(count, tiles.block_rows) * (1 if tiles.sums_all_splits else shape.splits)
    overlaps, options = overlapping(x.device)
    constants = {"SHAPE": shape, "TILES": tiles, "OVERLAP": overlaps, "num_warps": tiles.num_warps} | constants
    kernel[(programs,)](*_operands(x, weight, tiles, kind == "pairs"), *args, **constants, **options)


def _operands(x: Tensor, weight: Weight, tiles: ProductTiles, is_pair: bool) -> tuple[Any, ...]:
    """Return rows and a weight as tensors, then as what copies their tiles, and the weight's scales."""
    source, scales = source_of(weight), weight.scales if isinstance(weight, Fp8Weight) else None
    if not tiles.tma:
        return x, source, x, source, scales
    tile = [tiles.block_n // 2 if is_pair else tiles.block_n, tiles.block_k * source.shape[1] // weight.shape[1]]
    copied = TensorDescriptor.from_tensor(x, [tiles.block_rows, tiles.block_k])
    return x, source, copied, TensorDescriptor.from_tensor(source, tile), scales


def factor_args(rows: NormedRows, norm: Norm) -> FactorArgs:
    """Return what a kernel computes the rows' norm factors from."""
    return FactorArgs(rows.squares, norm.eps, 1.0 / norm.shrink)


def tap_args(rows: NormedRows, tap: Tensor | None) -> kernels.Tap:
    """Return where a kernel copies the residual to."""
    return kernels.Tap(rows.residual, 0) if tap is None else kernels.Tap(tap, tap.stride(0))
