"""Checkpoints of a running count: one file, replaced whole, that only the same count of the same input takes up again.

The file is a safetensors file with the partial counts and the held-out candidates of each source; its metadata holds
the identity of the count (every argument and input that has a say in the result) and how far each source was read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorpusError, UsageError
from ..files import write_file
from .block import PartialCounts
from .held_out import Candidates

_KEY = "eagle_slim.count_checkpoint"
_VERSION = 1


@dataclass(frozen=True, eq=False)
class SourceState:
    """How far one source was counted.

    Attributes:
        partial: what was counted so far.
        cursor: (shard, stop) of the last block counted, None before the first.
        done: whether the source is finished.
        limited: whether a limit ended it, rather than its last document.
    """

    partial: PartialCounts
    cursor: tuple[int, int] | None = None
    done: bool = False
    limited: bool = False


def save_checkpoint(path: Path, identity: dict[str, Any], states: Sequence[SourceState]) -> None:
    """Write a checkpoint, whole or not at all.

    Raises:
        CorpusError: it cannot be written.
    """
    from safetensors.numpy import save

    tensors: dict[str, NDArray[Any]] = {}
    entries = []
    for position, state in enumerate(states):
        partial, candidates = state.partial, state.partial.candidates
        tensors[f"{position}.counts"] = partial.counts
        # safetensors for numpy stores uint64 as it is.
        tensors[f"{position}.keys"] = candidates.keys
        tensors[f"{position}.lengths"] = candidates.lengths
        tensors[f"{position}.token_ids"] = candidates.token_ids
        entries.append(
            {
                "cursor": state.cursor,
                "done": state.done,
                "limited": state.limited,
                "documents": partial.documents,
                "tokens": partial.tokens,
                "empty": partial.empty,
                "skipped": partial.skipped,
                "cuts": partial.cuts,
                "bound": candidates.bound,
            }
        )
    header = json.dumps({"version": _VERSION, "identity": identity, "sources": entries})
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    try:
        write_file(path, save(tensors, metadata={_KEY: header}))
    except OSError as error:
        raise CorpusError(f"{path}: the checkpoint cannot be written: {error.strerror}") from error


def load_checkpoint(path: Path, identity: dict[str, Any]) -> list[SourceState]:
    """Read a checkpoint of this very count.

    Raises:
        UsageError: it belongs to another count, or its input has changed since; the message says in what.
        CorpusError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        same_version = header["version"] == _VERSION
        stored = header["identity"]
        states = [_state(entry, tensors, position) for position, entry in enumerate(header["sources"])]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: not a readable checkpoint ({error!r}). Start over with --restart.") from error
    if not same_version:
        raise UsageError(f"{path}: the checkpoint of another version of eagle-slim. Start over with --restart.")
    # Through JSON, so that tuples and lists compare alike.
    current = json.loads(json.dumps(identity))
    changed = _changed_files(stored, current)
    if changed:
        raise UsageError(
            f"{path}: this count was begun on another state of {', '.join(changed[:3])}"
            f"{' and others' if len(changed) > 3 else ''}. Start over with --restart."
        )
    differences = list(_differences(stored, current, ""))
    if differences:
        raise UsageError(
            f"{path}: the checkpoint of another count: {'; '.join(differences[:5])}. "
            "Give the arguments of that count to go on with it, or start over with --restart."
        )
    return states


def _state(entry: dict[str, Any], tensors: dict[str, NDArray[Any]], position: int) -> SourceState:
    candidates = Candidates(
        tensors[f"{position}.keys"],
        tensors[f"{position}.lengths"],
        tensors[f"{position}.token_ids"],
        entry["bound"],
    )
    partial = PartialCounts(
        counts=tensors[f"{position}.counts"],
        documents=entry["documents"],
        tokens=entry["tokens"],
        empty=entry["empty"],
        skipped=entry["skipped"],
        cuts=entry["cuts"],
        candidates=candidates,
    )
    cursor = None if entry["cursor"] is None else (entry["cursor"][0], entry["cursor"][1])
    return SourceState(partial, cursor, entry["done"], entry["limited"])


def _changed_files(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Files that both counts name, with another size or time: paths, in the order of the corpus."""
    before, now = ({path: state for path, *state in _files(identity)} for identity in (stored, current))
    return [path for path, state in now.items() if path in before and before[path] != state]


def _files(identity: dict[str, Any]) -> list[list[Any]]:
    return [file for source in identity["sources"] for file in source["input"].get("files", [])]


def _differences(stored: Any, current: Any, where: str) -> list[str]:
    if isinstance(stored, dict) and isinstance(current, dict):
        keys = sorted({*stored, *current})
        return [
            difference
            for key in keys
            for difference in _differences(stored.get(key), current.get(key), f"{where}.{key}" if where else key)
        ]
    if isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        return [
            difference
            for position, (a, b) in enumerate(zip(stored, current, strict=True))
            for difference in _differences(a, b, f"{where}[{position}]")
        ]
    return [] if stored == current else [f"{where} was {_short(stored)}, is {_short(current)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
