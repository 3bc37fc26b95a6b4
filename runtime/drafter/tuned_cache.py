"""Tuned layouts and launch parameters of the persistent drafter: a cache in one JSON file.

`TunedCache` looks up layouts by (GPU, a head's dimensions, types) and launch parameters by these, the LM-head rows in
use and slots, in ``tuned.json`` beside this file or in the file named by ``EAGLE_SLIM_TUNED``; what it does not hold,
`launch_params` derives. Neither the tree nor the length of the KV cache is a key. Both give the same results, only at
different speed. The same file holds tiles of the target's kernels; `launches` has what they all share, and
``python -m eagle_slim.runtime.tune`` fills it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from eagle_slim.vocab_tools.files import write_file

from ..errors import DrafterError, UsageError
from ..launches import not_a_cache, not_a_shape, note, read_tuned, recorded_lines, tiles_of, tuned_path
from .dimensions import DrafterConfig
from .launch_params import Chip, LaunchParams, StoredLayout, block_rows, choose_launch, choose_layout

Value = TypeVar("Value")


def cache_key(cfg: DrafterConfig, chip: Chip) -> str:
    """Name launch parameters of the cache: everything that the speed of a launch depends on."""
    return layout_key(cfg, chip, v=cfg.draft_vocab, m=block_rows(cfg))


def layout_key(cfg: DrafterConfig, chip: Chip, **launched: int) -> str:
    """Name a layout of the cache: what is the same in all launches over a head; ``launched`` adds what is not."""
    sizes = {
        "h": cfg.hidden, "i": cfg.intermediate, "q": cfg.num_heads, "kv": cfg.num_kv_heads, "d": cfg.head_dim,
        "f": cfg.feature_width, **launched,
    }  # fmt: skip
    dims = "-".join(f"{label}{value}" for label, value in sizes.items())
    types = "-".join(str(dtype).removeprefix("torch.") for dtype in (cfg.dtype, cfg.weight_dtype))
    return f"{chip.name}/{cfg.kind}-{dims}/{types}"


class TunedCache:
    """Tuned layouts and launch parameters by key, in one JSON file.

    Raises `DrafterError` for a file of another kind. A file that does not exist is an empty cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layouts: dict[str, StoredLayout] = {}
        self.launches: dict[str, LaunchParams] = {}
        values, self.tiles = read_tuned(path)
        """Of the target's products and attention, by key."""
        try:
            self.layouts = {key: StoredLayout(**value) for key, value in values["layouts"].items()}
            self.launches = {
                key: LaunchParams.from_json(value, self.layouts[_layout_of(key)])
                for key, value in values["launches"].items()
            }
        except (OSError, ValueError, TypeError, AttributeError, KeyError, DrafterError) as error:
            raise not_a_cache(path, error) from error

    def layout(self, cfg: DrafterConfig, chip: Chip) -> StoredLayout:
        """Return the layout to pack a head in: the tuned one, or `choose_layout`'s."""
        return self.layouts.get(layout_key(cfg, chip)) or choose_layout(cfg, chip)

    def find(self, cfg: DrafterConfig, chip: Chip, layout: StoredLayout | None = None) -> tuple[LaunchParams, bool]:
        """Return the parameters for a head packed in ``layout`` (default the cache's own), and whether they are tuned.

        Those that are not are `choose_launch`'s. Records, and raises, as `launches.note`.
        """
        own, key = self.layout(cfg, chip), cache_key(cfg, chip)
        found = self.launches.get(key) if layout in (None, own) else None
        note("drafter", key, _shape(cfg, chip), found is not None)
        if found is not None:
            return found, True
        return choose_launch(cfg, chip, own if layout is None else layout), False

    def elsewhere(self, cfg: DrafterConfig, chip: Chip) -> dict[str, LaunchParams]:
        """What was found on other GPUs of as many multiprocessors, by their names."""
        return {
            name: params for name, params in _of_others(self.launches, cache_key(cfg, chip)).items()
            if params.num_programs == chip.num_sms
        }  # fmt: skip

    def tiles_elsewhere(self, kind: str, key: str) -> dict[str, dict[str, int]]:
        """Tiles that were found on other GPUs, by their names."""
        return _of_others(self.tiles[kind], key)

    def store(self, cfg: DrafterConfig, chip: Chip, params: LaunchParams) -> None:
        """Keep a layout and parameters in memory; `save` writes them.

        Another layout than before drops what was tuned over the one before.
        """
        key = layout_key(cfg, chip)
        if self.layouts.get(key, params.layout) != params.layout:
            self.launches = {name: value for name, value in self.launches.items() if _layout_of(name) != key}
        self.layouts[key] = params.layout
        self.launches[cache_key(cfg, chip)] = params

    def save(self) -> None:
        """Write the file whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            "layouts": {key: asdict(layout) for key, layout in self.layouts.items()},
            "launches": {key: params.to_json() for key, params in self.launches.items()},
            **self.tiles,
        }
        write_file(self.path, (json.dumps(values, indent=1, sort_keys=True) + "\n").encode())


class LaunchTable:
    """Launch parameters of one packed head for every configuration, each looked up once."""

    def __init__(self, layout: StoredLayout, tuned: TunedCache, chip: Chip) -> None:
        self.layout, self._tuned, self._chip = layout, tuned, chip
        self._found: dict[str, tuple[LaunchParams, bool]] = {}
        self._keys: dict[DrafterConfig, str] = {}

    def get(self, cfg: DrafterConfig) -> LaunchParams:
        """Return the parameters of one configuration."""
        return self._find(cfg)[0]

    def is_tuned(self, cfg: DrafterConfig) -> bool:
        """Whether the cache held the parameters of one configuration."""
        return self._find(cfg)[1]

    def _find(self, cfg: DrafterConfig) -> tuple[LaunchParams, bool]:
        key = self._keys.get(cfg)
        if key is None:
            key = self._keys[cfg] = cache_key(cfg, self._chip)
        if key not in self._found:
            self._found[key] = self._tuned.find(cfg, self._chip, self.layout)
        return self._found[key]


class FixedLaunch(LaunchTable):
    """The same parameters for every configuration, without a cache: for tests and for the tuner."""

    def __init__(self, params: LaunchParams) -> None:
        self.layout, self._params = params.layout, params

    def _find(self, cfg: DrafterConfig) -> tuple[LaunchParams, bool]:
        return self._params, False


def open_tuned_cache() -> TunedCache:
    """Open the cache that `Weights.pack` reads (`launches.tuned_path`); each file is read once, and logged.

    Raises `DrafterError` for a file of another kind.
    """
    return _read_once(tuned_path())


@cache
def _read_once(path: Path) -> TunedCache:
    # Says what the file holds.
    tiles_of(path)
    return TunedCache(path)


def _of_others(found: Mapping[str, Value], key: str) -> dict[str, Value]:
    """What other GPUs have under the key of one."""
    own, shape = key.rsplit("/", 2)[0], key.rsplit("/", 2)[1:]
    chips = {name: name.rsplit("/", 2)[0] for name in found if name.rsplit("/", 2)[1:] == shape}
    return {f"as on {chip}": found[name] for name, chip in chips.items() if chip != own}


def _layout_of(key: str) -> str:
    """The key of the layout that the launch parameters of a key belong to."""
    chip, dims, types = key.rsplit("/", 2)
    return f"{chip}/{dims.split('-v')[0]}/{types}"


def _shape(cfg: DrafterConfig, chip: Chip) -> dict[str, Any]:
    """What is recorded of a configuration."""
    types = {name: str(getattr(cfg, name)).removeprefix("torch.") for name in ("dtype", "weight_dtype")}
    return {"kernel": "drafter", "chip": chip.name, **vars(cfg), **types}


def read_shapes(path: Path) -> list[tuple[str, DrafterConfig]]:
    """Read the drafts that were recorded: (chip, configuration), each once, in the order of the file.

    Raises `UsageError` for a file that cannot be read, and for a line that is no shape, with its number.
    """
    found: dict[tuple[str, DrafterConfig], None] = {}
    for number, values in recorded_lines(path):
        if values.pop("kernel") != "drafter":
            continue
        try:
            chip = values.pop("chip")
            types = {name: getattr(torch, values.pop(name)) for name in ("dtype", "weight_dtype")}
            found[chip, DrafterConfig(**values, **types)] = None
        except (ValueError, TypeError, KeyError, AttributeError, UsageError) as error:
            raise not_a_shape(path, number, error) from error
    return list(found)
