"""Tuned layouts and launch parameters of the persistent drafter: a cache in one JSON file.

`TunedCache` looks up layouts by (GPU, a head's dimensions, types) and launch parameters by these, the LM-head rows in
use and the rows of a product (`launch_params.block_rows`); what it does not hold, `launch_params` derives. Neither the
rest of the tree nor the length of the KV cache is a key. Both give the same results, only at different speed.
``python -m eagle_slim.runtime.tune`` fills it.

In the environment::

    EAGLE_SLIM_TUNED=FILE     tuned parameters, of any number of GPUs; default tuned.json beside this file
    EAGLE_SLIM_SHAPES=FILE    gets every configuration that is looked up, tuned or not, a JSON object a line; when the
                              process ends, again with the number of its launches
    EAGLE_SLIM_STRICT=1       a configuration without tuned parameters is an error
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from eagle_slim.vocab_tools.files import write_file

from ..errors import DrafterError, UsageError
from ..ops import ALL_LAUNCHES, is_set
from .dimensions import DrafterConfig
from .launch_params import Chip, LaunchParams, StoredLayout, block_rows, choose_launch, choose_layout

logger = logging.getLogger(__name__)


def cache_key(cfg: DrafterConfig, chip: Chip) -> str:
    """Return the key of launch parameters: everything that the speed of a launch depends on."""
    return layout_key(cfg, chip, v=cfg.draft_vocab, m=block_rows(cfg))


def layout_key(cfg: DrafterConfig, chip: Chip, **launched: int) -> str:
    """Return the key of a layout; ``launched``: dimensions of a launch, for a key of launch parameters."""
    sizes = {"h": cfg.hidden, "i": cfg.intermediate, "q": cfg.num_heads, "kv": cfg.num_kv_heads, "d": cfg.head_dim}
    dims = "-".join(f"{label}{value}" for label, value in {**sizes, "f": cfg.feature_width, **launched}.items())
    types = "-".join(str(dtype).removeprefix("torch.") for dtype in (cfg.dtype, cfg.weight_dtype))
    return f"{chip.name}/{cfg.kind}-{dims}/{types}"


class TunedCache:
    """Tuned layouts and launch parameters by key, none without a file; `DrafterError` for one of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layouts: dict[str, StoredLayout] = {}
        self.launches: dict[str, LaunchParams] = {}
        try:
            values = json.loads(path.read_text()) if path.exists() else {"layouts": {}, "launches": {}}
            self.layouts = {key: StoredLayout(**value) for key, value in values["layouts"].items()}
            self.launches = {
                key: LaunchParams.from_json(value, self.layouts[_layout_of(key)])
                for key, value in values["launches"].items()
            }
        except (OSError, ValueError, TypeError, AttributeError, KeyError, DrafterError) as error:
            raise DrafterError(
                f"{path} is not a cache of launch parameters ({type(error).__name__}: {error}). Name a file that "
                "python -m eagle_slim.runtime.tune --out wrote, or one that does not exist yet (EAGLE_SLIM_TUNED)."
            ) from error

    def layout(self, cfg: DrafterConfig, chip: Chip) -> StoredLayout:
        """Return the layout to pack a head in: the tuned one, or `choose_layout`'s."""
        return self.layouts.get(layout_key(cfg, chip)) or choose_layout(cfg, chip)

    def find(self, cfg: DrafterConfig, chip: Chip, layout: StoredLayout | None = None) -> tuple[LaunchParams, bool]:
        """Return the parameters for a head packed in ``layout`` (default the cache's own), and whether they are tuned.

        Those that are not are `choose_launch`'s. Records the configuration where ``EAGLE_SLIM_SHAPES`` is set. Raises
        `DrafterError` where that file cannot be written, and with ``EAGLE_SLIM_STRICT`` for what is not tuned.
        """
        stored, key = self.layout(cfg, chip), cache_key(cfg, chip)
        tuned = self.launches.get(key) if layout in (None, stored) else None
        _record(cfg, chip, tuned is not None, 0)
        _record_launches_at_exit()
        if tuned is not None:
            return tuned, True
        if is_set("EAGLE_SLIM_STRICT"):
            raise DrafterError(
                f"EAGLE_SLIM_STRICT: {tuned_path()} has no tuned launch parameters of the drafter for {key}. Set "
                "EAGLE_SLIM_SHAPES=FILE without it, and run python -m eagle_slim.runtime.tune --from-shapes FILE here."
            )
        logger.info("No tuned launch parameters of the drafter for %s: derived ones are used.", key)
        return choose_launch(cfg, chip, stored if layout is None else layout), False

    def store(self, cfg: DrafterConfig, chip: Chip, params: LaunchParams) -> None:
        """Keep parameters over `layout`, and it, in memory; `save` writes them."""
        self.layouts[layout_key(cfg, chip)] = params.layout
        self.launches[cache_key(cfg, chip)] = params

    def save(self) -> None:
        """Write the file whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            "layouts": {key: asdict(layout) for key, layout in self.layouts.items()},
            "launches": {key: params.to_json() for key, params in self.launches.items()},
        }
        write_file(self.path, (json.dumps(values, indent=1, sort_keys=True) + "\n").encode())


Launcher = Callable[[DrafterConfig], tuple[LaunchParams, bool]]
"""Gives the launch parameters of a configuration over one layout, and whether they are tuned."""


def always(params: LaunchParams) -> Launcher:
    """Return a `Launcher` of the same parameters for every configuration: for tests and the tuner."""
    return lambda cfg: (params, False)


def tuned_path() -> Path:
    """Return the file of tuned parameters: ``EAGLE_SLIM_TUNED``, or the one that ships."""
    return Path(os.environ.get("EAGLE_SLIM_TUNED") or Path(__file__).with_name("tuned.json"))


def open_tuned_cache() -> TunedCache:
    """Open the cache that `Weights.pack` reads (`tuned_path`), once for each file. Raises as `TunedCache`."""
    return _read_once(tuned_path())


@cache
def _read_once(path: Path) -> TunedCache:
    opened = TunedCache(path)
    gpus = ", ".join(sorted({key.split("/")[0] for key in opened.launches})) or "no GPU"
    counts = len(opened.launches), len(opened.layouts)
    logger.info("Launch parameters: %d drafts of %d heads are tuned, for %s, in %s.", *counts, gpus, path)
    return opened


def _layout_of(key: str) -> str:
    """Return the layout's key for a key of launch parameters."""
    chip, dims, types = key.rsplit("/", 2)
    return f"{chip}/{dims.split('-v')[0]}/{types}"


