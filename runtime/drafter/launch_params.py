"""Layouts of a stored head and launch parameters of the persistent drafter: pure functions of dimensions and device.

A head is packed once (`StoredLayout`), whatever the number of slots, the tree and the part of its vocabulary that
launches use. What may differ between them (`LaunchParams`) changes speed, and results only by the order of additions.
`tuned_cache` has better ones than these for what was tuned.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..errors import DrafterError
from ..settings import MAX_NEW_TOKENS
from .dimensions import DrafterConfig
from .kernels.packing import chunk_size, rows_per_program
from .kernels.weight_stream import Tile

PROJECTIONS = ("fc", "qkv", "o", "down")
"""Matrices of `projections`: they share the tile ``layer``."""
HEAD_ROWS = 256
"""LM-head rows of a program that are stored together: the most that are multiplied at a time."""
USUAL_NODES = 10
"""Nodes of a level that a layout is made for: EAGLE's ``top_k``, of one sequence."""


@dataclass(frozen=True)
class StoredLayout:
    """The layout of a head's weights in memory, the same for every launch.

    ``split``: programs that share the rows of a projection. ``chunks``: columns stored together, powers of two, of
    ``layer`` (`PROJECTIONS`), ``mlp`` (gate and up) and ``head``. ``head_rows``: LM-head rows of a program stored
    together, a power of two.
    """

    num_programs: int
    split: dict[str, int]
    chunks: dict[str, int]
    head_rows: int = HEAD_ROWS


@dataclass(frozen=True)
class LaunchParams:
    """Parameters of one kernel over weights of a layout; see `persistent.draft_kernel`.

    ``max_registers`` of a thread, 0 to let the assembler decide. ``tiles`` of ``layer``, ``mlp`` and ``head``.
    ``part_keys``: prefix keys from which attention is split over programs. ``block_keys``: keys per tile.
    """

    layout: StoredLayout
    num_warps: int
    max_registers: int
    tiles: dict[str, Tile]
    part_keys: int
    block_keys: int

    @property
    def num_programs(self) -> int:
        """Programs of the grid, each with a stream of its own."""
        return self.layout.num_programs

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the layout as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "layout"}

    @classmethod
    def from_json(cls, values: dict[str, Any], layout: StoredLayout) -> LaunchParams:
        """Invert `to_json`. Raises `TypeError` or `KeyError` for values that do not hold the whole launch."""
        tiles = {name: Tile(**values["tiles"][name]) for name in ("layer", "mlp", "head")}
        return cls(layout, **{**values, "tiles": tiles})


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU: ``capability`` as 90 for sm_90, shared memory per block in bytes, and multiprocessors."""

    name: str
    capability: int
    shared_bytes: int
    num_sms: int


INTERPRETER = Chip("interpreter", 0, 1 << 30, 1)
"""Stands for Triton's interpreter, where one program does everything."""


def chip_of(device: torch.device) -> Chip:
    """Describe the device kernels will run on."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs lack it
    capability = properties.major * 10 + properties.minor
    return Chip(properties.name, capability, shared_bytes, properties.multi_processor_count)


def matrix_shapes(cfg: DrafterConfig) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each matrix; ``mlp`` is gate and up, row by row side by side."""
    attention = cfg.num_heads * cfg.head_dim
    return {
        "fc": (cfg.hidden, cfg.fc_in),
        "qkv": (cfg.qkv_size, cfg.qkv_in),
        "o": (cfg.hidden, attention),
        "mlp": (cfg.intermediate, cfg.hidden),
        "down": (cfg.hidden, cfg.intermediate),
        "head": (cfg.draft_vocab, cfg.hidden),
    }


FREE_ROWS = 64
"""Rows that an H100 multiplies while it reads the weights: fewer would only cut new tokens into more passes."""


def padded_slots(cfg: DrafterConfig) -> int:
    """Round the number of slots up to a power of two."""
    return 1 << (cfg.num_slots - 1).bit_length()


def block_rows(cfg: DrafterConfig) -> int:
    """Return the activation rows of one tile, a power of two: a level's, or more where that is free, up to 16 a slot.

    Always 16 per slot for EAGLE-1/2 in front of FP8 weights, whose fc is outside the loop that repeats it.
    """
    largest, nodes = MAX_NEW_TOKENS * padded_slots(cfg), padded_slots(cfg) << (cfg.top_k - 1).bit_length()
    if cfg.kind == "eagle" and cfg.has_fp8:
        return largest
    return min(largest, max(nodes, FREE_ROWS))


def chunk_inputs(cfg: DrafterConfig) -> dict[str, list[int]]:
    """Return the numbers of columns that each tile's chunks must divide: whole products, and operands' segments."""
    layer = [matrix_shapes(cfg)[name][1] for name in PROJECTIONS]
    return {"layer": [cfg.hidden, *layer], "mlp": [cfg.hidden], "head": [cfg.hidden]}


