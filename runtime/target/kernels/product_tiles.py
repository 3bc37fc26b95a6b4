"""Tiles of the target's products: the first rule of a table that fits. They decide speed and never results.

The rules were measured on an H200 and an H100, with single products and whole passes (docs/kernels.md), at the
dimensions that stand above them: as a rule small weights are SmolLM2's, others Llama-3.1-8B's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

from ..fp8 import SCALE_BLOCK
from .product_kernels import ProductShape, ProductTiles

ProductKind = Literal["pairs", "sum", "logits"]
"""Rows of a weight that share a tile in "pairs"; a "sum", added to the residual; "logits"."""
_SMALL = 4 << 20
"""Numbers of a weight that stays in the L2 while blocks of rows read it."""


class TileRule(NamedTuple):
    """Tiles of products of up to ``max_rows`` rows that have all ``traits`` (`traits_of`)."""

    max_rows: float
    traits: str
    tiles: ProductTiles


RULES = (
    # FP8, SmolLM2: the rows are cut too, and the weights come from the L2.
    TileRule(64, "fp8 small", ProductTiles(64, SCALE_BLOCK, 16, 4, 3, ahead=512)),
    TileRule(math.inf, "fp8 small", ProductTiles(64, SCALE_BLOCK, 64, 4, 3)),
    # FP8 with a scale a row, Llama-3.1-8B, and 70B where tiles are many. Steps of few rows take a cache line of a row
    # at least: what bounds them is the latency of a step. Descriptors pay where a step has many rows of x.
    TileRule(16, "fp8 row-scales pairs", ProductTiles(128, 128, 16, 4, 4, ahead=256)),
    TileRule(16, "fp8 row-scales many", ProductTiles(128, 256, 16, 8, 3, ahead=256, tma=True)),
    TileRule(16, "fp8 row-scales", ProductTiles(64, 256, 16, 4, 3, ahead=256)),
    TileRule(32, "fp8 row-scales pairs", ProductTiles(128, 128, 32, 4, 3, ahead=256)),
    TileRule(32, "fp8 row-scales many", ProductTiles(128, 128, 32, 8, 4, ahead=256)),
    TileRule(32, "fp8 row-scales", ProductTiles(64, 256, 32, 4, 3, ahead=256)),
    TileRule(64, "fp8 row-scales pairs many", ProductTiles(128, 64, 64, 4, 4, ahead=256, tma=True)),
    TileRule(64, "fp8 row-scales pairs", ProductTiles(128, 128, 64, 4, 3, ahead=256, tma=True)),
    TileRule(64, "fp8 row-scales many", ProductTiles(128, 128, 64, 4, 3, ahead=256, tma=True)),
    TileRule(64, "fp8 row-scales", ProductTiles(64, 128, 64, 4, 4, ahead=256, tma=True)),
    TileRule(math.inf, "fp8 row-scales pairs", ProductTiles(128, 64, 128, 4, 4, tma=True)),
    TileRule(math.inf, "fp8 row-scales", ProductTiles(128, 64, 128, 8, 4, tma=True)),
    # FP8 with a scale for each block, or without descriptors, Llama-3.1-8B. Of more rows two sums at once, of a step
    # and of all before it, do not fit into the registers; nor does one sum and the widened weights where matrix
    # instructions take both from registers. Four stages of 32 rows do not fit on sm_89 and 120 with Triton 3.7.
    TileRule(16, "fp8", ProductTiles(64, SCALE_BLOCK, 16, 4, 4, ahead=256)),
    TileRule(32, "fp8 tma", ProductTiles(64, SCALE_BLOCK, 32, 4, 4, ahead=256)),
    TileRule(32, "fp8", ProductTiles(64, SCALE_BLOCK, 32, 4, 3, ahead=256)),
    TileRule(64, "fp8", ProductTiles(128, SCALE_BLOCK, 64, 8, 3, ahead=256)),
    TileRule(math.inf, "fp8 split", ProductTiles(128, SCALE_BLOCK, 64, 8, 3, ahead=256)),
    TileRule(math.inf, "fp8", ProductTiles(128, SCALE_BLOCK, 64, 8, 2, ahead=256)),
    # fp32, which has no target measured in it.
    TileRule(16, "fp32 pairs", ProductTiles(128, 32, 16, 4, 2)),
    TileRule(16, "fp32", ProductTiles(64, 32, 16, 4, 2)),
    TileRule(math.inf, "fp32 pairs", ProductTiles(128, 32, 32, 4, 2)),
    TileRule(math.inf, "fp32", ProductTiles(64, 32, 32, 4, 2)),
    # SmolLM2. Many small programs: the rows are cut too, and the weights come from the L2.
    TileRule(16, "small pairs", ProductTiles(64, 64, 16, 4, 4, ahead=256)),
    TileRule(16, "small deep", ProductTiles(64, 128, 16, 4, 4, ahead=256)),
    TileRule(16, "small", ProductTiles(64, 128, 16, 4, 3, ahead=256)),
    TileRule(64, "small pairs", ProductTiles(64, 64, 16, 4, 4, ahead=512)),
    TileRule(64, "small deep", ProductTiles(64, 128, 16, 4, 4, ahead=512)),
    TileRule(64, "small", ProductTiles(64, 128, 16, 4, 3, ahead=512)),
    TileRule(256, "small deep", ProductTiles(64, 64, 32, 4, 4)),
    TileRule(256, "small", ProductTiles(64, 64, 32, 4, 3)),
    TileRule(math.inf, "small pairs", ProductTiles(128, 64, 64, 4, 3)),
    TileRule(math.inf, "small", ProductTiles(64, 64, 64, 4, 3)),
    # Llama-3.1-8B. Of pairs narrower tiles where they are many, deeper ones where they are few.
    TileRule(16, "pairs whole", ProductTiles(64, 128, 16, 4, 4, ahead=256)),
    # gpt-oss: twice as many programs.
    TileRule(16, "pairs short", ProductTiles(64, 128, 16, 4, 4, ahead=256)),
    TileRule(16, "pairs", ProductTiles(128, 128, 16, 4, 3, ahead=256)),
    TileRule(16, "", ProductTiles(64, 128, 16, 4, 3, ahead=256)),
    TileRule(32, "pairs whole", ProductTiles(64, 128, 32, 4, 3, ahead=128)),
    TileRule(32, "pairs", ProductTiles(128, 128, 32, 4, 3, ahead=128)),
    TileRule(32, "", ProductTiles(64, 128, 32, 4, 3, ahead=128)),
    TileRule(64, "pairs whole tma", ProductTiles(128, 128, 64, 4, 3, tma=True)),
    TileRule(64, "pairs whole", ProductTiles(128, 64, 64, 8, 3, ahead=128)),
    TileRule(64, "pairs", ProductTiles(128, 64, 64, 4, 5, ahead=128)),
    # Long splits in wide tiles read x half as often; short ones are too few for that to pay.
    TileRule(64, "long sum", ProductTiles(128, 64, 64, 4, 5, ahead=128)),
    TileRule(64, "", ProductTiles(64, 64, 64, 4, 5, ahead=128)),
    TileRule(128, "tma", ProductTiles(128, 128, 128, 8, 3, tma=True)),
    # Two programs share a multiprocessor, for which rotation of more rows leaves no registers.
    TileRule(256, "tma pairs split", ProductTiles(128, 64, 64, 4, 4, tma=True)),
    # Narrow tiles, which give each multiprocessor one.
    TileRule(256, "tma sum narrow", ProductTiles(64, 128, 128, 4, 4, tma=True)),
    # As wide as registers allow, where K is whole and copies need none; else two programs share a multiprocessor.
    TileRule(math.inf, "tma whole pairs", ProductTiles(128, 64, 256, 8, 4, tma=True)),
    TileRule(math.inf, "tma whole logits", ProductTiles(128, 64, 256, 8, 4, tma=True)),
    TileRule(math.inf, "tma", ProductTiles(128, 64, 128, 8, 3, tma=True)),
    TileRule(math.inf, "", ProductTiles(128, 64, 128, 8, 3)),
)


def traits_of(shape: ProductShape, kind: ProductKind, itemsize: int, num_sms: int, has_tma: bool) -> set[str]:
    """Name what rules ask of a product; its kind is one of them.

    fp8, row-scales (one scale a row, and descriptors), fp32; tma (descriptors can copy the weight and the rows); small;
    deep (of other kinds than pairs: enough columns for another stage); whole or split, as K is; many (tiles of 128 rows
    of w give each multiprocessor one and a half); long (splits, in enough wide tiles); short (splits of 1,025 to 2,047
    columns); narrow (tiles of 64 rows of w give about each multiprocessor one).
    """
    tiles, narrow_tiles = shape.size // 128 * shape.splits, -(-shape.size // 64)
    enough = enough_tiles(num_sms)
    traits = {
        kind: True,
        "fp8": shape.groups > 0,
        "row-scales": shape.groups == 1 and has_tma,
        "fp32": itemsize == 4,
        "tma": has_tma,
        "small": shape.size * shape.depth < _SMALL,
        "deep": kind != "pairs" and shape.depth >= 1024,
        "whole": shape.splits == 1,
        "split": shape.splits > 1,
        "many": shape.splits > 1 and 2 * tiles >= 3 * num_sms,
        "long": shape.split_size >= 2048 and tiles >= enough,
        "short": 1024 < shape.split_size < 2048 and shape.splits > 1,
        "narrow": enough <= 2 * narrow_tiles <= num_sms,
    }
    return {name for name, has in traits.items() if has}


def product_tiles(
    shape: ProductShape, rows: int, kind: ProductKind, itemsize: int, num_sms: int, has_tma: bool = False
) -> ProductTiles:
    """Choose tiles for some rows; ``has_tma``: descriptors can copy the weight and the rows."""
    traits = traits_of(shape, kind, itemsize, num_sms, has_tma)
    tiles = next(rule.tiles for rule in RULES if rows <= rule.max_rows and traits.issuperset(rule.traits.split()))
    if shape.groups and shape.split_size % tiles.block_k:
        # A descriptor's tile would go on into the next split.
        tiles = replace(tiles, tma=False)
    num_tiles = -(-shape.size // tiles.block_n) * -(-rows // tiles.block_rows)
    # A program sums all splits where there are many tiles; not of FP8 weights: its registers do not hold two sums.
    has_enough = not shape.groups and num_tiles >= enough_tiles(num_sms)
    sums_all_splits = rows > 64 and (shape.splits == 1 or has_enough)
    # One program on a multiprocessor: more in flight, as far as its memory holds them.
    is_alone = sums_all_splits or num_tiles * shape.splits <= num_sms
    step = tiles.block_k * (tiles.block_n * (1 if shape.groups else 2) + 2 * tiles.block_rows)
    has_more = tiles.tma and is_alone and step <= 48 << 10
    return replace(tiles, sums_all_splits=sums_all_splits, num_stages=4 if has_more else tiles.num_stages)


def enough_tiles(num_sms: int) -> int:
    """Return the number of tiles that give every multiprocessor work."""
    return num_sms * 7 // 8
