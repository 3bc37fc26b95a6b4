"""Shapes that were launched without tuned parameters, one JSON object a line, for the tuner to fill the cache with.

``EAGLE_SLIM_SHAPES=FILE`` asks for it; ``python -m eagle_slim.runtime.tune FILE`` reads it.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..errors import DrafterError, UsageError
from .dimensions import DrafterConfig
from .launch_params import Chip

VARIABLE = "EAGLE_SLIM_SHAPES"


def record_shape(cfg: DrafterConfig, chip: Chip) -> None:
    """Append a configuration to the file that ``EAGLE_SLIM_SHAPES`` names; without that, do nothing.

    A line is written whole, so several processes may share a file. Raises `DrafterError` when it cannot be written.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    line = json.dumps({"chip": chip.name, **_plain(cfg)}) + "\n"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DrafterError(
            f"{VARIABLE} = {name}: shapes cannot be recorded there ({error}). Name a file in a folder that exists.",
            path=name,
        ) from error


def read_shapes(path: Path) -> list[tuple[str, DrafterConfig]]:
    """Read what was recorded: (chip, configuration), each once, in the order of the file.

    Raises `UsageError` for a file that cannot be read, and for a line that is no shape, with its number.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: shapes cannot be read ({error}).", path=path) from error
    found: dict[tuple[str, DrafterConfig], None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            chip = values.pop("chip")
            types = {name: getattr(torch, values.pop(name)) for name in ("dtype", "weight_dtype")}
            found[chip, DrafterConfig(**values, **types)] = None
        except (ValueError, TypeError, KeyError, AttributeError, UsageError) as error:
            raise UsageError(
                f"{path}, line {number}: no shape of a draft ({type(error).__name__}: {error}). Expected a file that "
                f"{VARIABLE} recorded, a JSON object a line.",
                path=path, line=number,
            ) from error  # fmt: skip
    return list(found)


def _plain(cfg: DrafterConfig) -> dict[str, Any]:
    values = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in values.items()
    }
