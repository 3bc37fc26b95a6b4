"""Tile sizes and pipeline depths of the persistent drafter: a pure function of dimensions and device, and a tuned
cache.

`choose_launch` derives parameters that fit any supported chip; `TunedCache` looks them up for (GPU, dimensions,
dtypes, rows) in ``tuned.json`` beside this file or in the file named by ``EAGLE_SLIM_TUNED``. Both give the same
results, only at different speed.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..drafter.config import MAX_NEW_TOKENS, DrafterConfig
from ..errors import DrafterError
from .packing import chunk_size, rows_per_program
from .weight_stream import Tile

PROJECTIONS = ("fc", "qkv", "o", "down")
"""Matrices of `projections`: they share the tile ``layer``."""
MAX_SPLIT = 4
"""Most programs to a group: the terms of `projections.sum_parts`."""


@dataclass(frozen=True)
class LaunchParams:
    """How one kernel is compiled and launched; see `persistent.draft_kernel`.

    ``max_registers`` of a thread, 0 to let the assembler decide. ``tiles`` of ``layer`` (`PROJECTIONS`), ``mlp`` (gate
    and up) and ``head``. ``split``: programs that share the rows of a projection.
    ``part_keys``: prefix keys from which attention is split over programs. ``block_keys``: keys per tile.
    """

    num_programs: int
    num_warps: int
    max_registers: int
    tiles: dict[str, Tile]
    split: dict[str, int]
    part_keys: int
    block_keys: int

    def __post_init__(self) -> None:
        """Raise `DrafterError` for what the kernel would compute wrongly."""
        if not all(1 <= split <= MAX_SPLIT for split in self.split.values()):
            raise DrafterError(f"split must be 1 to {MAX_SPLIT}; got {self.split}.", split=self.split)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LaunchParams:
        """Inverse of `to_json`."""
        tiles = {name: Tile(**tile) for name, tile in values["tiles"].items()}
        return cls(**{**values, "tiles": tiles})


@dataclass(frozen=True)
class Chip:
    """What a launch depends on: ``capability`` as 90 for sm_90, shared memory per block in bytes, and SMs."""

    name: str
    capability: int
    shared_bytes: int
    num_sms: int


# Opt-in shared memory per block: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
KNOWN_CHIPS = {
    80: Chip("sm_80", 80, 166912, 108),
    89: Chip("sm_89", 89, 101376, 128),
    90: Chip("sm_90", 90, 232448, 132),
    100: Chip("sm_100", 100, 232448, 148),
}
INTERPRETER = Chip("interpreter", 0, 1 << 30, 1)
"""One program does everything, one after the other."""


def in_features(cfg: DrafterConfig) -> dict[str, int]:
    """Inputs of each matrix."""
    attention = cfg.num_heads * cfg.head_dim
    return {
        "fc": cfg.fc_in, "qkv": cfg.qkv_in, "o": attention, "mlp": cfg.hidden, "down": cfg.intermediate,
        "head": cfg.hidden,
    }  # fmt: skip


def out_features(cfg: DrafterConfig) -> dict[str, int]:
    """Outputs of each matrix; ``mlp`` is gate and up, row by row side by side."""
    return {
        "fc": cfg.hidden, "qkv": cfg.qkv_size, "o": cfg.hidden, "mlp": cfg.intermediate, "down": cfg.hidden,
        "head": cfg.draft_vocab,
    }  # fmt: skip


def block_rows(cfg: DrafterConfig) -> int:
    """Rows of activations in one tile: 16 per slot, a power of two."""
    return MAX_NEW_TOKENS * (1 << (cfg.num_slots - 1).bit_length())


def chunk_inputs(cfg: DrafterConfig) -> dict[str, list[int]]:
    """Numbers of inputs that chunks of each tile must divide: of whole products, and of an operand's segments."""
    inputs = in_features(cfg)
    return {
        "layer": [cfg.hidden, *(inputs[name] for name in PROJECTIONS)], "mlp": [cfg.hidden], "head": [cfg.hidden],
    }  # fmt: skip


