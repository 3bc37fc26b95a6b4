"""Launch parameters of a step's kernels: tuned ones from one file, shapes recorded, misses refused, launches counted.

Three kinds of kernels have parameters that decide their speed: the drafter (`drafter.tuned_cache`), and the target's
products and attention, whose rules in code `tuned_tiles` overrides. For all of them::

    EAGLE_SLIM_TUNED=FILE     tuned parameters, of any number of GPUs; default the file that ships
    EAGLE_SLIM_SHAPES=FILE    gets every shape that is launched, tuned or not, a JSON object a line
    EAGLE_SLIM_STRICT=1       a shape without tuned parameters is an error
    EAGLE_SLIM_TILES=JSON     tiles to try instead, for experiments: {"attention": {"num_stages": 2}}
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .errors import DrafterError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Tiles = TypeVar("Tiles", bound=DataclassInstance)

logger = logging.getLogger(__name__)

TILE_KINDS = ("products", "attention")
KINDS = ("drafter", *TILE_KINDS)
_LEAST = {"rows": 16, "nodes": 16, "places": 2}
"""The smallest numbers, of more than one, that tuned tiles tell apart."""
_VARIABLES = ("EAGLE_SLIM_TUNED", "EAGLE_SLIM_SHAPES", "EAGLE_SLIM_STRICT", "EAGLE_SLIM_TILES")
Launches = Counter[tuple[str, bool]]
"""How many launches there were of a kind, by whether their parameters were tuned."""


class _Counts(threading.local):
    def __init__(self) -> None:
        self.launches: Launches = Counter()


_COUNTS = _Counts()
_FOUND: dict[tuple[object, ...], tuple[dict[str, int], bool]] = {}


def count(kind: str, is_tuned: bool) -> None:
    """Count a launch of this thread."""
    _COUNTS.launches[kind, is_tuned] += 1


def count_again(launches: Launches) -> None:
    """Count launches that a graph repeats."""
    _COUNTS.launches.update(launches)


@contextmanager
def counted_apart() -> Iterator[Launches]:
    """Give the launches of a block, which those outside do not contain."""
    outside, _COUNTS.launches = _COUNTS.launches, Counter()
    try:
        yield _COUNTS.launches
    finally:
        _COUNTS.launches = outside


def tuned_path() -> Path:
    """The file of tuned parameters: ``EAGLE_SLIM_TUNED``, or the one that ships."""
    return Path(os.environ.get("EAGLE_SLIM_TUNED") or Path(__file__).parent / "drafter" / "tuned.json")


@cache
def gpu_name(device: torch.device) -> str:
    """What tuned parameters are for: a GPU by its name; "interpreter" elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def shape_key(chip: str, shape: dict[str, Any]) -> str:
    """Name tiles of the file; ``shape`` ends with its dtype.

    Numbers of rows that the same tiles hold have one name, that of the largest: one, 2 to 16, 17 to 32, 33 to 64 and so
    on, of places 1, 2, 3 to 4, ... So a tree of 50 nodes finds what was tuned with 60.
    """
    *sizes, (_, dtype) = shape.items()
    named = {
        name: max(_LEAST[name], 1 << (value - 1).bit_length()) if name in _LEAST and value > 1 else value
        for name, value in sizes
    }
    return f"{chip}/{'-'.join(f'{name}={value}' for name, value in named.items())}/{dtype}"


def tuned_tiles(kind: str, device: torch.device, own: Tiles, fits: Callable[[Tiles], bool], **shape: Any) -> Tiles:
    """Return the tiles to launch with: ``own``, by a rule in code, with what is tuned for the shape in its place.

    ``shape``: what speed depends on, plain values, the dtype last. Counts the launch. What does not ``fits`` is no hit,
    as the rule may have changed since. Raises `DrafterError` as `note`, and for ``EAGLE_SLIM_TILES`` that do not fit.
    """
    chip = gpu_name(device)
    name = (*(os.environ.get(variable) for variable in _VARIABLES), kind, chip, *shape.values())
    if name not in _FOUND:
        path = tuned_path()
        key = shape_key(chip, shape)
        found, tried = tiles_of(path)[kind].get(key), _tried(kind)
        is_tuned = found is not None and fits(_changed(own, found, path))
        if tried and not fits(_changed(own, tried, Path("EAGLE_SLIM_TILES"))):
            raise DrafterError(
                f"EAGLE_SLIM_TILES: {kind} of {key} cannot run with {tried} in the place of {own}.", kernel=kind,
                expected=own, found=tried,
            )  # fmt: skip
        note(kind, key, {"kernel": kind, "chip": chip, **shape}, is_tuned)
        _FOUND[name] = ({**(found if found is not None and is_tuned else {}), **tried}, is_tuned)
    changes, is_tuned = _FOUND[name]
    count(kind, is_tuned)
    return replace(own, **changes) if changes else own


