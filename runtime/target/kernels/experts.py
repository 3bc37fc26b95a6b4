"""The experts of a mixture's layer: the router's choice, gate and up, down, and their sum, each with its twin.

As in `products`: between the products the rows are `NormedRows`, sums are fp32 and rounded once. The kernels are
`expert_kernels`'; what is fixed for a row and what is chosen for speed is said there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..fp8 import Fp8Weight
from ..mxfp4 import ExpertWeight, Mxfp4Weight
from . import expert_kernels as kernels
from .expert_kernels import ExpertGrid, Picks
from .machine import num_processors, overlapping, overwrites_operands, shared_memory
from .product_kernels import ProductShape, ProductTiles
from .products import Norm, NormedRows, factor_args, multiply, precision_of, put_residual_ref, source_of, tap_args

_ROUTER_SPLIT = 512
"""Columns of a router that a program multiplies by: a constant that decides bits."""
_CUT_DEPTH = 2048
"""Columns from which on the last product of an expert is cut, which decides bits, too."""
_FEW_PAIRS = 512
"""Pairs that programs look through by themselves, and whose results the program done last adds; more are listed."""
_BY_PAIR = 16
"""Pairs that always have places of their own; of more, up to the number of experts, programs take experts in turn,
unless weights are packed."""
_COMBINED = 16
"""Rows that are added at a time."""
_MAX_SHARES = 4
"""Programs that share an expert's rows."""
_TILES: Mapping[str, tuple[ProductTiles, ...]] = {
    "plain": (
        ProductTiles(64, 128, 16, 4, 4, ahead=256),
        ProductTiles(64, 128, 32, 4, 3, ahead=256),
        ProductTiles(128, 64, 64, 8, 3),
        ProductTiles(128, 64, 128, 8, 3),
    ),
    "fp8": (
        ProductTiles(64, 128, 16, 4, 4, ahead=256),
        ProductTiles(64, 128, 32, 4, 3, ahead=256),
        ProductTiles(64, 128, 64, 4, 3),
    ),
    # Of more rows two sums at once, of a step and of all before it, do not fit into the registers.
    "fp8 by blocks": (ProductTiles(64, 128, 16, 4, 4, ahead=256), ProductTiles(64, 128, 32, 4, 3, ahead=256)),
    "mxfp4": (
        # A cache line of a row a step. Of 8 rows Triton 3.6 would take mma.sync, which rounds otherwise than wgmma.
        ProductTiles(64, 256, 16, 4, 3, ahead=512, max_registers=168),
        ProductTiles(64, 128, 32, 4, 3, ahead=512),
        ProductTiles(64, 128, 64, 4, 3),
    ),
    "fp32": (ProductTiles(64, 32, 16, 4, 2), ProductTiles(64, 32, 32, 4, 2)),
}
"""By the rows that an expert has in the mean, or the most."""
_TILES_BY_PAIRS: Mapping[str, tuple[tuple[int, ProductTiles, ProductTiles], ...]] = {
    # Wide tiles where so few are left that each program has one; else as many programs as can be.
    "plain": (
        (32, ProductTiles(128, 64, 16, 4, 5), ProductTiles(64, 128, 16, 4, 3, ahead=256)),
        (_FEW_PAIRS, ProductTiles(64, 128, 16, 4, 3), ProductTiles(64, 128, 16, 4, 3, ahead=256)),
    ),
    "fp8": ((_FEW_PAIRS, ProductTiles(128, 128, 16, 4, 4), ProductTiles(64, 128, 16, 4, 4, ahead=256)),),
}
"""Of more than `_BY_PAIR` pairs, up to the number of experts: most pairs, tiles of gate and up, and of down."""


