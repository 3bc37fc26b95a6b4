"""One source from its beginning to its end: takes the results of its blocks in order, and applies limits to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..corpus.blocks import BadRecord
from ..corpus.open import OpenCorpus
from ..errors import CorpusError
from .block import BlockCounts, CountPlan, PartialCounts, merge_partial
from .progress import ProgressBar
from .workers import Workers

_MAX_SKIP_MESSAGES = 10


@dataclass(frozen=True)
class CountedSource:
    """What was counted of one source.

    Attributes:
        limited: whether a limit ended it, rather than its last document.
        files: name, bytes and hash of the files read; None for a dataset.
    """

    partial: PartialCounts
    limited: bool
    files: list[dict[str, Any]] | None


@dataclass
class SourceRun:
    """Counts one source, at a position in the plan; tells `say` what was skipped."""

    position: int
    corpus: OpenCorpus
    plan: CountPlan
    workers: Workers
    bar: ProgressBar
    say: Callable[[str], None]
    _told: int = 0

    def __post_init__(self) -> None:
        self._partial = PartialCounts.zero(self.plan.encoder.vocab_size)

    def count(self) -> CountedSource:
        """Count to the end.

        Raises:
            CorpusError: a record cannot be read, a file changed meanwhile, or the source holds no tokens.
        """
        hasher = self.corpus.hasher()
        try:
            limited = self._run(hasher.reached if hasher else lambda shard, position: None)
            self.corpus.check_unchanged()
            if not self._partial.tokens:
                raise self._no_tokens()
            return CountedSource(self._partial, limited, hasher.finish() if hasher else None)
        finally:
            if hasher is not None:
                hasher.close()

    def _no_tokens(self) -> CorpusError:
        partial, source = self._partial, self.corpus.source
        if partial.empty and self.corpus.kind == "chat" and source.roles == "assistant":
            hint = f"None of its conversations ({partial.empty:,}) has an assistant turn; count them with roles=all."
        else:
            hint = f"Empty documents: {partial.empty:,}; records skipped: {partial.skipped:,}."
        return CorpusError(
            f"{source.location}: no tokens in this source. {hint}",
            tokens=0,
            empty=partial.empty,
            skipped=partial.skipped,
        )

    def _run(self, reached: Callable[[int, int], None]) -> bool:
        """Take up the results in order; returns whether a limit ended the source."""
        limited = False
        found = self.workers.corpus(self.position, self.corpus, lambda: self._partial.candidates.bound)
        with contextlib.closing(found) as results:  # type: ignore[type-var]
            for task, result in results:
                allowed = self._documents_allowed(result)
                limited = allowed is not None
                if limited:
                    # Once more without what comes after the limit, bad records included.
                    ((_, result),) = self.workers.map(iter([replace(task, limit=allowed)]))
                if result.bad:
                    self._report(result.bad)
                self._partial = merge_partial(self._partial, result.partial, self.plan.held_out)
                reached(task.block.shard, task.block.stop)
                self.bar.moved(task.block.size, result.partial.tokens)
                if limited:
                    break
        skipped = self._partial.skipped
        if skipped:
            self.say(f"{self.corpus.source.name}: {skipped:,} records skipped in total")
        return limited

    def _documents_allowed(self, result: BlockCounts) -> int | None:
        """Return how many of a block's documents the limits let in; None when no limit falls in this block."""
        source, partial = self.corpus.source, self._partial
        limits = []
        if source.max_documents is not None and partial.documents + len(result.doc_tokens) >= source.max_documents:
            limits.append(source.max_documents - partial.documents)
        if source.max_tokens is not None:
            reached = np.flatnonzero(partial.tokens + np.cumsum(result.doc_tokens, dtype=np.int64) >= source.max_tokens)
            if len(reached):
                limits.append(int(reached[0]) + 1)
        return min(limits) if limits else None

    def _report(self, bad: Sequence[BadRecord]) -> None:
        if not self.plan.skip_bad:
            place = self.corpus.place_of(bad[0])
            raise CorpusError(
                f"{place}: {bad[0].reason}. Mend the record, or leave such records out with `eagle-vocab count "
                "--on-error skip`.",
                place=place,
            )
        told = bad[: _MAX_SKIP_MESSAGES - self._told]
        for record in told:
            self.say(f"skipped {self.corpus.place_of(record)}: {record.reason}")
        self._told += len(told)
