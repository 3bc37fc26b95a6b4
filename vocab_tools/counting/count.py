"""count_tokens: sources and a tokenizer → TokenCounts, over all cores, resumable, the same for any number of workers.

This module keeps the order of the blocks, the limits, the checkpoints and the reports. What a block gives is the matter
of `count_block`, how a corpus is read of `count_plan`, and who runs the blocks of `count_engines`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..corpus.corpus import BadRecord, CorpusSource, OpenCorpus, open_corpus, refuse_repeated_inputs
from ..errors import CorpusError, EagleSlimError, UsageError
from ..tokenizer.encode import engine_name
from .block import BlockCounts, CountPlan, PartialCounts, merge_partial
from .counts import JSON, SourceCounts, TokenCounts
from .held_out import HeldOutRule
from .plan import identity_of, make_plan
from .progress import ProgressBar
from .resume import SourceState, load_checkpoint, save_checkpoint
from .workers import CountEngine, InProcess, Processes

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import LoadedTokenizer

_MAX_SKIP_MESSAGES = 10
# Below this a corpus is counted sooner than worker processes have loaded the tokenizer.
_SMALL_BYTES = 4 << 20


class CountingInterruptedError(EagleSlimError):
    """The user stopped a count; its checkpoint, where there is one, is up to date."""


def count_tokens(
    sources: Sequence[CorpusSource],
    tokenizer: LoadedTokenizer,
    *,
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    tokenizer_engine: Literal["auto", "tokenizers", "fastokens"] = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    held_out: HeldOutRule | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    checkpoint: Path | None = None,
    restart: bool = False,
    save_to: Path | None = None,
    checkpoint_seconds: float = 10.0,
    progress: bool | Callable[[int], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> TokenCounts:
    """Count the tokens of a corpus.

    The result depends on the sources, the tokenizer, `chat_template`, `seed`, `held_out` and `on_error` alone.

    Args:
        sources: at least one, of unique names.
        tokenizer: from `load_tokenizer`.
        workers: worker processes, each with one tokenizer thread; 0 counts in this process; None: one per core, or 0
            for a small corpus. Processes are spawned, so a script needs `if __name__ == "__main__":`.
        engine: "local" for this machine, or "ray" for a Ray cluster (see `counting_ray`), where a worker is an actor of
            one CPU, and None means one for each CPU of the cluster.
        tokenizer_engine: library that encodes; "auto" takes `fastokens` where it is installed and has given the ids of
            `tokenizers` on a probe of the corpus.
        chat_template: Jinja source in place of the tokenizer's own template.
        seed: decides what is sampled, shuffled and held out.
        held_out: what is held out of each source, see `HeldOutRule`; None: its defaults.
        on_error: "stop" at a record that cannot be read, or "skip" and count it.
        checkpoint: file that keeps the count while it runs; the same call goes on from it. It is removed at the end.
        restart: remove a checkpoint that is there, and start over.
        save_to: file to write the counts to before the checkpoint is removed, so that neither is ever missing.
        checkpoint_seconds: time between two checkpoints.
        progress: show a progress bar on stderr; None: on a terminal; a function is called with the number of tokens
            that each block adds.
        notify: called with messages for the user, such as skipped records.

    Raises:
        UsageError: no sources, names or inputs that repeat, a setting that fits no source, or the checkpoint of another
            count.
        CorpusError: a source or record cannot be read, or a file changed meanwhile.
        TokenizerError: the tokenizer or its chat template cannot be used.
        CountingInterruptedError: Ctrl-C.
    """
    say = notify or (lambda message: None)
    rule = held_out or HeldOutRule()
    _check_names(sources)
    if workers is not None and workers < 0:
        raise UsageError(f"workers: expected 0 or more, found {workers}")
    if restart and checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    corpora = [open_corpus(source, seed) for source in sources]
    refuse_repeated_inputs(corpora)
    plan = make_plan(corpora, tokenizer, tokenizer_engine, chat_template, seed, rule, on_error == "skip", say)
    library = engine_name(plan.encoder.engine)
    identity = identity_of(corpora, tokenizer, plan, library, seed)
    states = [SourceState(PartialCounts.zero(plan.encoder.vocab_size)) for _ in corpora]
    if checkpoint is not None and checkpoint.exists():
        states = load_checkpoint(checkpoint, identity)
        skipped = sum(state.partial.skipped for state in states)
        if skipped and on_error == "stop":
            raise UsageError(
                f"{checkpoint}: this count has skipped {skipped:,} records already. Go on with --on-error skip, or "
                "start over with --restart."
            )
        done = sum(state.partial.tokens for state in states)
        say(f"going on from the checkpoint {checkpoint}: {done:,} tokens are counted already")
    keeper = _Checkpoints(checkpoint, identity, states, checkpoint_seconds)
    running = _engine(engine, plan, workers, corpora)
    counted = []
    with ProgressBar(corpora, states, progress) as bar:
        try:
            with running:
                for position, corpus in enumerate(corpora):
                    run = _SourceRun(position, corpus, running, rule, on_error == "skip", keeper, bar, say)
                    counted.append(run.count())
        except KeyboardInterrupt as error:
            raise CountingInterruptedError(keeper.interrupted()) from error
        except EagleSlimError:
            keeper.save()
            raise
    if chat_template is not None:
        template_hash = replace(tokenizer, chat_templates={"default": chat_template}).chat_template_hash
    else:
        template_hash = tokenizer.chat_template_hash
    result = TokenCounts(
        tuple(
            _source_counts(corpus, state, plan, files, library, template_hash, seed)
            for corpus, state, files in zip(corpora, keeper.states, counted, strict=True)
        ),
        tokenizer.tokenizer_hash,
    )
    if save_to is not None:
        result.save(save_to)
    keeper.remove()
    return result


def _check_names(sources: Sequence[CorpusSource]) -> None:
    if not sources:
        raise UsageError("nothing to count: name at least one source")
    names = [source.name for source in sources]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"two sources are called {repeated[0]!r}; name them apart, as in chat=...")


def _engine(
    name: Literal["local", "ray"], plan: CountPlan, workers: int | None, corpora: Sequence[OpenCorpus]
) -> CountEngine:
    if name == "ray":
        from .ray_workers import RayEngine

        return RayEngine(plan, workers)
    num_workers = _default_workers(corpora) if workers is None else workers
    return Processes(plan, num_workers) if num_workers else InProcess(plan)


def _default_workers(corpora: Sequence[OpenCorpus]) -> int:
    sizes = [corpus.size for corpus in corpora]
    if all(size is not None for size in sizes) and sum(size or 0 for size in sizes) < _SMALL_BYTES:
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Checkpoints:
    """Holds the states of all sources, and writes them down now and then."""

    def __init__(
        self, path: Path | None, identity: dict[str, Any], states: Sequence[SourceState], seconds: float
    ) -> None:
        self.states = list(states)
        self._path = path
        self._identity = identity
        self._seconds = seconds
        self._saved_at = time.monotonic()

    def update(self, position: int, state: SourceState) -> None:
        self.states[position] = state
        if time.monotonic() - self._saved_at >= self._seconds:
            self.save()

    def save(self) -> None:
        """Write the checkpoint, unless nothing was counted yet."""
        if self._path is not None and any(state.cursor for state in self.states):
            save_checkpoint(self._path, self._identity, self.states)
            self._saved_at = time.monotonic()

    def forget(self, position: int) -> None:
        """Give up what is known of one source; a checkpoint that then holds nothing is removed."""
        self.states[position] = SourceState(PartialCounts.zero(len(self.states[position].partial.counts)))
        if not any(state.cursor for state in self.states):
            self.remove()

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            # What a run that was killed while it wrote a checkpoint left behind.
            for leftover in self._path.parent.glob(f".{glob.escape(self._path.name)}.*.tmp"):
                leftover.unlink(missing_ok=True)

    def interrupted(self) -> str:
        self.save()
        tokens = sum(state.partial.tokens for state in self.states)
        if self._path is None or not tokens:
            return f"stopped after {tokens:,} tokens; there is no checkpoint, so the same command starts over"
        return f"stopped after {tokens:,} tokens. The same command goes on from there (checkpoint {self._path})."


class _SourceRun:
    """Counts one source from its state to its end."""

    def __init__(
        self,
        position: int,
        corpus: OpenCorpus,
        engine: CountEngine,
        rule: HeldOutRule,
        skip_bad: bool,
        keeper: _Checkpoints,
        bar: ProgressBar,
        say: Callable[[str], None],
    ) -> None:
        self._position = position
        self._corpus = corpus
        self._engine = engine
        self._rule = rule
        self._skip_bad = skip_bad
        self._keeper = keeper
        self._bar = bar
        self._say = say
        self._told = 0

    @property
    def _state(self) -> SourceState:
        return self._keeper.states[self._position]

    def count(self) -> list[dict[str, Any]] | None:
        """Count to the end; returns name, bytes and hash of the files read, or None for a dataset."""
        hasher = self._corpus.hasher()
        try:
            if hasher is not None and self._state.cursor is not None:
                for shard, stop in self._corpus.shards_until(self._state.cursor):
                    hasher.reached(shard, stop)
            if not self._state.done:
                self._run(hasher.reached if hasher else None)
                self._corpus.check_unchanged()
            if not self._state.partial.tokens:
                message = f"{self._corpus.source.location}: no tokens in this source; {self._hint()}"
                # There is nothing to go on from, and a checkpoint would stand in the way of a mended file.
                self._keeper.forget(self._position)
                raise CorpusError(message)
            return hasher.finish() if hasher else None
        finally:
            if hasher is not None:
                hasher.close()

    def _hint(self) -> str:
        partial = self._state.partial
        if partial.empty and self._corpus.kind == "chat" and self._corpus.source.roles == "assistant":
            return f"none of its conversations ({partial.empty:,}) has an assistant turn; count them with --roles all"
        return f"empty documents: {partial.empty:,}; records skipped: {partial.skipped:,}"

    def _run(self, reached: Callable[[int, int], None] | None) -> None:
        state = self._state
        found = self._engine.corpus(
            self._position, self._corpus, state.cursor, lambda: self._state.partial.candidates.bound
        )
        with contextlib.closing(found) as results:  # type: ignore[type-var]
            for task, result in results:
                allowed = self._documents_allowed(result)
                limited = allowed is not None
                if limited:
                    # Without what stands behind the limit, bad records too.
                    again = replace(task, limit=allowed)
                    ((_, result),) = self._engine.map(iter([again]))
                if result.bad:
                    self._report(result.bad)
                state = self._state
                state = SourceState(
                    merge_partial(state.partial, result.partial, self._rule),
                    cursor=(task.block.shard, task.block.stop),
                    done=limited,
                    limited=limited,
                )
                if reached is not None:
                    reached(task.block.shard, task.block.stop)
                self._keeper.update(self._position, state)
                self._bar.moved(task.block.size, result.partial.tokens)
                if limited:
                    self._tell_rest()
                    return
        self._keeper.update(self._position, replace(self._state, done=True))
        self._tell_rest()

    def _documents_allowed(self, result: BlockCounts) -> int | None:
        """How many of a block's documents the limits let in; None when they end elsewhere."""
        source, partial = self._corpus.source, self._state.partial
        limits = []
        if source.max_documents is not None and partial.documents + len(result.doc_tokens) >= source.max_documents:
            limits.append(source.max_documents - partial.documents)
        if source.max_tokens is not None:
            reached = np.flatnonzero(partial.tokens + np.cumsum(result.doc_tokens, dtype=np.int64) >= source.max_tokens)
            if len(reached):
                limits.append(int(reached[0]) + 1)
        return min(limits) if limits else None

    def _report(self, bad: Sequence[BadRecord]) -> None:
        if not self._skip_bad:
            raise CorpusError(
                f"{self._corpus.place_of(bad[0])}: {bad[0].reason}. Mend it, or go on without such records with "
                "--on-error skip."
            )
        for record in bad[: _MAX_SKIP_MESSAGES - self._told]:
            self._say(f"skipped {self._corpus.place_of(record)}: {record.reason}")
        self._told += len(bad[: _MAX_SKIP_MESSAGES - self._told])

    def _tell_rest(self) -> None:
        skipped = self._state.partial.skipped
        if skipped:
            self._say(f"{self._corpus.source.name}: records skipped in all: {skipped:,}")


