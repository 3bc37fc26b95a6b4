"""TokenCounts: how often each target id occurs in a corpus, where that corpus came from, and a part held out of it.

File format: one safetensors file with, for source number s in order,

    counts.<s>                   int64 [vocab]          count of id i at position i
    held_out.<s>.token_ids       int32 [tokens]         documents that were not counted, concatenated
    held_out.<s>.doc_offsets     int64 [documents + 1]  where each begins and the last ends

and one metadata entry, "eagle_slim.token_counts", holding JSON: version, tokenizer_hash, and for each source its name,
weight and provenance. The same counts give the same bytes: nothing in the file is a time or a path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import TokenizerError, UsageError, VocabularyError, errors_of
from .files import check_named, json_bytes, regular_file, write_file

JSON = Any

_KEY = "eagle_slim.token_counts"
_VERSION = 2


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Documents that were never counted, kept for measuring coverage: ids, int32 [tokens], and int64 [documents + 1].

    Document d is `token_ids[doc_offsets[d] : doc_offsets[d + 1]]`.
    """

    token_ids: NDArray[np.int32]
    doc_offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        ids, offsets = self.token_ids, self.doc_offsets
        if offsets[0] != 0 or offsets[-1] != len(ids) or np.any(np.diff(offsets) < 0):
            expected = f"expected to rise from 0 to {len(ids)}, the number of held-out tokens"
            raise VocabularyError(f"held-out offsets: {expected}.")

    @classmethod
    def of_documents(cls, documents: Iterable[NDArray[np.int32]]) -> HeldOut:
        """Concatenate documents, int32 [tokens] each, sorted so that their order does not matter."""
        ordered = sorted(documents, key=lambda token_ids: token_ids.tobytes())
        offsets = np.cumsum([0, *map(len, ordered)], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *ordered]), offsets)

    @property
    def documents(self) -> list[NDArray[np.int32]]:
        """Token ids of each document, int32 [tokens]."""
        return np.split(self.token_ids, self.doc_offsets[1:-1]) if len(self.doc_offsets) > 1 else []

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class SourceCounts:
    """Counts of one source by target id, int64 [vocab], without the documents that are held out.

    The weight, above 0, is relative to those of the other sources of a `TokenCounts`.
    """

    name: str
    weight: float
    counts: NDArray[np.int64]
    held_out: HeldOut | None
    provenance: dict[str, JSON]

    def __post_init__(self) -> None:
        _check_weight(self.name, self.weight, VocabularyError)
        if self.counts.dtype != np.int64 or self.counts.ndim != 1 or self.counts.min(initial=0) < 0:
            found = f"{self.counts.dtype} {list(self.counts.shape)} from {self.counts.min(initial=0)} on"
            raise VocabularyError(f"source {self.name}: counts: expected int64 [vocab] from 0 on, found {found}.")
        ids = self.held_out.token_ids if self.held_out is not None else np.zeros(0, np.int32)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.counts)):
            raise VocabularyError(f"source {self.name}: held-out ids: expected 0 to {len(self.counts) - 1}.")

    @property
    def num_tokens(self) -> int:
        """Number of tokens counted, held-out ones left out."""
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Counts of one or more sources, of unique names, by one tokenizer; its hash is None when not known."""

    sources: tuple[SourceCounts, ...]
    tokenizer_hash: str | None

    def __post_init__(self) -> None:
        if not self.sources:
            raise VocabularyError("Token counts need at least one source.")
        names = [source.name for source in self.sources]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise VocabularyError(f"Source names must be unique; found more than once: {', '.join(repeated)}.")

    @property
    def vocab_size(self) -> int:
        """Length of every count array: the largest token id + 1."""
        return len(self.sources[0].counts)

    @property
    def num_tokens(self) -> int:
        """Tokens counted in all sources."""
        return sum(source.num_tokens for source in self.sources)

    @property
    def held_out_counts(self) -> TokenCounts:
        """Counts of the held-out tokens alone."""
        sources = []
        for source in self.sources:
            counts = np.bincount(source.held_out.token_ids if source.held_out else (), minlength=self.vocab_size)
            sources.append(replace(source, counts=counts, held_out=None))
        return replace(self, sources=tuple(sources))

    def account(self, weights: Mapping[str, float] | None = None) -> list[dict[str, JSON]]:
        """Return name, weight, tokens and provenance of every source, JSON-ready; raises as `mixed_weights`."""
        chosen = self.source_weights(weights)
        return [
            {"name": s.name, "weight": chosen[s.name], "tokens": s.num_tokens, "provenance": dict(s.provenance)}
            for s in self.sources
        ]

    def source_weights(self, weights: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the weight of every source by its name, in order; see `mixed_weights`."""
        return mixed_weights({source.name: source.weight for source in self.sources}, weights)

    def weighted(self, weights: Mapping[str, float] | None = None) -> NDArray[np.float64]:
        """Mix the sources into one count per id.

        Each source is first normalised, so that its size does not matter: with weights w_s, counts c_s and
        totals T_s, the result is T · Σ_s (w_s / Σ w) · c_s / T_s, where T is the total of all tokens and the sums run
        over sources with any token. A single source gives its counts exactly.

        Returns float64 [vocab]; raises as `mixed_weights`.
        """
        chosen = self.source_weights(weights)
        used = [source for source in self.sources if chosen[source.name] > 0 and source.num_tokens > 0]
        if len(used) == 1:
            return used[0].counts.astype(np.float64)
        total_weight = sum(chosen[source.name] for source in used)
        total_tokens = sum(source.num_tokens for source in used)
        mixed = np.zeros(self.vocab_size, np.float64)
        for source in used:
            mixed += source.counts * (total_tokens * (chosen[source.name] / total_weight) / source.num_tokens)
        return mixed

    def add(self, ids: Iterable[int], source: str = "generated") -> TokenCounts:
        """Return these counts with more tokens, such as those of a model's answers, added to a source of this name.

        Raises VocabularyError for an id outside the vocabulary, and for the very same tokens a second time.
        """
        token_ids = np.fromiter(map(index, ids), np.int64)
        if len(token_ids) and not (token_ids.min() >= 0 and token_ids.max() < self.vocab_size):
            outside = f"found {token_ids.min()} to {token_ids.max()}"
            raise VocabularyError(f"Ids to add: expected 0 to {self.vocab_size - 1}, {outside}.")
        counts = np.bincount(token_ids, minlength=self.vocab_size)
        weight = next((each.weight for each in self.sources if each.name == source), 1.0)
        provenance = {"method": "generated", "sha256": hashlib.sha256(token_ids.tobytes()).hexdigest()}
        more = SourceCounts(source, weight, counts.astype(np.int64), None, provenance)
        return merge_counts([self, TokenCounts((more,), self.tokenizer_hash)])

    def save(self, path: str | Path) -> None:
        """Write the file described at the top of this module, whole or not at all; raises OSError."""
        write_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes of the file described at the top of this module."""
        from safetensors.numpy import save

        tensors: dict[str, NDArray[Any]] = {}
        for position, source in enumerate(self.sources):
            tensors[f"counts.{position}"] = np.ascontiguousarray(source.counts)
            if source.held_out is not None:
                tensors[f"held_out.{position}.token_ids"] = np.ascontiguousarray(source.held_out.token_ids)
                tensors[f"held_out.{position}.doc_offsets"] = np.ascontiguousarray(source.held_out.doc_offsets)
        sources = [{"name": s.name, "weight": s.weight, "provenance": s.provenance} for s in self.sources]
        header = {"version": _VERSION, "tokenizer_hash": self.tokenizer_hash, "sources": sources}
        # One metadata entry only: safetensors writes several in no fixed order.
        return bytes(save(tensors, metadata={_KEY: json_bytes(header, sort_keys=True).decode()}))

    @classmethod
    def load(cls, path: str | Path) -> TokenCounts:
        """Read and check what `save` wrote; UsageError for an empty name, VocabularyError for another file."""
        from safetensors import SafetensorError, safe_open

        check_named(path)
        regular_file(path, VocabularyError, "counts file")
        if not is_counts_file(path):
            advice = "Counts are made with `eagle-vocab count`; token maps are read with `eagle-vocab import`."
            raise VocabularyError.at(path, f"not a file of token counts, or a damaged one. {advice}")
        with errors_of(path):
            try:
                with safe_open(path, "numpy") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                    return _from_parts(json.loads(file.metadata()[_KEY]), tensors)
            # A JSONDecodeError is a ValueError; numpy does not know bfloat16 and raises a TypeError.
            except (SafetensorError, LookupError, TypeError, AttributeError, ValueError) as error:
                raise VocabularyError(f"the counts file is damaged: {error!r}.") from error


def is_counts_file(path: str | Path) -> bool:
    """Report whether an existing file is a safetensors file of token counts, whatever its name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return _KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def mixed_weights(stored: Mapping[str, float], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of every source by its name, in order: `weights` replace stored ones, and 0 leaves one out.

    Raises UsageError for an unknown name, a weight that is negative or not finite, and where every weight is 0.
    """
    chosen = {name: float(weight) for name, weight in stored.items()}
    for name, weight in (weights or {}).items():
        if name not in chosen:
            raise UsageError(f"There is no source named {name!r} in these counts; they have: {', '.join(chosen)}.")
        if weight != 0:
            _check_weight(name, weight, UsageError)
        chosen[name] = float(weight)
    if not any(chosen.values()):
        raise UsageError("Every source has weight 0; at least one must be above 0.")
    return chosen


def merge_counts(items: Sequence[TokenCounts], weights: Mapping[str, float] | None = None) -> TokenCounts:
    """Merge counts made by one tokenizer.

    Sources of one name are parts of one corpus: their counts are added and their held-out documents joined. Parts that
    were counted with the same settings give what one count of the whole gives, byte for byte; others are listed in the
    provenance under "parts". `weights`, by source name, replace the stored ones, and 0 leaves a source out.

    Raises TokenizerError where the tokenizers differ; VocabularyError where the vocabulary sizes do, or the very same
    part is given twice; UsageError for nothing to merge, and for weights that are refused, or differ under one name.
    """
    if not items:
        raise UsageError("Nothing to merge: name at least one counts file.")
    made_with = [f"{source.name}: {item.tokenizer_hash}" for item in items for source in item.sources]
    sizes = sorted({item.vocab_size for item in items})
    if len({item.tokenizer_hash for item in items}) > 1:
        raise TokenizerError(f"Counts of different tokenizers cannot be merged; found {'; '.join(made_with)}.")
    if len(sizes) > 1:
        raise VocabularyError(f"Counts of different vocabulary sizes cannot be merged; found {sizes}.")
    by_name: dict[str, list[SourceCounts]] = {}
    for item in items:
        for source in item.sources:
            by_name.setdefault(source.name, []).append(source)
    mixed_weights({name: same_name[0].weight for name, same_name in by_name.items()}, weights)
    sources = []
    for name, same_name in by_name.items():
        given = (weights or {}).get(name)
        if given == 0:
            continue
        stored = sorted({source.weight for source in same_name})
        if given is None and len(stored) > 1:
            raise UsageError(f"Source {name!r} has the weights {stored}; say which, as in {name}={stored[0]:g}.")
        merged = _add_parts(name, same_name)
        sources.append(merged if given is None else replace(merged, weight=float(given)))
    return TokenCounts(tuple(sources), items[0].tokenizer_hash)


_ADDED = ("documents", "tokens", "empty_documents", "skipped_records")
_OF_THE_TEXT = ("files", "digest", "held_out", *_ADDED)
_NOTHING = {"files": [], "digest": "0", "held_out": {"documents": 0, "tokens": 0}, **dict.fromkeys(_ADDED, 0)}


def _add_parts(name: str, parts: Sequence[SourceCounts]) -> SourceCounts:
    if len(parts) == 1:
        return parts[0]
    accounts = [part for source in parts for part in source.provenance.get("parts", [source.provenance])]
    texts = [part.get("digest", part) for part in accounts]
    is_twice = any(text in texts[:at] for at, text in enumerate(texts))
    added: list[JSON] = []
    for part in accounts:
        settings = _settings(part)
        twin = next((at for at, other in enumerate(added) if settings and _settings(other) == settings), None)
        if twin is None:
            added.append(part)
        else:
            is_twice |= any(file in added[twin]["files"] for file in part["files"])
            added[twin] = _sum_of(added[twin], part)
    if is_twice:
        advice = "Merge each counts file once; give the sources different names if they really differ."
        raise VocabularyError(f"source {name!r}: the same text would be counted twice. {advice}")
    counts = np.stack([source.counts for source in parts]).sum(axis=0)
    documents = [document for source in parts if source.held_out is not None for document in source.held_out.documents]
    held_out = HeldOut.of_documents(documents) if documents else None
    provenance = added[0] if len(added) == 1 else {"parts": sorted(added, key=json.dumps)}
    return SourceCounts(name, parts[0].weight, counts, held_out, provenance)


def _settings(part: JSON) -> JSON:
    """Return the settings that files were counted with; None for a provenance without files."""
    if not {"files", "digest", "held_out"} <= part.keys():
        return None
    settings = {key: value for key, value in part.items() if key not in _OF_THE_TEXT}
    return {**settings, "share": part["held_out"]["share"]}


def _sum_of(a: JSON, b: JSON) -> JSON:
    added = {key: a[key] + b[key] for key in _ADDED}
    held_out = {key: a["held_out"][key] + b["held_out"][key] for key in ("documents", "tokens")}
    files = sorted(a["files"] + b["files"], key=lambda file: str(file["name"]))
    digest = f"{(int(a['digest'], 16) + int(b['digest'], 16)) % 2**64:016x}"
    return {**a, **added, "files": files, "digest": digest, "held_out": {**a["held_out"], **held_out}}


def _from_parts(header: Mapping[str, JSON], tensors: Mapping[str, NDArray[Any]]) -> TokenCounts:
    if (version := header["version"]) != _VERSION:
        raise VocabularyError(f"counts of format version {version}, but this eagle-slim reads {_VERSION}. Update it.")
    sources = []
    for position, entry in enumerate(header["sources"]):
        token_ids = tensors.get(f"held_out.{position}.token_ids")
        held_out = None if token_ids is None else HeldOut(token_ids, tensors[f"held_out.{position}.doc_offsets"])
        counts = tensors[f"counts.{position}"]
        is_named = isinstance(entry["name"], str) and isinstance(header["tokenizer_hash"], str | None)
        if not (is_named and isinstance(entry["provenance"], dict)):
            raise TypeError("expected a name, an object as provenance, and a text as tokenizer_hash")
        for part in entry["provenance"].get("parts", [entry["provenance"]]):
            if _settings(part) is not None:
                # What cannot be added to another part is found here, where the file is known.
                _sum_of(part, _NOTHING)
        sources.append(SourceCounts(entry["name"], entry["weight"], counts, held_out, entry["provenance"]))
    return TokenCounts(tuple(sources), header["tokenizer_hash"])


def _check_weight(name: str, weight: Any, error_type: type[UsageError | VocabularyError]) -> None:
    # The sum of all must be a number.
    if not (isinstance(weight, Real) and not weight <= 0 and weight <= 1e300):
        raise error_type(f"source {name}: expected a weight above 0 and at most 1e300, found {weight!r:.60}.")