def _tried(kind: str) -> dict[str, int]:
    text = os.environ.get("EAGLE_SLIM_TILES") or "{}"
    try:
        values = json.loads(text)
        if set(values) <= set(TILE_KINDS):
            return dict(values.get(kind, {}))
    except (ValueError, TypeError):
        pass
    raise UsageError(
        f"EAGLE_SLIM_TILES = {text}: expected a JSON object of {' and '.join(TILE_KINDS)}, as "
        '{"attention": {"num_stages": 2}}.',
        option="EAGLE_SLIM_TILES", found=text,
    )  # fmt: skip


def _changed(own: Tiles, changes: dict[str, int], source: Path) -> Tiles:
    try:
        return replace(own, **changes)
    except TypeError as error:
        raise DrafterError(f"{source}: {changes} are no tiles of a kernel ({error}). They are of {own}.") from error


def note(kind: str, key: str, shape: dict[str, Any], is_tuned: bool) -> None:
    """Record a shape that is looked up for the first time, and refuse or log it where it is not tuned.

    ``shape`` with "kernel" and "chip" goes to the file that ``EAGLE_SLIM_SHAPES`` names. Raises `DrafterError` where
    that cannot be written, and with ``EAGLE_SLIM_STRICT`` for what is not tuned.
    """
    record({**shape, "tuned": is_tuned})
    if is_tuned:
        return
    if os.environ.get("EAGLE_SLIM_STRICT", "0") not in ("", "0"):
        raise DrafterError(
            f"EAGLE_SLIM_STRICT: {tuned_path()} has no tuned launch parameters of {kind} for {key}. Record shapes with "
            "EAGLE_SLIM_SHAPES=FILE and without EAGLE_SLIM_STRICT, then run python -m eagle_slim.runtime.tune FILE on "
            "this GPU.",
            kernel=kind, key=key, path=tuned_path(),
        )  # fmt: skip
    logger.info("No tuned launch parameters of %s for %s: derived ones are used.", kind, key)


def record(line: dict[str, Any]) -> None:
    """Append a line to the file that ``EAGLE_SLIM_SHAPES`` names; without that, do nothing.

    A line is written whole, so several processes may share a file. Raises `DrafterError` when it cannot be written.
    """
    name = os.environ.get("EAGLE_SLIM_SHAPES")
    if not name:
        return
    try:
        with open(name, "ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
    except OSError as error:
        raise DrafterError(
            f"EAGLE_SLIM_SHAPES = {name}: shapes cannot be recorded there ({error}). Name a file in a known folder.",
            path=name,
        ) from error


def recorded_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read what was recorded: line numbers and values, with "kernel" one of `KINDS`, and "chip".

    Raises `UsageError` for a file that cannot be read, and for a line that is no shape, with its number.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: shapes cannot be read ({error}).", path=path) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = {"kernel": "drafter", **json.loads(line)}
            if values["kernel"] not in KINDS or not isinstance(values["chip"], str):
                raise ValueError(f"kernel {values['kernel']}, chip {values['chip']}")
        except (ValueError, TypeError, KeyError) as error:
            raise not_a_shape(path, number, error) from error
        values.pop("tuned", None)
        found.append((number, values))
    return found


def not_a_shape(path: Path, number: int, error: Exception) -> UsageError:
    """The error for a line that was not recorded here."""
    return UsageError(
        f"{path}, line {number}: no shape of a draft or a forward ({type(error).__name__}: {error}). Expected a file "
        f"that EAGLE_SLIM_SHAPES recorded, a JSON object a line.",
        path=path, line=number,
    )  # fmt: skip


TunedTiles = dict[str, dict[str, dict[str, int]]]
"""Fields of tiles, by kind and key."""


def read_tuned(path: Path) -> tuple[dict[str, Any], TunedTiles]:
    """Read a file of tuned parameters: all its values, and the tiles; nothing of a file that does not exist.

    Raises `DrafterError` for a file of another kind.
    """
    try:
        values = json.loads(path.read_text()) if path.exists() else {"layouts": {}, "launches": {}}
        if not (isinstance(values["layouts"], dict) and isinstance(values["launches"], dict)):
            raise TypeError("layouts and launches are objects")
        tiles = {kind: {key: dict(value) for key, value in values.get(kind, {}).items()} for kind in TILE_KINDS}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise not_a_cache(path, error) from error
    return values, tiles


@cache
def tiles_of(path: Path) -> TunedTiles:
    """The tiles that launches find in a file, which is read, and what it holds logged, once a process."""
    values, tiles = read_tuned(path)
    keys = [key for kind in ("launches", *TILE_KINDS) for key in values.get(kind, ())]
    logger.info(
        "Launch parameters: %d drafts of %d heads, %d products and %d attentions are tuned, for %s, in %s.",
        len(values["launches"]), len(values["layouts"]), len(tiles["products"]), len(tiles["attention"]),
        ", ".join(sorted({key.split("/")[0] for key in keys})) or "no GPU", path,
    )  # fmt: skip
    return tiles


def not_a_cache(path: Path, error: Exception) -> DrafterError:
    """The error for a file that holds no tuned parameters."""
    return DrafterError(
        f"{path} is not a cache of launch parameters ({type(error).__name__}: {error}). Name a file that "
        "python -m eagle_slim.runtime.tune --out wrote, or one that does not exist yet (EAGLE_SLIM_TUNED).",
        path=path,
    )
