"""open_corpus: a source → an opened corpus, which is read block by block; files and datasets alike.

What a document is and what its index is are decided here; tokenizers are not known.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorpusError, UsageError
from .blocks import BadRecord, Block
from .columns import Kind, choose_column, first_values, wanted_columns
from .file_blocks import blocks_of, first_rows, inner_block, line_of
from .find import CorpusFile, find_files, looks_local
from .hashing import FileHasher, check_unchanged
from .source import HUB_SETTINGS, CorpusSource

if TYPE_CHECKING:
    from .hub import HubDataset


@dataclass(frozen=True)
class OpenCorpus:
    """A source that was looked at: what it holds, and how to read it.

    Attributes:
        source: as asked for.
        kind: "text", or "chat" where the column holds messages.
        column: column read; "" for plain text files.
        size: sum of the sizes of all blocks (bytes on disk), None when not known.
        identity: JSON that changes when the input changes: file names, sizes and times, or the dataset's commit.
        origin: JSON for provenance, without paths or times.
        inputs: the files, links followed, or the split that it reads.
    """

    source: CorpusSource
    kind: Kind
    column: str
    size: int | None
    identity: dict[str, Any]
    origin: dict[str, Any]
    inputs: tuple[str, ...]
    _order: tuple[int, ...] = field(repr=False)
    _files: tuple[CorpusFile, ...] = field(default=(), repr=False)
    _dataset: HubDataset | None = field(default=None, repr=False)

    def blocks(self, after: tuple[int, int] | None = None) -> Iterator[Block]:
        """Yield the blocks in the corpus's order, from the beginning or after the cursor (shard, stop) of a block."""
        for shard, start in self.shards_after(after):
            yield from self.shard_blocks(shard, start)

    def shards_after(self, after: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
        """Yield the shards in the corpus's order, each with the position to begin at; see `blocks`."""
        first = 0 if after is None else self._order.index(after[0])
        for visited, shard in enumerate(self._order[first:]):
            yield shard, after[1] if after is not None and visited == 0 else 0

    def shard_blocks(self, shard: int, start: int) -> Iterator[Block]:
        """Yield the blocks of one shard from a position on."""
        if self._dataset is not None:
            return self._dataset.blocks_of(shard, start, self.column)
        return blocks_of(self._files[shard], shard, start, self.column)

    def is_cheap_to_cut(self, shard: int) -> bool:
        """Whether the blocks of a shard are found without reading it; they hold no data then."""
        return bool(self._files) and not self._files[shard].compressed and self._files[shard].format != "json"

    def shards_until(self, cursor: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the shards read up to a cursor, each with the position reached; -1 stands for its end."""
        last = self._order.index(cursor[0])
        for shard in self._order[:last]:
            yield shard, -1
        yield cursor

    def size_until(self, cursor: tuple[int, int] | None) -> int:
        """Return about how much of `size` lies before a cursor."""
        if cursor is None or not self._files:
            return 0
        reached = ((self._files[shard].size, stop) for shard, stop in self.shards_until(cursor))
        return sum(size if stop < 0 else min(size, stop) for size, stop in reached)

    @cached_property
    def probe_blocks(self) -> Sequence[Block]:
        """A few blocks from all over the files, or the first of a dataset, where each further one would be fetched."""
        return list(self._choose_probe(4 if self._files else 1))

    def _choose_probe(self, num_blocks: int) -> Iterator[Block]:
        for step in range(num_blocks):
            visited, within = divmod(len(self._order) * step, num_blocks)
            shard = self._order[visited]
            block = inner_block(self._files[shard], shard, within / num_blocks) if within and self._files else None
            if block is None and (step == 0 or len(self._order) >= num_blocks):
                block = next(self.shard_blocks(shard, 0), None)
            if block is not None:
                yield block

    def place_of(self, bad: BadRecord) -> str:
        """Say where a record is: file and line, or row."""
        if not self._files:
            shard = f" of shard {bad.shard}" if len(self._order) > 1 else ""
            return f"{self.source.location}, split {self.origin['split']}, row {bad.position}{shard}"
        return _place(self._files[bad.shard], bad)

    def hasher(self) -> FileHasher | None:
        """Start hashing the files while they are counted; None for a dataset, which its commit identifies."""
        return FileHasher(self._files) if self._files else None

    def check_unchanged(self) -> None:
        """Check that the input is what it was when the corpus was opened."""
        check_unchanged(self._files)


def open_corpus(source: CorpusSource, seed: int = 0) -> OpenCorpus:
    """Look at a source: its files or its dataset, and the column to read."""
    return _open_files(source, seed) if looks_local(source.location) else _open_dataset(source, seed)


def refuse_repeated_inputs(corpora: Sequence[OpenCorpus]) -> None:
    """Refuse text that is read twice: it would count twice, and what is held out once would be counted all the same.

    Another column of the same file counts as different text. Two revisions of a split are taken to be the same.

    Raises:
        UsageError: a file or split is read twice; facts `input` and `sources` say which and by whom.
    """
    seen: dict[tuple[str, str], str] = {}
    for corpus in corpora:
        source = corpus.source.name
        for name in corpus.inputs:
            first = seen.get((name, corpus.column))
            if first is not None:
                who = f"twice by source {first}" if first == source else f"by source {first} and by source {source}"
                raise UsageError(
                    f"{name}: read {who}. Its text would count twice, and what is held out of it would be counted "
                    "too. Leave one out; weight=2 gives a source more weight.",
                    input=name,
                    sources=[first, source],
                )
            seen[name, corpus.column] = source


def _order_of(num_shards: int, source: CorpusSource, seed: int) -> tuple[int, ...]:
    order = list(range(num_shards))
    if source.shuffle:
        random.Random(f"{seed} {source.name}").shuffle(order)
    return tuple(order)


def _open_files(source: CorpusSource, seed: int) -> OpenCorpus:
    for setting in HUB_SETTINGS:
        if getattr(source, setting) is not None:
            raise UsageError(
                f"{source.location}: these are local files, and {setting} is for Hub datasets only.", setting=setting
            )
    files = find_files(source.location)
    tables = [file for file in files if file.format != "txt"]
    column = ""
    kind: Kind = "text"
    if tables:
        if len(tables) < len(files):
            raise UsageError.at(
                source.location,
                f".txt files have no columns, .{tables[0].format} files have. "
                "Give them as two sources, each with a glob of its own.",
                formats=["txt", tables[0].format],
            )
        wanted = wanted_columns(source)
        row = next((row for file in tables if (row := first_values(first_rows(file), wanted)) is not None), None)
        if row is None:
            fault = _first_fault(files[0], source.column or "text")
            raise CorpusError.at(source.location, f"no record can be read. {fault}", fault=fault)
        column, kind = choose_column(source, row)
    elif source.column is not None:
        raise UsageError(
            f"{source.location}: plain text has no columns; leave out column {source.column!r}.", column=source.column
        )
    return OpenCorpus(
        source=source,
        kind=kind,
        column=column,
        size=sum(file.size for file in files),
        identity={"files": [[file.path, file.size, file.modified_ns] for file in files]},
        origin={"column": column or None},
        inputs=tuple(os.path.realpath(file.path) for file in files),
        _order=_order_of(len(files), source, seed),
        _files=tuple(files),
    )


def _open_dataset(source: CorpusSource, seed: int) -> OpenCorpus:
    from .hub import HubDataset

    dataset = HubDataset(source.location, source.config, source.split, source.revision)
    row = first_values(dataset.first_rows(), wanted_columns(source))
    if row is None:
        raise CorpusError(f"{source.location}: split {dataset.split} has no rows.")
    column, kind = choose_column(source, row)
    origin = {
        "dataset": source.location,
        "config": dataset.config,
        "split": dataset.split,
        "revision": dataset.commit or source.revision,
        "column": column,
    }
    return OpenCorpus(
        source=source,
        kind=kind,
        column=column,
        size=None,
        identity=origin,
        origin=origin,
        # The Hub finds its datasets in upper and lower case.
        inputs=(f"{source.location.lower()}, config {dataset.config}, split {dataset.split}",),
        _order=_order_of(dataset.num_shards, source, seed),
        _dataset=dataset,
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