def _source_counts(
    corpus: OpenCorpus,
    state: SourceState,
    plan: CountPlan,
    files: list[dict[str, Any]] | None,
    library: str,
    template_hash: str | None,
    seed: int,
) -> SourceCounts:
    partial, rule, source = state.partial, plan.held_out, corpus.source
    counts, held_out = partial.finish(rule)
    num_held_out = held_out.num_documents if held_out else 0
    is_chat = corpus.kind == "chat"
    provenance: dict[str, JSON] = {
        **corpus.origin,
        **({} if files is None else {"files": files}),
        "text": source.roles if is_chat else "all",
        "chat": is_chat,
        "chat_template_hash": template_hash if is_chat else None,
        "documents": partial.documents - num_held_out,
        "tokens": int(counts.sum()),
        "empty_documents": partial.empty,
        "skipped_records": partial.skipped,
        "cuts_in_long_texts": partial.cuts,
        "max_documents": source.max_documents,
        "max_tokens": source.max_tokens,
        "ended_by_limit": state.limited,
        "sample": source.sample,
        "shuffle": source.shuffle,
        "seed": seed,
        "tokenizer_engine": library,
        "held_out": {
            "documents": num_held_out,
            "tokens": held_out.num_tokens if held_out else 0,
            "rule": "smallest hash of (seed, source, document index)",
            "fraction": rule.fraction,
            "max_documents": rule.max_documents,
            "max_tokens": rule.max_tokens,
        },
    }
    return SourceCounts(source.name, source.weight, counts, held_out, provenance)
