"""What a count resumes from: one file, replaced whole, that only the same count of the same input accepts.

It is a safetensors file with the partial counts and the held-out candidates of each source. Its metadata holds the
identity of the count (every argument and input that can change the result) and how far each source was read.
"""

from __future__ import annotations

import glob
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorpusError, EagleSlimError, UsageError
from ..files import regular_file, write_file
from .block import NUMBERS, PartialCounts
from .counts import checksum
from .held_out import Candidates

_KEY = "eagle_slim.count_resume"
SAVE_SECONDS = 10.0
_RESTART = "Start over with --restart."


def resume_file_beside(out: Path) -> Path:
    """Return the file that keeps the state of a count whose result is to be written to `out`."""
    return out.with_name(f"{out.name}.resume")


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


class CountState:
    """The states of all sources in order, saved now and then in the resume file `path`, or not at all if it is None."""

    def __init__(self, sources: Sequence[SourceState], identity: dict[str, Any], path: Path | None) -> None:
        self.sources = list(sources)
        self.path = path
        self._identity = identity
        self._saved_at = time.monotonic()

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return sum(state.partial.tokens for state in self.sources)

    def update(self, position: int, state: SourceState) -> None:
        """Replace the state of one source, and save when the last time is long enough ago."""
        self.sources[position] = state
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the resume file, unless nothing was counted yet."""
        if self.path is not None and any(state.cursor for state in self.sources):
            save_states(self.path, self._identity, self.sources)
            self._saved_at = time.monotonic()

    @contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Save when the block ends by Ctrl-C or one of our errors."""
        try:
            yield
        except (KeyboardInterrupt, EagleSlimError):
            self.save()
            raise

    def forget(self, position: int) -> None:
        """Drop the state of one source; a resume file that then holds nothing is removed."""
        self.sources[position] = SourceState(PartialCounts.zero(len(self.sources[position].partial.counts)))
        if not any(state.cursor for state in self.sources):
            self.remove()

    def remove(self) -> None:
        """Remove the resume file, and what a run that was killed while writing one left behind."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            for leftover in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.tmp"):
                leftover.unlink(missing_ok=True)


def save_states(path: Path, identity: dict[str, Any], states: Sequence[SourceState]) -> None:
    """Write a resume file, whole or not at all.

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
                "bound": candidates.bound,
                **{name: getattr(partial, name) for name in NUMBERS},
            }
        )
    header: dict[str, Any] = {"identity": identity, "sources": entries}
    header["checksum"] = checksum(header, tensors)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    try:
        write_file(path, save(tensors, metadata={_KEY: json.dumps(header)}))
    except OSError as error:
        raise CorpusError(f"{path}: the state of the count cannot be saved: {error.strerror}.") from error


def load_states(path: Path, identity: dict[str, Any]) -> list[SourceState]:
    """Read the resume file of this very count.

    Raises:
        UsageError: it belongs to another count (fact `differences`), or its input has changed (fact `changed`).
        CorpusError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    regular_file(path, CorpusError, "saved state")
    try:
        with safe_open(path, "numpy") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if header["checksum"] != checksum(header, tensors):
            raise ValueError("its checksum is another")
        stored = header["identity"]
        states = [_state(entry, tensors, position) for position, entry in enumerate(header["sources"])]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: the saved state cannot be read ({error!r}). {_RESTART}", path=path) from error
    # Through JSON, so that tuples and lists compare alike.
    current = json.loads(json.dumps(identity))
    changed = _changed_files(stored, current)
    if changed:
        more = " and other files" if len(changed) > 3 else ""
        raise UsageError(
            f"{path}: since this count began, {', '.join(changed[:3])}{more} changed. {_RESTART}",
            path=path,
            changed=changed,
        )
    differences = list(_differences(stored, current, ""))
    if differences:
        raise UsageError(
            f"{path}: this is the saved state of another count: {'; '.join(differences[:5])}. "
            f"Give the arguments of that count to go on with it. {_RESTART}",
            path=path,
            differences=differences,
        )
    return states


def _state(entry: dict[str, Any], tensors: dict[str, NDArray[Any]], position: int) -> SourceState:
    keys, lengths, token_ids, counts = (
        tensors[f"{position}.{name}"] for name in ("keys", "lengths", "token_ids", "counts")
    )
    candidates = Candidates(keys, lengths, token_ids, entry["bound"])
    partial = PartialCounts(counts, candidates=candidates, **{name: entry[name] for name in NUMBERS})
    cursor = None if entry["cursor"] is None else (entry["cursor"][0], entry["cursor"][1])
    return SourceState(partial, cursor, entry["done"], entry["limited"])


def _changed_files(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the paths of files that both counts name, with another size or time, in the order of the corpus."""
    before, now = (
        {path: state for source in identity["sources"] for path, *state in source["input"].get("files", [])}
        for identity in (stored, current)
    )
    return [path for path, state in now.items() if path in before and before[path] != state]


def _differences(stored: Any, current: Any, where: str) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in sorted({*stored, *current}):
            yield from _differences(stored.get(key), current.get(key), f"{where}.{key}" if where else key)
    elif isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        for position, (a, b) in enumerate(zip(stored, current, strict=True)):
            yield from _differences(a, b, f"{where}[{position}]")
    elif stored != current:
        yield f"{where} was {_short(stored)}, is {_short(current)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
