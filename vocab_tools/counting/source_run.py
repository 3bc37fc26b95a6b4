"""One source from its state to its end: takes the results of its blocks in order, and applies limits to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..corpus.blocks import BadRecord
from ..corpus.open import OpenCorpus
from ..errors import CorpusError
from .block import BlockCounts, CountPlan, merge_partial
from .progress import ProgressBar
from .resume import CountState, SourceState
from .workers import Workers

_MAX_SKIP_MESSAGES = 10


@dataclass
class SourceRun:
    """Counts one source, at a position in the plan and in the states; tells `say` what was skipped."""

    position: int
    corpus: OpenCorpus
    plan: CountPlan
    workers: Workers
    states: CountState
    bar: ProgressBar
    say: Callable[[str], None]
    _told: int = 0

    @property
    def _state(self) -> SourceState:
        return self.states.sources[self.position]

    def count(self) -> list[dict[str, Any]] | None:
        """Count to the end; returns name, bytes and hash of the files read, or None for a dataset.

        Raises:
            CorpusError: a record cannot be read, a file changed meanwhile, or the source holds no tokens.
        """
        hasher = self.corpus.hasher()
        try:
            if hasher is not None and self._state.cursor is not None:
                for shard, stop in self.corpus.shards_until(self._state.cursor):
                    hasher.reached(shard, stop)
            if not self._state.done:
                self._run(hasher.reached if hasher else lambda shard, position: None)
                self.corpus.check_unchanged()
            if not self._state.partial.tokens:
                error = self._no_tokens()
                # There is nothing to go on from, and a resume file would be in the way of a mended corpus.
                self.states.forget(self.position)
                raise error
            return hasher.finish() if hasher else None
        finally:
            if hasher is not None:
                hasher.close()

    def _no_tokens(self) -> CorpusError:
        partial, source = self._state.partial, self.corpus.source
        if partial.empty and self.corpus.kind == "chat" and source.roles == "assistant":
            hint = f"None of its conversations ({partial.empty:,}) has an assistant turn; count them with --roles all."
        else:
            hint = f"Empty documents: {partial.empty:,}; records skipped: {partial.skipped:,}."
        return CorpusError(
            f"{source.location}: no tokens in this source. {hint}",
            tokens=0,
            empty=partial.empty,
            skipped=partial.skipped,
        )

    def _run(self, reached: Callable[[int, int], None]) -> None:
        found = self.workers.corpus(
            self.position, self.corpus, self._state.cursor, lambda: self._state.partial.candidates.bound
        )
        with contextlib.closing(found) as results:  # type: ignore[type-var]
            for task, result in results:
                allowed = self._documents_allowed(result)
                limited = allowed is not None
                if limited:
                    # Once more without what comes after the limit, bad records included.
                    ((_, result),) = self.workers.map(iter([replace(task, limit=allowed)]))
                if result.bad:
                    self._report(result.bad)
                state = SourceState(
                    merge_partial(self._state.partial, result.partial, self.plan.held_out),
                    cursor=(task.block.shard, task.block.stop),
                    done=limited,
                    limited=limited,
                )
                reached(task.block.shard, task.block.stop)
                self.states.update(self.position, state)
                self.bar.moved(task.block.size, result.partial.tokens)
                if limited:
                    break
        self.states.update(self.position, replace(self._state, done=True))
        skipped = self._state.partial.skipped
        if skipped:
            self.say(f"{self.corpus.source.name}: {skipped:,} records skipped in total")

    def _documents_allowed(self, result: BlockCounts) -> int | None:
        """Return how many of a block's documents the limits let in; None when no limit falls in this block."""
        source, partial = self.corpus.source, self._state.partial
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
                f"{place}: {bad[0].reason}. Mend the record, or leave such records out with --on-error skip.",
                place=place,
            )
        told = bad[: _MAX_SKIP_MESSAGES - self._told]
        for record in told:
            self.say(f"skipped {self.corpus.place_of(record)}: {record.reason}")
        self._told += len(told)
