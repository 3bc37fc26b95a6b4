"""The products of a layer against their twins; and each row's bits in every tile, alone and among others."""

from typing import Any, NamedTuple

import pytest
import torch
from eagle_slim.runtime.target.fp8 import SCALE_BLOCK, Fp8Weight, Weight, quantise_rows
from eagle_slim.runtime.target.kernels import products
from eagle_slim.runtime.target.kernels.product_kernels import ProductTiles
from eagle_slim.runtime.target.kernels.products import HeadRows, Norm, NormedRows
from kernels.tolerances import OP_ATOL
from support.sweeps import sweep
from torch import Tensor

SIXTEEN = [
    ProductTiles(64, 64, 16, 4, 4),
    ProductTiles(64, 128, 32, 4, 1),
    ProductTiles(128, 64, 64, 8, 3, ahead=256),
    ProductTiles(128, 64, 128, 8, 3, sums_all_splits=True),
    ProductTiles(64, 64, 32, 4, 2, sums_all_splits=True),
    ProductTiles(128, 64, 16, 4, 3),
    ProductTiles(64, 128, 16, 4, 3, cooperative=True),
    ProductTiles(128, 64, 64, 4, 3, cooperative=True),
    ProductTiles(128, 64, 128, 8, 3, cooperative=True, tma=True),
    ProductTiles(128, 64, 256, 8, 4, sums_all_splits=True, tma=True),
]
ONE_PROGRAM, BULK = SIXTEEN[4], SIXTEEN[-1]
THIRTY_TWO = [ProductTiles(64, 32, 16, 4, 2), ProductTiles(128, 32, 32, 4, 1, sums_all_splits=True)]

FP8 = [
    ProductTiles(64, 128, 16, 4, 4),
    ProductTiles(64, 128, 16, 4, 4, ahead=256, cooperative=True),
    ProductTiles(128, 128, 32, 4, 3, cooperative=True),
    ProductTiles(128, 128, 64, 8, 3, ahead=256),
    ProductTiles(64, 128, 32, 4, 3, sums_all_splits=True),
    ProductTiles(128, 128, 64, 8, 3, sums_all_splits=True),
]
SPLITS = [("bf16", None), ("bf16", ONE_PROGRAM), ("by blocks", FP8[-2])]
MORE_SPLITS = [("by row", None), ("by row", FP8[-2]), ("by blocks", None)]
# A step of products with scales of columns has 128 of them.
FP8_BY_ROW = [
    *FP8,
    ProductTiles(128, 64, 64, 4, 4, cooperative=True),
    ProductTiles(64, 256, 16, 4, 3, cooperative=True),
    ProductTiles(128, 64, 128, 8, 3, sums_all_splits=True),
    ProductTiles(128, 64, 64, 4, 4, cooperative=True, tma=True),
    ProductTiles(64, 128, 16, 4, 4, tma=True),
    ProductTiles(128, 64, 256, 8, 4, sums_all_splits=True, tma=True),
]


class Layer(NamedTuple):
    norm: Norm
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    head: Tensor
    bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    heads: tuple[int, int, int]


def layer_of(dtype, device, hidden, heads, middle, has_extras):
    """Of ``heads``: query heads, key heads, head_dim."""
    torch.manual_seed(hidden + middle)
    num_heads, kv_heads, head_dim = heads

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)

    widths = (num_heads + 2 * kv_heads) * head_dim, num_heads * head_dim
    gains = (torch.rand(2, head_dim, device=device).to(dtype) + 0.5).unbind() if has_extras else None
    return Layer(
        Norm.of((torch.rand(hidden, device=device) * 3).to(dtype), 1e-5),
        draw(widths[0], hidden),
        draw(hidden, widths[1]),
        draw(2 * middle, hidden),
        draw(hidden, middle),
        draw(150, hidden),
        draw(1, max(*widths, 2 * middle, hidden))[0] if has_extras else None,
        gains,
        heads,
    )


def quantise_blocks(weight: Tensor) -> Fp8Weight:
    """As published with blocks of 128 x 128, each row's scale beside it."""
    pad = [0, -weight.shape[1] % SCALE_BLOCK, 0, -weight.shape[0] % SCALE_BLOCK]
    padded = torch.nn.functional.pad(weight.float(), pad)
    blocks = padded.unflatten(1, (-1, SCALE_BLOCK)).unflatten(0, (-1, SCALE_BLOCK))
    scales = (blocks.abs().amax((1, 3)) / 448).repeat_interleave(SCALE_BLOCK, 0)[: len(weight)].contiguous()
    spread = scales.repeat_interleave(SCALE_BLOCK, 1)[:, : weight.shape[1]]
    return Fp8Weight.of((weight.float() / spread).to(torch.float8_e4m3fn), scales)


QUANTISE = {"by row": quantise_rows, "by blocks": quantise_blocks}