class Clamp(NamedTuple):
    """Numbers of gpt-oss' SwiGLU, ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Gate and up are at most ``limit``, up also at least its negative.
    """

    alpha: float
    limit: float

    def gated(self, both: Tensor) -> Tensor:
        """Compute it of ``both``, gates and ups in turn [rows, 2 * width]: [rows, width]."""
        gate, up = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class Biases(NamedTuple):
    """Biases of a router [experts], of gate and up [experts * 2 * width] and of down [experts * hidden]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Experts:
    """The router and the experts of a layer.

    ``router`` [experts, hidden]; ``gate_up`` [experts * 2 * width, hidden], an expert's gate before its up, and
    ``down`` [experts * hidden, width], in the model's type, FP8 or MXFP4. ``normalises``: the weights of a row's
    ``top_k`` experts are divided by their sum. With ``biases`` and a ``clamp`` the softmax is over the chosen experts
    alone, and rows of gate and up take turns (gpt-oss).
    """

    router: Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    top_k: int
    normalises: bool
    biases: Biases | None = None
    clamp: Clamp | None = None

    @property
    def count(self) -> int:
        """Experts of the layer."""
        return self.router.shape[0]

    @property
    def width(self) -> int:
        """Columns of an expert's gate, and of its up."""
        return self.down.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of all experts, but for scales of FP8."""
        weights = (self.gate_up, self.down)
        return sum((each if isinstance(each, Mxfp4Weight) else source_of(each)).nbytes for each in weights)


@dataclass(frozen=True)
class Routing:
    """Buffers of a forward's rows and their experts.

    ``gated`` [pairs, width] of the model's type; ``parts`` fp32 [at least pairs, hidden], what each of a row's experts
    gives, of few pairs by splits of K.
    """

    picks: Picks
    gated: Tensor
    parts: Tensor

    @classmethod
    def allocate(cls, experts: Experts, rows: int) -> Routing:
        """Allocate for layers of these dimensions and up to ``rows`` rows."""
        hidden, device, pairs = experts.router.shape[1], experts.router.device, rows * experts.top_k
        splits, listed = router_shape(experts.router).splits, pairs > _FEW_PAIRS

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        picks = Picks(
            ints(rows, experts.top_k),
            floats(rows, experts.top_k),
            ints(experts.count),
            ints(experts.count, rows if listed else 0),
            floats(rows, splits, experts.count),
            ints(max(-(-rows // 16), -(-hidden // 64))),
        )
        gated = torch.empty((pairs, experts.width), dtype=experts.router.dtype, device=device)
        parts = max(pairs, down_shape(experts, experts.router).splits * min(pairs, _FEW_PAIRS))
        return cls(picks, gated, floats(parts, hidden))


def router_shape(router: Tensor) -> ProductShape:
    """Return what decides the bits of a router's logits."""
    size, depth = router.shape
    return ProductShape(size, depth, -(-depth // _ROUTER_SPLIT), _ROUTER_SPLIT, precision_of(router))


def expert_shape(weight: ExpertWeight, count: int, x: Tensor) -> ProductShape:
    """Return what decides the bits of a product of ``x`` with one of ``count`` experts: K is whole."""
    rows, depth = weight.shape
    groups = weight.scales.shape[1] if isinstance(weight, Fp8Weight) else 0
    fp4_rows = rows if isinstance(weight, Mxfp4Weight) else 0
    return ProductShape(rows // count, depth, 1, depth, precision_of(x), groups, fp4_rows)


def down_shape(experts: Experts, x: Tensor) -> ProductShape:
    """Return what decides the bits of an expert's last product: a long K is cut in two."""
    shape = expert_shape(experts.down, experts.count, x)
    if shape.depth < _CUT_DEPTH:
        return shape
    return replace(shape, splits=2, split_size=triton.cdiv(shape.depth, 512) * 256)


def route_ref(rows: NormedRows, norm: Norm, experts: Experts, kv_rows: Tensor, routing: Routing) -> None:
    """Choose each row's experts, of equal logits the lower id, as transformers does: logits are rounded to its type.

    A row whose ``kv_rows`` int32 [rows] is -1 is read by nobody, and goes to no expert.
    """
    picks, count = routing.picks, len(kv_rows)
    logits = (rows.scaled.float() / norm.lift) @ experts.router.float().t() * rows.factor(norm)
    if experts.biases is not None:
        logits += experts.biases.router.float()
    logits = logits.to(experts.router.dtype).float()
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = logits.softmax(1).gather(1, order) if experts.biases is None else logits.gather(1, order).softmax(1)
    if experts.normalises:
        weights /= weights.sum(1, keepdim=True)
    picks.experts[:count] = torch.where(kv_rows[:, None] >= 0, order, experts.count)
    picks.weights[:count] = weights.to(experts.router.dtype).float()


def route(rows: NormedRows, norm: Norm, experts: Experts, kv_rows: Tensor, routing: Routing) -> None:
    """Run `route_ref` as one launch, and list the pairs of each expert in another where they are many."""
    count, shape = len(rows.scaled), router_shape(experts.router)
    overlaps, options = overlapping(rows.scaled.device)
    # All of a program's weights are asked for before it waits.
    tiles = ProductTiles(64, 128, 16 if count <= 64 else 32, 4, 3, ahead=_ROUTER_SPLIT)
    if shape.precision == "ieee":
        tiles = replace(tiles, block_k=32, num_stages=2)
    grid = _grid(experts, count, 1)
    factor = factor_args(rows, norm)
    factor = factor._replace(unshrink=factor.unshrink / norm.lift)
    constants = {"SHAPE": shape, "TILES": tiles, "GRID": grid, "NORMALISES": experts.normalises}
    constants |= {"BLOCK": _power(shape.size), "SLOTS": _power(experts.top_k), "OVERLAP": overlaps}
    programs = triton.cdiv(count, tiles.block_rows) * triton.cdiv(shape.size, tiles.block_n) * shape.splits
    bias = None if experts.biases is None else experts.biases.router
    given = rows.scaled, experts.router, bias, factor, kv_rows, count, routing.picks
    kernels.route_kernel[(programs,)](*given, **constants, num_warps=4, **options)
    if grid.block == 0:
        constants = {"GRID": grid, "BLOCK": 1024, "OVERLAP": overlaps, "num_warps": 4}
        kernels.group_kernel[(experts.count,)](routing.picks, count, **constants, **options)


def gated_experts_ref(rows: NormedRows, norm: Norm, experts: Experts, routing: Routing, lift: float = 1.0) -> None:
    """Write ``silu(gate) * up * lift`` of every row's experts to ``routing.gated``, or what their `Clamp` says."""
    count = len(rows.scaled)
    factor, picked = rows.factor(norm), routing.picks.experts[:count].flatten()
    for expert in picked[picked < experts.count].unique().tolist():
        pairs = (picked == expert).nonzero()[:, 0]
        row = pairs // experts.top_k
        both = multiply(rows.scaled[row], _of_expert(experts.gate_up, expert, experts.count)) * factor[row]
        if experts.clamp is not None and experts.biases is not None:
            value = experts.clamp.gated(both + experts.biases.gate_up.view(experts.count, -1)[expert].float())
        else:
            gate, up = both.chunk(2, -1)
            value = F.silu(gate) * up
        routing.gated[pairs] = (value * lift).to(routing.gated.dtype)


def gated_experts(rows: NormedRows, norm: Norm, experts: Experts, routing: Routing, lift: float = 1.0) -> None:
    """Run `gated_experts_ref` as one launch."""
    count, shape = len(rows.scaled), expert_shape(experts.gate_up, experts.count, rows.scaled)
    tiles, grid = _tiles(experts, shape, count, routing.gated, False)
    bias = None if experts.biases is None else experts.biases.gate_up
    weights = *_weight_args(rows.scaled, experts.gate_up), bias
    given = *weights, factor_args(rows, norm), routing.picks, count, routing.gated
    overlaps, options = overlapping(routing.gated.device)
    constants = {"SHAPE": shape, "TILES": tiles, "GRID": grid, "LIFT": lift, "OVERLAP": overlaps}
    constants["CLAMP"] = experts.clamp
    constants |= {"num_warps": tiles.num_warps, "maxnreg": tiles.max_registers}
    parts = triton.cdiv(experts.width, tiles.block_n // 2)
    programs = _programs(grid, tiles, count, parts, rows.scaled)
    kernels.gated_experts_kernel[(programs,)](*given, **constants, **options)


def add_experts_ref(
    experts: Experts, routing: Routing, norm: Norm, rows: NormedRows, tap: Tensor | None = None
) -> None:
    """Add what every row's experts give, in the order of its slots, times their weights, to the residual and ``tap``.

    ``routing.gated`` is `lift_of` times too large, as ``x`` of `add_product_ref`.
    """
    count, picks = len(rows.residual), routing.picks
    picked = picks.experts[:count].flatten()
    parts = routing.parts[: len(picked)].zero_()
    for expert in picked[picked < experts.count].unique().tolist():
        pairs = (picked == expert).nonzero()[:, 0]
        parts[pairs] = multiply(routing.gated[pairs], _of_expert(experts.down, expert, experts.count))
        if experts.biases is not None:
            parts[pairs] += experts.biases.down.view(experts.count, -1)[expert].float()
    total = torch.zeros_like(parts[:count])
    for slot in range(experts.top_k):
        total += picks.weights[:count, slot, None] * parts.view(count, experts.top_k, -1)[:, slot]
    put_residual_ref(rows.residual.float() + total, norm, rows, tap)


def add_experts(experts: Experts, routing: Routing, norm: Norm, rows: NormedRows, tap: Tensor | None = None) -> None:
    """Run `add_experts_ref` as one launch, or two where pairs are many.

    `gated_experts` must be the operation before: its launch lets this one read where rows go.
    """
    count, hidden = rows.residual.shape
    shape = down_shape(experts, routing.gated)
    tiles, grid = _tiles(experts, shape, count, rows.residual, True)
    # An expert's product is done sooner, and needs registers for one sum.
    grid = replace(grid, apart=shape.splits > 1 and grid.combines)
    overlaps, options = overlapping(rows.residual.device)
    shared = {"GRID": grid, "TAP": tap is not None, "OVERLAP": overlaps}
    ends = norm.gain, norm.shrink * norm.lift
    bias = None if experts.biases is None else experts.biases.down
    given = *_weight_args(routing.gated, experts.down), bias, *ends, routing.picks, count, routing.parts
    tap_of = tap_args(rows, tap)
    constants = shared | {"SHAPE": shape, "TILES": tiles, "COMBINED": _COMBINED}
    constants |= {"num_warps": tiles.num_warps, "maxnreg": tiles.max_registers}
    parts = triton.cdiv(hidden, tiles.block_n) * (shape.splits if grid.apart else 1)
    programs = _programs(grid, tiles, count, parts, routing.gated)
    kernels.add_experts_kernel[(programs,)](*given, rows, tap_of, **constants, **options)
    if not grid.combines:
        constants = shared | {"SIZE": hidden, "BLOCK_N": 128, "BLOCK_ROWS": _COMBINED, "num_warps": 4}
        blocks = triton.cdiv(count, _COMBINED), triton.cdiv(hidden, 128)
        kernels.combine_kernel[blocks](routing.parts, routing.picks, *ends, count, rows, tap_of, **constants, **options)


def _of_expert(weight: ExpertWeight, expert: int, count: int) -> ExpertWeight:
    if isinstance(weight, Mxfp4Weight):
        return weight.of_expert(expert, count)
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.words.chunk(count)[expert], weight.scales.chunk(count)[expert])
    return weight.chunk(count)[expert]


def _weight_args(x: Tensor, weight: ExpertWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    return x, source_of(weight), None if isinstance(weight, Tensor) else weight.scales


def _power(size: int) -> int:
    """Return the power of two, at least 2, that ``size`` places fit in."""
    return max(2, 1 << (size - 1).bit_length())


def _grid(experts: Experts, rows: int, shares: int, has_turns: bool = False) -> ExpertGrid:
    """Return the grid for some rows; of few pairs no expert's rows are shared."""
    pairs = rows * experts.top_k
    if pairs > _FEW_PAIRS:
        return ExpertGrid(experts.count, experts.top_k, 0, False, False, shares, False)
    in_turn, by_pair = has_turns and pairs > _BY_PAIR, pairs <= experts.count
    return ExpertGrid(
        experts.count, experts.top_k, _power(pairs), by_pair and not in_turn, by_pair and in_turn, 1, True
    )


def _programs(grid: ExpertGrid, tiles: ProductTiles, rows: int, parts: int, x: Tensor) -> int:
    """Count the programs of a launch over ``parts`` of each expert; in turn, as many as are resident at once."""
    places: int = rows * grid.top_k if grid.by_pair or grid.in_turn else grid.experts
    programs = places * grid.shares * parts
    if not grid.in_turn:
        return programs
    memory = tiles.num_stages * tiles.block_k * (tiles.block_n + tiles.block_rows) * x.element_size() + 1024
    return min(programs, max(1, shared_memory(x.device) // memory) * num_processors(x.device))


def _tiles(
    experts: Experts, shape: ProductShape, rows: int, x: Tensor, is_down: bool
) -> tuple[ProductTiles, ExpertGrid]:
    """Choose tiles and grid: of few pairs for few rows, else for twice as many rows of an expert as in the mean."""
    pairs = rows * experts.top_k
    wanted = 16 if pairs <= _FEW_PAIRS else 2 * pairs // experts.count
    plain = "fp32" if x.dtype == torch.float32 else "plain"
    kind = "mxfp4" if shape.fp4_rows else (plain, "fp8", "fp8 by blocks")[min(shape.groups, 2)]
    known = _TILES[kind]
    if shape.fp4_rows and x.dtype == torch.float32:
        # 64 rows of float32 do not fit into the shared memory of smaller chips.
        known = known[:2]
    tiles = next((each for each in known if each.block_rows >= wanted), known[-1])
    grid = _grid(experts, rows, min(_MAX_SHARES, triton.cdiv(rows, tiles.block_rows)), shape.packed == 1)
    if _BY_PAIR < pairs <= experts.count:
        for most, *both in _TILES_BY_PAIRS.get(kind, ()):
            if pairs <= most:
                tiles = both[is_down]
                break
    is_widened = shape.groups == 1 or shape.fp4_rows > 0
    is_hopper = overwrites_operands(x.device)
    # Elsewhere a limit spills.
    tiles = replace(tiles, waits=is_widened and is_hopper, max_registers=tiles.max_registers if is_hopper else None)
    return tiles, grid