def read_shapes(path: Path) -> Counter[tuple[str, DrafterConfig]]:
    """Read recorded launches by (chip, configuration), in order. Raises `UsageError`, naming the line, for others."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: shapes cannot be read ({error}).") from error
    launched: Counter[tuple[str, DrafterConfig]] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            chip, _, launches = (values.pop(name) for name in ("chip", "tuned", "launches"))
            types = {name: getattr(torch, values.pop(name)) for name in ("dtype", "weight_dtype")}
            # Written by versions in which ids of the prompt could join a draft vocabulary.
            values.pop("tail_rows", None)
            launched[chip, DrafterConfig(**values, **types)] += launches
        except (ValueError, TypeError, KeyError, AttributeError, UsageError) as error:
            problem = f"{path}, line {number}: no configuration of a draft ({type(error).__name__}: {error})"
            expected = "Expected a file that EAGLE_SLIM_SHAPES recorded, a JSON object a line."
            raise UsageError(f"{problem}. {expected}") from error
    return launched


def record_launches() -> None:
    """Record every configuration that this process has launched, with the number of its launches."""
    for ((chip, cfg), is_tuned), launches in ALL_LAUNCHES.items():
        _record(cfg, chip, is_tuned, launches)


@cache
def _record_launches_at_exit() -> None:
    atexit.register(record_launches)


def _record(cfg: DrafterConfig, chip: Chip, is_tuned: bool, launches: int) -> None:
    """Append a line, whole, to the file that ``EAGLE_SLIM_SHAPES`` names, if any; `DrafterError` where it cannot be."""
    name = os.environ.get("EAGLE_SLIM_SHAPES")
    if not name:
        return
    types = {name: str(getattr(cfg, name)).removeprefix("torch.") for name in ("dtype", "weight_dtype")}
    line = {"chip": chip.name, **vars(cfg), **types, "tuned": is_tuned, "launches": launches}
    try:
        with open(name, "ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
    except OSError as error:
        raise DrafterError(
            f"EAGLE_SLIM_SHAPES = {name}: shapes cannot be recorded there ({error}). Name a file in a known folder."
        ) from error
