"""A draft vocabulary: target ids in rank order, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import UsageError, VocabularyError, errors_of
from .files import json_bytes, read_json, write_file

ROUND_TO = 64
"""Serving engines pad and shard draft rows by 64 (`DEFAULT_VOCAB_PADDING_SIZE` of vLLM and SGLang)."""

MAX_PADDING = 2048
"""Rows that pad a vocabulary for the GPU: gpt-oss, with 1,069, has the most among the models in use."""

# No vocabulary has more: a list that reaches further holds something else.
MAX_ROWS = 1 << 24
_MAX_UNCOUNTED_SHARE = 0.01
_FORMAT = "eagle-slim draft vocabulary"
_VERSION = 1
# This many ids in order of frequency never ascend by chance.
_LONG = 8


class Floors(TypedDict):
    """Floors that the first `size` ids hold.

    They cover the share `weighted` of the weighted counted text; no ids that hold the floors cover more of it than
    `weighted_bound`, where that is known.
    """

    size: int
    held: list[dict[str, Any]]
    weighted: float
    weighted_bound: float | None


class Provenance(TypedDict, total=False):
    """Account of how ids were chosen, in JSON's types.

    `target_vocab_from` is there if the size of the target's vocabulary was not given. `counted_ids` is the number of
    ids that occur in the counted text, forced ones aside. `forced` has the reasons by id.
    """

    method: str
    sources: list[dict[str, Any]]
    target_vocab_from: str
    tokenizer_hash: str
    size_from_coverage: dict[str, Any]
    floors: Floors
    counted_ids: int
    forced: dict[str, str]
    trained_ids: int
    forced_but_untrained: list[int]
    file: str
    form: str
    warnings: list[str]


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """Target ids in rank order. Forced ids come first, so any prefix with all of them is a valid vocabulary.

    For example ids (2, 9, 0, 7) with one forced id: `prefix(2)` is (2, 9); in a head's file the rows ascend,
    (0, 2, 7, 9). Raises VocabularyError for empty, duplicate or out-of-range ids.

    Attributes:
        target_ids: rank order, unique, int64 [draft_vocab].
        num_forced: how many of the first ids every prefix must keep.
        target_vocab: size of the target's vocabulary, padding included.
        ranked: False when the order carries no rank (read from an ascending map): then no smaller prefix exists.
    """

    target_ids: NDArray[np.int64]
    num_forced: int
    target_vocab: int
    provenance: Provenance = field(default_factory=Provenance)
    ranked: bool = True

    def __post_init__(self) -> None:
        if self.target_vocab > MAX_ROWS:
            raise VocabularyError(f"draft vocabulary: expected ids below {MAX_ROWS}, found {self.target_vocab - 1}.")
        ids = check_ids(self.target_ids, self.target_vocab, "draft vocabulary")
        if not 0 <= self.num_forced <= len(ids):
            raise VocabularyError(f"draft vocabulary: {self.num_forced} forced ids among {len(ids)}.")
        ids.setflags(write=False)
        object.__setattr__(self, "target_ids", ids)

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def size(self) -> int:
        """Number of ids, N."""
        return len(self.target_ids)

    @property
    def ascending_ids(self) -> NDArray[np.int64]:
        """The ids in ascending order, which is that of a head's rows, int64 [draft_vocab]."""
        return np.sort(self.target_ids)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user."""
        return tuple(self.provenance.get("warnings", ()))

    @property
    def is_size_inferred(self) -> bool:
        """Whether the size of the target's vocabulary was not given, but taken from something else."""
        return "target_vocab_from" in self.provenance

    @property
    def is_token_map(self) -> bool:
        """Whether the ids come, at first, from a list or a map of another tool."""
        origin: Mapping[str, Any] = self.provenance
        while isinstance(origin.get("token_map"), dict):
            origin = origin["token_map"]
        return origin.get("method") == "token map"

    @property
    def counted_ids(self) -> NDArray[np.int64] | None:
        """The ids that occur in the counted text, forced ids aside; None where that is not known."""
        counted = self.provenance.get("counted_ids")
        return None if counted is None else self.target_ids[self.num_forced :][:counted]

    @property
    def num_uncounted(self) -> int | None:
        """Number of ids that never occur in the counted text, forced ids aside; None where that is not known."""
        counted = self.counted_ids
        return None if counted is None else self.size - self.num_forced - len(counted)

    def prefix(self, size: int) -> DraftVocab:
        """Return the first `size` ids; raises UsageError below the forced ids, above all, or without a rank."""
        if size == self.size:
            return self
        if size > self.size or size < max(self.num_forced, 1):
            expected = f"{max(self.num_forced, 1)} to {self.size} ids, {self.num_forced} of them forced"
            raise UsageError(f"A draft vocabulary of {size} was asked for: expected {expected}.")
        if not self.ranked:
            problem = f"the {self.size} ids come from a map in ascending order, which does not tell which matter most"
            advice = "Rank them with counts (`eagle-vocab rank --candidates`)."
            raise UsageError(f"A draft vocabulary of {size} was asked for: {problem}. {advice}")
        return replace(self, target_ids=self.target_ids[:size])

    def for_target(self, target_vocab: int) -> DraftVocab:
        """Return the vocabulary for a target of that many rows, which replace a size that was inferred.

        One that was stated must agree but for padding, since a configuration may count fewer rows than the LM head has;
        raises VocabularyError where it does not, and for an id out of range.
        """
        if target_vocab == self.target_vocab and not self.is_size_inferred:
            return self
        if not self.is_size_inferred and abs(target_vocab - self.target_vocab) > MAX_PADDING:
            other = f"a target vocabulary of {self.target_vocab}, but the target has {target_vocab}"
            raise VocabularyError(f"Made for {other}.")
        provenance = self.provenance.copy()
        provenance.pop("target_vocab_from", None)
        return replace(self, target_vocab=target_vocab, provenance=provenance)

    def with_warnings(self, warnings: list[str]) -> DraftVocab:
        """Return the vocabulary with further warnings."""
        provenance: Provenance = {**self.provenance, "warnings": [*self.warnings, *warnings]}
        return replace(self, provenance=provenance) if warnings else self

    def save(self, path: str | Path) -> None:
        """Write the vocabulary as JSON, whole or not at all: a readable account, then all ids on one line."""
        account = self.to_json()
        ids = json_bytes(account.pop("target_ids"))
        write_file(path, b'%b,\n "target_ids": %b\n}\n' % (json_bytes(account, indent=1).removesuffix(b"\n}"), ids))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `load` reads."""
        facts = {key: getattr(self, key) for key in ("target_vocab", "num_forced", "ranked")}
        chosen = {"provenance": dict(self.provenance), "target_ids": self.target_ids.tolist()}
        return {"format": _FORMAT, "version": _VERSION, **facts, **chosen}

    @classmethod
    def load(cls, path: str | Path) -> DraftVocab:
        """Read what `save` wrote; raises VocabularyError."""
        return cls.from_json(read_json(path, VocabularyError), str(path))

    @classmethod
    def from_json(cls, value: Any, where: str) -> DraftVocab:
        """Build from the JSON form; `where` names the file in messages."""
        if not is_native(value):
            raise VocabularyError(f"{where}: not an eagle-slim draft vocabulary (no format: {_FORMAT!r}).")
        if (version := value.get("version")) != _VERSION:
            problem = f"format version {version!r}, but this eagle-slim reads {_VERSION}"
            raise VocabularyError(f"{where}: {problem}. Update it.")
        expected = {"target_vocab": int, "num_forced": int, "ranked": bool, "provenance": dict, "target_ids": list}
        for key, kind in expected.items():
            found = type(value.get(key))
            if found is not kind:
                raise VocabularyError(f"{where}: {key}: expected {kind.__name__}, found {found.__name__}.")
        with errors_of(where):
            provenance = checked_provenance(value["provenance"])
            ids = whole_numbers(value["target_ids"], "target_ids")
            return cls(ids, value["num_forced"], value["target_vocab"], provenance, value["ranked"])


_TYPES = {"warnings": list, "forced": dict, "floors": dict, "sources": list, "counted_ids": int, "tokenizer_hash": str}
"""Types of what is read of an account of a ranking."""


def checked_provenance(value: Any, where: str = "provenance") -> Provenance:
    """Return an account that was read from a file; VocabularyError where what is read of it has another form."""
    if not isinstance(value, dict):
        raise VocabularyError(f"{where}: expected an object, found {value!r:.60}.")
    for key, kind in _TYPES.items():
        if type(found := value.get(key, kind())) is not kind:
            raise VocabularyError(f"{where}: {key}: expected {kind.__name__}, found {found!r:.60}.")
    reasons, floors = value.get("forced", {}), value.get("floors", {"size": 0})
    sound = {
        ("warnings", "texts"): all(isinstance(text, str) for text in value.get("warnings", ())),
        ("forced", "texts by ids"): all(key.isdecimal() and isinstance(reasons[key], str) for key in reasons),
        ("floors", "a size"): type(floors.get("size")) is int,
        ("sources", "name, tokens and weight"): all(map(_is_source, value.get("sources", ()))),
        ("counted_ids", "a number of ids"): value.get("counted_ids", 0) >= 0,
    }
    for key, expected in (each for each, holds in sound.items() if not holds):
        raise VocabularyError(f"{where}: {key}: expected {expected}, found {value[key]!r:.60}.")
    if "token_map" in value:
        checked_provenance(value["token_map"], f"{where}: token_map")
    return cast("Provenance", value)


def _is_source(source: Any) -> bool:
    if not isinstance(source, dict) or not isinstance(source.get("name"), str) or type(source.get("tokens")) is not int:
        return False
    return type(source.get("weight")) in (int, float) and 0 <= source["weight"] < 1e300


def is_native(value: Any) -> bool:
    """Report whether a JSON value says that it is in the format of `DraftVocab.save`."""
    return isinstance(value, dict) and value.get("format") == _FORMAT


def whole_numbers(values: Any, where: str) -> NDArray[np.int64]:
    """Return a flat list or array of integers as int64 [n]; VocabularyError for anything else."""
    if isinstance(values, (list, tuple)) and all(type(value) is int for value in values):
        try:
            return np.array(values, np.int64)
        except OverflowError as error:
            raise VocabularyError(f"{where}: an integer does not fit 64 bits.") from error
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return np.array(values, np.int64)
    found = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else f"{values!r:.60}"
    raise VocabularyError(f"{where}: expected a flat list of integers, found {found}.")


def uncounted_warning(vocab: DraftVocab) -> list[str]:
    """Warn if more than 1% of the ids, forced ids aside, never occur in the counted text: nothing ranks them."""
    uncounted = vocab.num_uncounted or 0
    if uncounted <= _MAX_UNCOUNTED_SHARE * vocab.size:
        return []
    rare = f"{uncounted:,} of the {vocab.size:,} ids never occur in the counted text (forced ids aside)"
    advice = f"Count more text, or keep at most {vocab.size - uncounted:,} ids"
    return [f"{rare}: they are ranked by id only. {advice}"]


def lost_floors(vocab: DraftVocab, size: int) -> list[str]:
    """Warn if fewer ids are taken than hold the floors of a ranking."""
    floors = vocab.provenance.get("floors")
    if floors is None or size >= floors["size"]:
        return []
    return [f"the floors hold with {floors['size']} ids, and {size} are taken: rank with --size {size} to hold them"]


def doubts_of_order(ids: NDArray[np.int64]) -> list[str]:
    """Warn about ids that ascend in all but a few places: a sorted list that was changed, not one in rank order."""
    falls = np.flatnonzero(np.diff(ids) < 0) + 1
    if len(ids) < _LONG or not 0 < len(falls) <= max(1, len(ids) // 100):
        return []
    places = f"{len(falls)} places (id {ids[falls[0]]} at position {falls[0]})"
    return [f"the ids ascend but for {places}: a sorted list that was changed? A list in rank order does not ascend"]


def padding_warning(size: int) -> list[str]:
    """Warn about a size that serving engines pad."""
    if size % ROUND_TO == 0:
        return []
    why = f"serving engines pad it, and tensor parallelism needs a multiple (the next is {round_up(size)})"
    return [f"a draft vocabulary of {size} is not a multiple of {ROUND_TO}: it is kept exactly, but {why}"]


def round_up(size: int) -> int:
    """Return the next multiple of `ROUND_TO`."""
    return -(-size // ROUND_TO) * ROUND_TO


def some_ids(ids: NDArray[np.int64]) -> str:
    """Return the first ids as text for a message."""
    shown = ", ".join(str(token_id) for token_id in ids[:8].tolist())
    return shown + (", ..." if len(ids) > 8 else "")


def doubts_of_rank(ids: NDArray[np.int64], size: int) -> list[str]:
    """Warn if the first `size` of ascending ids are taken: many maps are stored sorted, not in rank order."""
    if size >= len(ids) or len(ids) < _LONG or bool((np.diff(ids) <= 0).any()):
        return []
    doubt = f"if they are not in rank order, its first {size} are only the lowest ids. Rank them with counts instead"
    return [f"the {len(ids)} ids of the token map ascend, as in a map that was sorted: {doubt}"]


def check_ids(values: ArrayLike, target_vocab: int, where: str) -> NDArray[np.int64]:
    """Return ids as int64 [n]; raises VocabularyError for the first duplicate or id out of range, or for no ids."""
    array = np.asarray(values)
    if array.size == 0:
        raise VocabularyError(f"{where}: there are no ids.")
    ids = whole_numbers(array, where)
    outside = np.flatnonzero((ids < 0) | (ids >= target_vocab))
    if len(outside):
        first = f"id {ids[outside[0]]} at position {outside[0]}"
        problem = f"{first} is outside the target's vocabulary of {target_vocab} ({len(outside)} such ids)"
        raise VocabularyError(f"{where}: {problem}. Is this map for another model?")
    order = np.argsort(ids, kind="stable")
    repeated = order[1:][ids[order][1:] == ids[order][:-1]]
    if len(repeated):
        again = f"id {ids[repeated.min()]} appears again at position {repeated.min()}"
        raise VocabularyError(f"{where}: {again} ({len(repeated)} duplicates).")
    return ids