def in_fp8(layer: Layer, how: str) -> Layer:
    names = ("qkv", "o", "gate_up", "down")
    return layer._replace(**{name: QUANTISE[how](getattr(layer, name)) for name in names})


def run_layer(layer, x, is_twin, tiles=None, up_to_queries=False):
    """All operations for rows ``x`` [rows, hidden], each fed with what the one before gave, or the first two."""
    rows, hidden = x.shape
    num_heads, kv_heads, head_dim = layer.heads
    device, dtype = x.device, x.dtype
    suffix = "_ref" if is_twin else ""
    chosen = {} if is_twin or tiles is None else {"tiles": tiles}

    def call(name: str, *args: object, **options: object) -> None:
        getattr(products, name + suffix)(*args, **options)

    def empty(width: int, **options: torch.dtype) -> Tensor:
        return torch.full((rows, width), float("nan"), device=device, **{"dtype": dtype, **options})

    normed = NormedRows(empty(hidden), empty(hidden), empty(products.num_groups(hidden), dtype=torch.float32))
    keys, values = (torch.zeros(2, kv_heads, rows + 3, head_dim, dtype=dtype, device=device) for _ in range(2))
    ints = torch.arange(rows, dtype=torch.int32, device=device)
    angles = (torch.arange(rows + 9, device=device)[:, None] * 0.3 + torch.arange(head_dim // 2, device=device)).float()
    out = HeadRows(angles.cos(), angles.sin(), ints + 5, ints[:1] + 1, ints, empty(num_heads * head_dim))
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    tiled = [products.tiled_heads(num_heads + 2 * kv_heads, head_dim)]
    tiled += [products.tiled_size(w.shape[0]) for w in weights[1:]]
    shapes = [products.product_shape(w) for w in weights]
    scratch = products.split_scratch(list(zip(shapes, tiled, strict=True)), max(rows, 256), x.device)
    bias = None if layer.bias is None else [layer.bias[: w.shape[0]] for w in weights]
    qkv_bias, o_bias, gate_bias, down_bias = bias or [None] * 4
    tap, gated, features, logits = empty(2 * hidden), empty(layer.down.shape[1]), empty(hidden), empty(150)
    # All four are FP8, or none is.
    lift = products.lift_of(layer.qkv, dtype)
    norm = layer.norm._replace(lift=lift)
    call("embed", x, ints, norm, normed, tap[:, :hidden])
    call("qkv_product", normed, norm, layer.qkv, qkv_bias, layer.head_norms, out, keys, values, scratch, **chosen)
    if up_to_queries:
        return {"query": out.query}
    call("add_product", out.query * lift, layer.o, o_bias, norm, normed, tap[:, hidden:], scratch, **chosen)
    call("gated_product", normed, norm, layer.gate_up, gate_bias, gated, scratch, lift, **chosen)
    call("add_product", gated, layer.down, down_bias, layer.norm, normed, None, scratch, **chosen)
    call("norm_rows", normed, layer.norm, features)
    call("head_product", normed, layer.norm, layer.head, logits, **chosen)
    found = {"query": out.query, "keys": keys[1].transpose(0, 1)[:rows], "values": values[1].transpose(0, 1)[:rows]}
    found |= {name: getattr(normed, name) for name in ("residual", "scaled", "squares")}
    found |= {"tap": tap, "gated": gated, "features": features, "logits": logits}
    return {name: value.flatten(1) for name, value in found.items()}


CASES = [
    (96, (3, 1, 32), 80, True),
    (576, (9, 3, 64), 1536, False),
    (512, (2, 2, 256), 48, True),
    (256, (4, 4, 80), 200, True),
    (192, (4, 2, 16), 72, False),
    (4096, (32, 8, 128), 14336, False),
]
TWINS = {(torch.float32, ""): [THIRTY_TWO[-1]], (torch.float16, ""): [ONE_PROGRAM, BULK]}
TWINS |= {(dtype, "by row"): [FP8_BY_ROW[-1]] for dtype in (torch.float16, torch.bfloat16)}
TWINS |= {(dtype, "by blocks"): [FP8[-1]] for dtype in (torch.float16, torch.bfloat16)}


@pytest.mark.parametrize(("dtype", "how"), TWINS)
@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=["extras", "plain"])
def test_kernels_are_their_twins(device: str, dtype: torch.dtype, how: str, case: Any) -> None:
    """A twin multiplies by the dequantised numbers, unrounded."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("in bfloat16 the interpreter does not multiply")
    hidden, heads, middle, has_extras = case
    layer = layer_of(dtype, device, hidden, heads, middle // 16 * 16 if how else middle, has_extras)
    layer = in_fp8(layer, how) if how else layer
    x = torch.randn(5, hidden, device=device).to(dtype)
    wanted = run_layer(layer, x, True)
    for tiles in (None, *TWINS[dtype, how]):
        found = run_layer(layer, x, False, tiles)
        for name, value in wanted.items():
            error = (found[name].float() - value.float()).abs().max() / value.float().abs().max()
            assert float(error) < 2 * OP_ATOL[dtype], (name, tiles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_fp8_number_is_widened_exactly(device: str, dtype: torch.dtype) -> None:
    """Row n of the weight has number n in a column of its own, which a row of ones on the diagonal picks."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("in bfloat16 the interpreter does not multiply")
    numbers = torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(1.0)
    values = torch.stack([numbers.roll(-64 * part) for part in range(4)])[:, :64]
    for column in (0, 1, 6, 7, 8, 15, 127):
        matrix = torch.zeros(256, 128, device=device)
        matrix[:, column] = values.flatten()
        norm = Norm(torch.ones(256, dtype=dtype, device=device), 1e-5, 1.0)
        residual, scaled = (torch.zeros(1, 256, dtype=dtype, device=device) for _ in range(2))
        rows = NormedRows(residual, scaled, torch.zeros(1, 4, device=device))
        weight = Fp8Weight.of(matrix.to(torch.float8_e4m3fn), torch.full((256, 1), 0.25, device=device))
        x = torch.zeros(1, 128, dtype=dtype, device=device)
        x[0, column] = products.lift_of(weight, dtype)
        scratch = products.split_scratch([(products.product_shape(weight), 256)], 64, x.device)
        for tiles in (None, *FP8_BY_ROW[-3:-1]):
            rows.residual.zero_()
            products.add_product(x, weight, None, norm, rows, None, scratch, tiles)
            assert torch.equal(rows.residual[0].float(), (matrix[:, column] * 0.25).to(dtype).float()), (column, tiles)


@pytest.mark.parametrize("case", sweep([*SPLITS, *MORE_SPLITS], *SPLITS))
def test_splits_of_long_products(device: str, case: tuple[str, ProductTiles | None]) -> None:
    """K in splits, added by the program that is done last, or by one program after another."""
    how, tiles = case
    layer = layer_of(torch.float16, device, 4096, (2, 1, 16), 32, False)
    layer = layer if how == "bf16" else in_fp8(layer, how)
    assert products.product_shape(layer.qkv).splits == 4
    x = torch.randn(3, 4096, device=device).half()
    wanted = run_layer(layer, x, True, up_to_queries=True)
    found = run_layer(layer, x, False, tiles, up_to_queries=True)
    torch.testing.assert_close(found["query"], wanted["query"], rtol=1e-2, atol=1e-2)


def test_a_residual_times_a_gain_fits_half_precision(device: str) -> None:
    """As in massive activations; beyond 65,504 there would be infinities."""
    x = torch.full((2, 64), 3.0e4, device=device).half()
    x[1] = 1.0e-3
    norm = Norm.of(torch.full((64,), 7.0, device=device).half(), 1e-5)
    assert norm.shrink == 0.125
    rows = NormedRows(torch.empty_like(x), torch.empty_like(x), torch.empty(2, 1, device=device))
    out = torch.empty_like(x)
    products.embed(x, torch.arange(2, dtype=torch.int32, device=device), norm, rows)
    products.norm_rows(rows, norm, out)
    wanted = 7 * x.double() / (x.double().pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "heads", "middle", "has_extras", "dtype", "how"),
    [
        *((*case, torch.bfloat16, None) for case in CASES),
        (*CASES[2], torch.float16, None),
        (*CASES[0], torch.float32, None),
        (*CASES[2], torch.float32, None),
        *((*case, torch.bfloat16, how) for case in (*CASES[:4], CASES[5]) for how in QUANTISE if case[2] % 16 == 0),
        (*CASES[5], torch.float16, "by row"),
    ],
)
def test_a_row_has_its_bits_in_every_tile(device, hidden, heads, middle, has_extras, dtype, how):
    layer = layer_of(dtype, device, hidden, heads, middle, has_extras)
    all_tiles = THIRTY_TWO if dtype == torch.float32 else SIXTEEN
    if how is not None:
        layer, all_tiles = in_fp8(layer, how), FP8_BY_ROW if how == "by row" else FP8
    x = torch.randn(300, hidden, device=device).to(dtype)
    # Rows are told by their positions, so rows of another place are compared where no position is read.
    whole = run_layer(layer, x, False)
    for count in (1, 60, 130, 300):
        for tiles in (None, *all_tiles):
            if tiles is not None and not tiles.sums_all_splits and count > 250:
                continue
            found = run_layer(layer, x[:count], False, tiles)
            for name, value in found.items():
                assert torch.equal(value, whole[name][:count]), (name, count, tiles)
    for row in (1, 8, 37, 299):
        alone, moved = run_layer(layer, x[row : row + 1], False), run_layer(layer, x.roll(5 - row, 0)[:60], False)
        assert torch.equal(alone["values"][0], whole["values"][row]), row
        assert torch.equal(moved["values"][5], whole["values"][row]), row
