"""A corpus: named, weighted sources, each a Hub dataset or local files, opened as blocks of records.

This is where documents come from and what their index is; which tokenizer reads them is not known here.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import CorpusError, UsageError
from ..files import expand_home
from ..tokenizer.chat import messages_in_text
from .blocks import BadRecord, Block
from .files import (
    CorpusFile,
    FileHasher,
    blocks_of,
    check_unchanged,
    find_files,
    first_values,
    inner_block,
    line_of,
    looks_local,
)
from .packed import PACKED

__all__ = ["BadRecord", "Block", "CorpusSource", "OpenCorpus", "open_corpus", "parse_source", "refuse_repeated_inputs"]

Roles = Literal["assistant", "all"]
CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "content")


@dataclass(frozen=True)
class CorpusSource:
    """One source of text.

    Attributes:
        location: id of a Hub dataset, a local file, folder or glob, or a URL such as s3://bucket/*.parquet.
        name: how counts and reports call it; empty: made from the location.
        weight: its share when sources are mixed, relative to the others.
        config: configuration ("subset") of a Hub dataset.
        split: split of a Hub dataset; None: the only one, or "train".
        revision: branch, tag or commit of a Hub dataset.
        column: the column with the text or the chat; None: found by looking at the first record.
        roles: of chats, what is counted: "assistant" turns with their end-of-turn token, or "all" the rendered text.
        max_documents: stop after so many documents.
        max_tokens: stop with the document that reaches so many tokens.
        sample: share of the documents to take, drawn by the seed; None: all.
        shuffle: take the files or shards in an order drawn by the seed.
    """

    location: str
    name: str = ""
    weight: float = 1.0
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    column: str | None = None
    roles: Roles = "assistant"
    max_documents: int | None = None
    max_tokens: int | None = None
    sample: float | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", os.fspath(self.location))
        if not self.location:
            raise UsageError("a corpus source needs a location: a dataset id, file, folder or glob")
        if not self.name:
            object.__setattr__(self, "name", _default_name(self.location))
        if not 0 < self.weight < float("inf"):
            raise UsageError(f"source {self.name}: expected a weight above 0, found {self.weight}")
        if self.roles not in ("assistant", "all"):
            raise UsageError(f"source {self.name}: roles are `assistant` or `all`, found {self.roles!r}")
        for limit in ("max_documents", "max_tokens"):
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise UsageError(f"source {self.name}: {limit} must be at least 1, found {value}")
        if self.sample is not None and not 0 < self.sample <= 1:
            raise UsageError(f"source {self.name}: sample must be above 0 and at most 1, found {self.sample}")


def _default_name(location: str) -> str:
    name = Path(location).name if looks_local(location) else location.rsplit("/", 1)[-1]
    for suffix in (*PACKED, ".jsonl", ".ndjson", ".json", ".parquet", ".txt"):
        name = name.removesuffix(suffix)
    # What is left of a glob; a file may well be called a[1].jsonl.
    if not os.path.exists(expand_home(location)):
        name = name.strip("*?[]. ")
    return name or "corpus"


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)", re.IGNORECASE)


def amount(text: str) -> int:
    """Read a whole number above 0, or one with a unit: 500k, 10M, 1.5B.

    Raises:
        ValueError: it is none.
    """
    found = _AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    number = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if number < 1 or number != int(number):
        raise ValueError(f"{text!r} is no number above 0 such as 5000, 500k, 10M or 1.5B")
    return int(number)


def _limit(text: str) -> int:
    # Plain numbers, 0 too, are judged by `CorpusSource`.
    return int(text) if text.isdecimal() else amount(text)


_CONVERTERS: Mapping[str, Any] = {
    "weight": float,
    "max_documents": _limit,
    "max_tokens": _limit,
    "sample": float,
    "shuffle": lambda text: {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text],
}
_HUB_ONLY = ("config", "split", "revision")
_SPEC_KEYS = tuple(item.name for item in fields(CorpusSource) if item.name not in ("location", "name"))


def parse_source(spec: str, defaults: Mapping[str, Any] | None = None) -> CorpusSource:
    """Parse `[NAME=]LOCATION[,KEY=VALUE...]`.

    Example: `chat=HuggingFaceH4/ultrachat_200k,split=train_sft,weight=3` or `code=src/*.jsonl,column=content`.
    Keys are the fields of `CorpusSource`; a hyphen may stand for an underscore.

    Args:
        spec: the text above.
        defaults: fields for what the text leaves out; those of Hub datasets do not apply to local files.

    Raises:
        UsageError: an unknown key or a value of the wrong kind.
    """
    location, *settings = spec.split(",")
    # A comma may belong to the path: take settings from the right only.
    while settings and "=" not in settings[0]:
        location = f"{location},{settings.pop(0)}"
    name, equals, rest = location.partition("=")
    if equals and "/" not in name and not Path(location).exists():
        location = rest
    else:
        name = ""
    chosen: dict[str, Any] = dict(defaults or {})
    if looks_local(location.strip()):
        for key in _HUB_ONLY:
            chosen.pop(key, None)
    for setting in settings:
        key, _, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if key not in _SPEC_KEYS:
            raise UsageError(f"source {spec!r}: unknown key {key!r}; known are {', '.join(_SPEC_KEYS)}")
        try:
            chosen[key] = _CONVERTERS.get(key, str)(value.strip())
        except (ValueError, KeyError) as error:
            raise UsageError(f"source {spec!r}: {value!r} is no value for {key}") from error
    return CorpusSource(location=location.strip(), name=name.strip(), **chosen)


class _Opened(Protocol):
    """What a corpus is read from: files or a dataset."""

    @property
    def num_shards(self) -> int: ...

    def blocks_of(self, shard: int, start: int, column: str) -> Iterator[Block]: ...


@dataclass(frozen=True)
class OpenCorpus:
    """A source that was looked at: what it holds, and how to read it.

    Attributes:
        source: as asked for.
        kind: "text", or "chat" where the column holds messages.
        column: column read; "" for plain text files.
        size: what the blocks' sizes add up to (bytes on disk), None when not known.
        identity: JSON that changes when the input changes: file names, sizes and times, or the dataset's commit.
        origin: JSON for provenance, without paths or times.
        inputs: the files or the split that it reads, by names that are the same in every source.
    """

    source: CorpusSource
    kind: Literal["text", "chat"]
    column: str
    size: int | None
    identity: dict[str, Any]
    origin: dict[str, Any]
    inputs: tuple[str, ...]
    _opened: _Opened = field(repr=False)
    _order: tuple[int, ...] = field(repr=False)
    _files: tuple[CorpusFile, ...] = field(default=(), repr=False)
    _probe: list[Block] = field(default_factory=list, repr=False, compare=False)

    def blocks(self, after: tuple[int, int] | None = None) -> Iterator[Block]:
        """Yield the blocks in the corpus's order, those behind (shard, stop) of a block when given."""
        for shard, start in self.shards_after(after):
            yield from self.shard_blocks(shard, start)

    def shards_after(self, after: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
        """Yield the shards in the corpus's order, each with the position to begin at; see `blocks`."""
        first = 0 if after is None else self._order.index(after[0])
        for visited, shard in enumerate(self._order[first:]):
            yield shard, after[1] if after is not None and visited == 0 else 0

    def shard_blocks(self, shard: int, start: int) -> Iterator[Block]:
        """Yield the blocks of one shard from a position on."""
        return self._opened.blocks_of(shard, start, self.column)

    def is_cheap_to_cut(self, shard: int) -> bool:
        """Whether the blocks of a shard are found without reading it; they hold no data then."""
        return bool(self._files) and not self._files[shard].compressed and self._files[shard].format != "json"

    def shards_until(self, cursor: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the shards read up to a cursor, each with the position reached; -1 stands for its end."""
        last = self._order.index(cursor[0])
        for shard in self._order[:last]:
            yield shard, -1
        yield cursor

    def size_until(self, cursor: tuple[int, int]) -> int:
        """About how much of `size` lies before a cursor."""
        if not self._files:
            return 0
        reached = ((self._files[shard].size, stop) for shard, stop in self.shards_until(cursor))
        return sum(size if stop < 0 else min(size, stop) for size, stop in reached)

    def probe_blocks(self) -> Sequence[Block]:
        """A few blocks from all over the files, or the first of a dataset, where each more would be fetched."""
        if not self._probe:
            self._probe.extend(self._choose_probe(4 if self._files else 1))
        return self._probe

    def _choose_probe(self, num_blocks: int) -> Iterator[Block]:
        for step in range(num_blocks):
            visited, within = divmod(len(self._order) * step, num_blocks)
            shard = self._order[visited]
            block = inner_block(self._files[shard], shard, within / num_blocks) if within and self._files else None
            if block is None and (step == 0 or len(self._order) >= num_blocks):
                block = next(self._opened.blocks_of(shard, 0, self.column), None)
            if block is not None:
                yield block

    def place_of(self, bad: BadRecord) -> str:
        """Say where a record stands: file and line, or row."""
        if not self._files:
            shard = f" of shard {bad.shard}" if self._opened.num_shards > 1 else ""
            return f"{self.source.location}, split {self.origin['split']}, row {bad.position}{shard}"
        return _place(self._files[bad.shard], bad)

    def hasher(self) -> FileHasher | None:
        """Start hashing the files beside the counting; None for a dataset, which its commit names."""
        return FileHasher(self._files) if self._files else None

    def check_unchanged(self) -> None:
        """Check that the input is what it was when the corpus was opened.

        Raises:
            CorpusError: a file changed.
        """
        check_unchanged(self._files)


def open_corpus(source: CorpusSource, seed: int = 0) -> OpenCorpus:
    """Look at a source: its files or its dataset, and the column to read.

    Raises:
        CorpusError: there is nothing there, or it cannot be read.
        UsageError: the settings do not fit what is there; the message names what does.
    """
    return _open_files(source, seed) if looks_local(source.location) else _open_dataset(source, seed)


def refuse_repeated_inputs(corpora: Sequence[OpenCorpus]) -> None:
    """Refuse text that is read twice: it would count twice, and what is held out once would be counted all the same.

    Another column of a file is other text. Two revisions of a split are taken for the same.

    Raises:
        UsageError: a file or split is read twice; the message names it and who reads it.
    """
    seen: dict[tuple[str, str], str] = {}
    for corpus in corpora:
        for name in corpus.inputs:
            key = (name, corpus.column)
            if key in seen:
                first, second = seen[key], corpus.source.name
                who = f"twice by source {first}" if first == second else f"by source {first} and by source {second}"
                raise UsageError(
                    f"{name}: read {who}, so that its text would count twice, and what is held out of it would be "
                    "counted too. Leave one out; weight=2 gives a source more weight."
                )
            seen[key] = corpus.source.name


def _order_of(num_shards: int, source: CorpusSource, seed: int) -> tuple[int, ...]:
    order = list(range(num_shards))
    if source.shuffle:
        random.Random(f"{seed} {source.name}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True)
class _Files:
    files: Sequence[CorpusFile]

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def blocks_of(self, shard: int, start: int, column: str) -> Iterator[Block]:
        return blocks_of(self.files[shard], shard, start, column)


def _open_files(source: CorpusSource, seed: int) -> OpenCorpus:
    for setting in _HUB_ONLY:
        if getattr(source, setting) is not None:
            raise UsageError(f"{source.location}: these are local files; {setting} belongs to Hub datasets only")
    files = find_files(source.location)
    tables = [file for file in files if file.format != "txt"]
    column, kind = "", "text"
    if tables:
        if len(tables) < len(files):
            raise UsageError(
                f"{source.location}: .txt files have no columns, .{tables[0].format} files have. "
                "Give them as two sources, each with its own pattern."
            )
        row = next((row for file in tables if (row := first_values(file, _wanted(source))) is not None), None)
        if row is None:
            raise CorpusError(
                f"{source.location}: no readable record. {_first_fault(files[0], source.column or 'text')}"
            )
        column, kind = _choose_column(source, row)
    elif source.column is not None:
        raise UsageError(f"{source.location}: plain text has no columns; leave out column {source.column!r}")
    return OpenCorpus(
        source=source,
        kind="chat" if kind == "chat" else "text",
        column=column,
        size=sum(file.size for file in files),
        identity={"files": [[file.path, file.size, file.modified_ns] for file in files]},
        origin={"column": column or None},
        inputs=tuple(os.path.realpath(file.path) for file in files),
        _opened=_Files(files),
        _order=_order_of(len(files), source, seed),
        _files=tuple(files),
    )


def _open_dataset(source: CorpusSource, seed: int) -> OpenCorpus:
    from .hub import HubDataset

    dataset = HubDataset(source.location, source.config, source.split, source.revision)
    row = dataset.first_values(_wanted(source))
    if row is None:
        raise CorpusError(f"{source.location}: split {dataset.split} has no rows")
    column, kind = _choose_column(source, row)
    origin = {
        "dataset": source.location,
        "config": dataset.config,
        "split": dataset.split,
        "revision": dataset.commit or source.revision,
        "column": column,
    }
    return OpenCorpus(
        source=source,
        kind="chat" if kind == "chat" else "text",
        column=column,
        size=None,
        identity=origin if dataset.state is None else {**origin, "state": dataset.state},
        origin=origin,
        # The Hub finds its datasets in upper and lower case.
        inputs=dataset.urls or (f"{source.location.lower()}, config {dataset.config}, split {dataset.split}",),
        _opened=dataset,
        _order=_order_of(dataset.num_shards, source, seed),
    )


def _first_fault(file: CorpusFile, column: str) -> str:
    """Say what is wrong with a file in which nothing can be read."""
    for block in blocks_of(file, 0, 0, column):
        records = block.read(column)
        for value in records.values(np.arange(len(records.positions))):
            if isinstance(value, BadRecord):
                return f"{_place(file, value)}: {value.reason}."
    return f"{file.path} is empty."


def _place(file: CorpusFile, bad: BadRecord) -> str:
    if file.format == "parquet":
        return f"{file.path}, row {bad.position}"
    return f"{file.path}, line {line_of(file, bad.position)}"


def _wanted(source: CorpusSource) -> tuple[str, ...]:
    """The columns whose values decide what is read."""
    return (*CHAT_COLUMNS, *TEXT_COLUMNS) if source.column is None else (source.column,)


def _choose_column(source: CorpusSource, row: Mapping[str, Any]) -> tuple[str, str]:
    if source.column is not None:
        if source.column not in row:
            raise UsageError(f"{source.location}: no column {source.column!r}; the records have {', '.join(row)}")
        return source.column, "chat" if _is_chat(row[source.column]) else "text"
    for column in CHAT_COLUMNS:
        if _is_chat(row.get(column)):
            return column, "chat"
    for column in TEXT_COLUMNS:
        if isinstance(row.get(column), str):
            return column, "text"
    for column in (*CHAT_COLUMNS, *TEXT_COLUMNS):
        if not isinstance(row.get(column, ""), str):
            found = "nothing" if row[column] is None else f"a value of type {type(row[column]).__name__}"
            raise CorpusError(f"{source.location}: column {column!r} holds {found} in the first records")
    strings = [column for column, value in row.items() if isinstance(value, str)]
    # Beside a null or a list, which may be the text, a lone string is as likely the id of the record.
    if len(strings) == 1 and not any(value is None or isinstance(value, (list, dict)) for value in row.values()):
        return strings[0], "chat" if _is_chat(row[strings[0]]) else "text"
    raise UsageError(f"{source.location}: say which column holds the text; the records have {', '.join(row)}")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and messages_in_text(value) is not None)


def with_unique_names(sources: Sequence[CorpusSource]) -> list[CorpusSource]:
    """Number the names that sources share: `data`, `data-2`, ..."""
    taken: dict[str, int] = {}
    renamed = []
    for source in sources:
        taken[source.name] = taken.get(source.name, 0) + 1
        number = taken[source.name]
        renamed.append(source if number == 1 else replace(source, name=f"{source.name}-{number}"))
    return renamed