def num_groups(split: int, num_programs: int) -> int:
    """Groups of ``split`` programs; the last few programs may be in none, and fewer programs than that make one."""
    return max(1, num_programs // split)


def group_rows(cfg: DrafterConfig, name: str, split: int, num_programs: int) -> int:
    """Rows of a projection that ``split`` programs own together."""
    return rows_per_program(out_features(cfg)[name], num_groups(split, num_programs))


def stage_bytes(cfg: DrafterConfig, name: str, tile: Tile) -> int:
    """Shared memory that one stage of a product takes: a tile of weights and one of activations."""
    weights = (2 if name == "mlp" else 1) * tile.block_n * cfg.weight_dtype.itemsize
    # FP8 activations are pairs: two bytes as well.
    return tile.block_k * (weights + block_rows(cfg) * cfg.dtype.itemsize)


def choose_launch(cfg: DrafterConfig, chip: Chip) -> LaunchParams:
    """Derive parameters from dimensions: tiles of about 32 KB, as many stages as shared memory holds, at most 5.

    Raises `DrafterError` for FP8 weights below sm_89 and for sizes that 16 does not divide.
    """
    fp8 = cfg.weight_dtype.itemsize == 1
    if fp8 and 0 < chip.capability < 89:
        raise DrafterError(
            f"FP8 weights need sm_89 or later; this is {chip.name}. Use the head's own dtype.",
            field="weight_dtype",
            chip=chip.name,
        )
    split = {name: fit_split(cfg, name, chip) for name in PROJECTIONS}
    owned = {
        "layer": max(group_rows(cfg, name, split[name], chip.num_sms) for name in PROJECTIONS),
        "mlp": rows_per_program(cfg.intermediate, chip.num_sms),
        "head": rows_per_program(cfg.draft_vocab, chip.num_sms),
    }
    tiles = {name: _choose_tile(cfg, name, owned[name], sizes, chip) for name, sizes in chunk_inputs(cfg).items()}
    return LaunchParams(
        num_programs=chip.num_sms, num_warps=8 if chip.capability else 1,
        # For sm_80 CUDA 12.8 makes room for a second program that never comes, and spills.
        max_registers=255 if chip.capability == 80 else 0, tiles=tiles, split=split,
        part_keys=64, block_keys=32 if cfg.head_dim > 128 or chip.capability == 89 or fp8 else 64,
    )  # fmt: skip


def _most_rows(cfg: DrafterConfig, name: str) -> int:
    """Rows of a tile: fp32 accumulators of 128 registers a thread at 256 threads leave room for everything else."""
    # FP8 activations are pairs, and each chunk's sum comes beside the sum so far.
    columns = block_rows(cfg) * (1 if cfg.weight_dtype == cfg.dtype else 4)
    return min(256, 32768 // (2 if name == "mlp" else 1) // columns)


WORTH_SPLITTING = 8 << 20
"""Bytes of an operand that all programs together read of it, from which groups save more than their barrier costs."""


def fit_split(cfg: DrafterConfig, name: str, chip: Chip, most: int = MAX_SPLIT) -> int:
    """Programs to a group, at most ``most``, whose rows fit one tile of 128; 1 where operands are small."""
    if chip.num_sms == 1:
        return min(2, most)
    operand = cfg.num_slots * cfg.top_k * in_features(cfg)[name] * cfg.dtype.itemsize
    if operand * chip.num_sms < WORTH_SPLITTING:
        return 1
    for split in (4, 2):
        rows = group_rows(cfg, name, split, chip.num_sms)
        if split <= most and chip.num_sms % split == 0 and rows <= min(128, _most_rows(cfg, name)):
            return split
    return 1


def _choose_tile(cfg: DrafterConfig, name: str, owned: int, inputs: list[int], chip: Chip) -> Tile:
    rows, copies = block_rows(cfg), 2 if name == "mlp" else 1
    # wgmma multiplies 64 rows at a time; rows beyond those owned are masked.
    least = 64 if chip.capability >= 90 and 64 * rows * copies <= 16384 else 16
    block_n = max(least, min(1 << (owned - 1).bit_length(), _most_rows(cfg, name), 128 if name == "layer" else 256))
    largest = max(64, min(256, 32768 // (copies * block_n * cfg.weight_dtype.itemsize)))
    block_k = chunk_size(math.gcd(*inputs), 1 << (largest.bit_length() - 1))
    if block_k == 0:
        raise DrafterError(f"{name}: not all of {inputs} inputs are multiples of 16.", tile=name)
    budget = int(chip.shared_bytes * 0.9)
    while block_k > 32 and budget // stage_bytes(cfg, name, Tile(block_n, block_k, 1)) < 4:
        block_k //= 2
    stages = budget // stage_bytes(cfg, name, Tile(block_n, block_k, 1))
    return Tile(block_n, block_k, max(1, min(5, stages)))


def cache_key(cfg: DrafterConfig, chip: Chip) -> str:
    """Name an entry of the tuned cache: everything that the speed of a launch depends on."""
    weight = str(cfg.weight_dtype).removeprefix("torch.")
    sizes = "-".join(
        f"{label}{value}"
        for label, value in (
            ("h", cfg.hidden), ("i", cfg.intermediate), ("q", cfg.num_heads), ("kv", cfg.num_kv_heads),
            ("d", cfg.head_dim), ("f", cfg.feature_width), ("v", cfg.draft_vocab), ("k", cfg.top_k),
            ("m", block_rows(cfg)),
        )
    )  # fmt: skip
    return f"{chip.name}/{cfg.kind}-{sizes}/{str(cfg.dtype).removeprefix('torch.')}-{weight}"


class TunedCache:
    """Tuned parameters by `cache_key`, in one JSON file; counts its hits and misses.

    Raises `DrafterError` for a file of another kind. A file that does not exist is an empty cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hits = 0
        self.misses = 0
        self.entries: dict[str, Any] = {}
        try:
            if path.exists():
                self.entries = json.loads(path.read_text())
            for values in self.entries.values():
                LaunchParams.from_json(values)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise DrafterError(
                f"{path} is not a cache of launch parameters ({type(error).__name__}: {error}). Name a file that "
                "python -m eagle_slim.runtime.tune --out wrote, or one that does not exist yet (EAGLE_SLIM_TUNED).",
                path=path,
            ) from error

    def lookup(self, cfg: DrafterConfig, chip: Chip, strict: bool = False) -> LaunchParams:
        """Return the tuned parameters, or `choose_launch`'s; ``strict`` makes a miss a `DrafterError`."""
        key = cache_key(cfg, chip)
        found = self.entries.get(key)
        if found is not None:
            self.hits += 1
            return LaunchParams.from_json(found)
        self.misses += 1
        if strict:
            raise DrafterError(
                f"No tuned launch parameters for {key} in {self.path.name}, and strict mode is on. Run "
                "python -m eagle_slim.runtime.tune for this head, or switch strict mode off.",
                key=key,
                path=self.path,
            )
        return choose_launch(cfg, chip)

    def store(self, cfg: DrafterConfig, chip: Chip, params: LaunchParams) -> None:
        """Keep parameters in memory; `save` writes them."""
        self.entries[cache_key(cfg, chip)] = params.to_json()

    def save(self) -> None:
        """Write the file whole or not at all."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.entries, indent=1, sort_keys=True) + "\n")
        os.replace(temporary, self.path)


def default_cache() -> TunedCache:
    """The cache named by ``EAGLE_SLIM_TUNED``, or the one that ships."""
    return TunedCache(Path(os.environ.get("EAGLE_SLIM_TUNED") or Path(__file__).with_name("tuned.json")))


def is_strict() -> bool:
    """Whether ``EAGLE_SLIM_STRICT`` asks that a missing cache entry be an error."""
    return os.environ.get("EAGLE_SLIM_STRICT", "").strip().lower() not in ("", "0", "false", "no", "off")