def num_groups(split: int, num_programs: int) -> int:
    """Count groups of ``split`` programs; the last few programs may be in none, and fewer than that make one."""
    return max(1, num_programs // split)


def group_rows(cfg: DrafterConfig, name: str, split: int, num_programs: int) -> int:
    """Count the rows of a projection that ``split`` programs own together."""
    return rows_per_program(matrix_shapes(cfg)[name][0], num_groups(split, num_programs))


def stage_bytes(cfg: DrafterConfig, name: str, tile: Tile) -> int:
    """Return the shared memory of one stage of a product: a tile of weights and one of activations."""
    weights = (2 if name == "mlp" else 1) * tile.block_n * cfg.weight_dtype.itemsize
    # FP8 activations are pairs: two bytes as well.
    return tile.block_k * (weights + block_rows(cfg) * cfg.dtype.itemsize)


def choose_layout(cfg: DrafterConfig, chip: Chip) -> StoredLayout:
    """Derive a layout from a head's dimensions: what is best for one sequence, whatever its draft vocabulary.

    Raises `DrafterError` for FP8 weights below sm_89 and for sizes that 16 does not divide.
    """
    if cfg.has_fp8 and 0 < chip.capability < 89:
        raise DrafterError(f"FP8 weights need sm_89 or later; this is {chip.name}. Use the head's own dtype.")
    cfg = replace(cfg, num_slots=1)
    split = {name: fit_split(cfg, name, chip) for name in PROJECTIONS}
    owned = {**_owned_rows(cfg, split, chip.num_sms), "head": HEAD_ROWS}
    chunks = {name: _choose_tile(cfg, name, owned[name], chip).block_k for name in owned}
    return StoredLayout(chip.num_sms, split, chunks)


def choose_launch(cfg: DrafterConfig, chip: Chip, layout: StoredLayout | None = None) -> LaunchParams:
    """Derive parameters over a layout (`choose_layout`'s): tiles of about 32 KB, at most 5 stages. Raises as that."""
    layout = choose_layout(cfg, chip) if layout is None else layout
    owned = _owned_rows(cfg, layout.split, layout.num_programs)
    chunks = {name: chunk for name, chunk in layout.chunks.items() if name != "head"}
    tiles = {name: _choose_tile(cfg, name, owned[name], chip, chunks.get(name)) for name in owned}
    return LaunchParams(
        layout,
        num_warps=8 if chip.capability else 1,
        # For sm_80 CUDA 12.8 makes room for a second program that never comes, and spills.
        max_registers=255 if chip.capability == 80 else 0,
        tiles=tiles,
        part_keys=64,
        block_keys=32 if cfg.head_dim > 128 or chip.capability == 89 or cfg.has_fp8 else 64,
    )


def _owned_rows(cfg: DrafterConfig, split: dict[str, int], num_programs: int) -> dict[str, int]:
    """Count the rows of a program of each tile, of ``layer`` the largest of a group."""
    return {
        "layer": max(group_rows(cfg, name, split[name], num_programs) for name in PROJECTIONS),
        "mlp": rows_per_program(cfg.intermediate, num_programs),
        "head": rows_per_program(cfg.draft_vocab, num_programs),
    }


def _max_tile_rows(cfg: DrafterConfig, name: str) -> int:
    """Return the most rows of a tile: accumulators of 128 registers a thread leave room for everything else."""
    # FP8 activations are pairs, and each chunk's sum comes beside the sum so far.
    columns = block_rows(cfg) * (4 if cfg.has_fp8 else 1)
    return min(256, 32768 // (2 if name == "mlp" else 1) // columns)


WORTH_SPLITTING = 8 << 20
"""Bytes that all programs together read of an operand, from which on groups save more than their barrier costs."""


def fit_split(cfg: DrafterConfig, name: str, chip: Chip) -> int:
    """Programs to a group, 4 at most (`projections.add_splits`), whose rows fit one tile of 128; 1 for small operands.

    One answer for all numbers of slots and all trees: what is best for one sequence.
    """
    if chip.num_sms == 1:
        return 2
    operand = USUAL_NODES * matrix_shapes(cfg)[name][1] * cfg.dtype.itemsize
    if operand * chip.num_sms < WORTH_SPLITTING:
        return 1
    for split in (4, 2):
        rows = group_rows(cfg, name, split, chip.num_sms)
        fits = rows <= min(128, _max_tile_rows(replace(cfg, num_slots=1), name))
        if fits and chip.num_sms % split == 0:
            return split
    return 1


def _choose_tile(cfg: DrafterConfig, name: str, owned: int, chip: Chip, max_columns: int | None = None) -> Tile:
    rows, copies, inputs = block_rows(cfg), 2 if name == "mlp" else 1, chunk_inputs(cfg)[name]
    # wgmma multiplies 64 rows at a time; rows beyond those owned are masked.
    least = 64 if chip.capability >= 90 and 64 * rows * copies <= 16384 else 16
    block_n = max(least, min(1 << (owned - 1).bit_length(), _max_tile_rows(cfg, name), 128 if name == "layer" else 256))
    largest = max(64, min(256, 32768 // (copies * block_n * cfg.weight_dtype.itemsize)))
    largest = largest if max_columns is None else min(largest, max_columns)
    block_k = chunk_size(math.gcd(*inputs), 1 << (largest.bit_length() - 1))
    if block_k == 0:
        raise DrafterError(f"{name}: not all of {inputs} inputs are multiples of 16.")
    budget = int(chip.shared_bytes * 0.9)
    while block_k > 32 and budget // stage_bytes(cfg, name, Tile(block_n, block_k, 1)) < 4:
        block_k //= 2
    stages = budget // stage_bytes(cfg, name, Tile(block_n, block_k, 1))
    return Tile(block_n, block_k, max(1, min(5, stages)))
