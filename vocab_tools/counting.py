"""count_tokens: sources and a tokenizer → TokenCounts, over all cores, the same for any number of workers.

    OpenSource → Block → Documents   encoded by a worker, in any process and any order
    Documents  → Tally               counts and held-out documents; `Tally.add` is associative
    Tally      → SourceCounts

Only limits on documents and tokens need an order: there a worker gives back the documents, and this process tallies
them in the order of the source up to where the limit falls.

A document is held out, and never counted, by a hash of its text (of a chat, its messages): the same document always,
whatever stands beside it, so that counts of parts add up to the counts of the whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .counts import JSON, HeldOut, SourceCounts, TokenCounts
from .errors import CorpusError, EagleSlimError, TokenizerError, UsageError
from .records import BadRecord, Block
from .sources import CorpusSource, OpenSource, open_source, refuse_repeated_inputs
from .tokenizer.encode import (
    EncoderSpec,
    SpanEncoder,
    build_encoder,
    choose_library,
    encode_all,
    encoder_spec,
    name_and_version,
)
from .tokenizer.messages import ChatError, kind_of, normalise_messages
from .tokenizer.skeleton import Piece
from .tokenizer.template import ChatSpec, chat_spec
from .tokenizer.tokenizer import LoadedTokenizer
from .tokenizer.turns import ChatRenderer

HELD_OUT_SHARE = 0.01

# Below this a corpus is counted sooner than worker processes have loaded the tokenizer.
_SMALL_BYTES = 4 << 20
_MAX_REPORTS = 10
_PROBE_BLOCKS = 4
_PROBE_TEXTS = 400
_PROBE_CHARS = 400_000
_PROBE_CHATS = 50
_Library = Literal["auto", "tokenizers", "fastokens"]


@dataclass(frozen=True)
class SourcePlan:
    """How the documents of one source are read: as `CorpusSource` says, `exact` as in `ChatRenderer`."""

    kind: Literal["text", "chat"]
    column: str
    roles: Literal["assistant", "all"]
    sample: float | None
    is_limited: bool
    exact: bool = False


@dataclass(frozen=True)
class CountPlan:
    """Everything a worker needs; picklable. `chat` is None where no source holds chats.

    `skip_bad` leaves out bad records rather than stop at the first of a block.
    """

    encoder: EncoderSpec
    chat: ChatSpec | None
    sources: tuple[SourcePlan, ...]
    skip_bad: bool
    seed: int
    held_out: float


@dataclass(frozen=True, eq=False)
class Documents:
    """The encoded documents of a block.

    Attributes:
        token_ids: uint32 [tokens], of all documents, concatenated.
        offsets: int64 [documents + 1].
        hashes: uint64 [documents].
        cuts: cuts made in a text too long to be tokenized whole, int64 [documents].
        bad: number in the block and reason of the first bad records.
        bad_after: how many documents stand before each bad record, int64 [bad records].
    """

    token_ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    cuts: NDArray[np.int64]
    bad: tuple[tuple[int, str], ...]
    bad_after: NDArray[np.int64]

    def first(self, num_documents: int) -> Documents:
        """Return the first documents that have tokens, and what lies before the last of them."""
        stop = int(np.flatnonzero(np.diff(self.offsets))[num_documents - 1]) + 1
        ids, num_bad = self.token_ids[: self.offsets[stop]], int((self.bad_after < stop).sum())
        bad, bad_after = self.bad[:num_bad], self.bad_after[:num_bad]
        return Documents(ids, self.offsets[: stop + 1], self.hashes[:stop], self.cuts[:stop], bad, bad_after)


@dataclass(eq=False)
class Tally:
    """Counts of a part of a source.

    Attributes:
        counts: int64 [vocab], held-out documents left out.
        held_out: token ids of each held-out document, int32 [tokens].
        documents, tokens: with the held-out ones; documents are those with a token.
        empty: documents without a token.
        skipped: bad records.
        cuts: cuts made in texts too long to be tokenized whole.
        digest: sum of the hashes of all documents, modulo 2^64.
        bad: as in `Documents`.
    """

    counts: NDArray[np.int64]
    held_out: list[NDArray[np.int32]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    skipped: int = 0
    cuts: int = 0
    digest: int = 0
    bad: tuple[tuple[int, str], ...] = ()

    def add(self, other: Tally) -> None:
        """Add another part of the same source; `bad` stays as it is."""
        self.counts += other.counts
        self.held_out += other.held_out
        self.digest = (self.digest + other.digest) % 2**64
        for name in ("documents", "tokens", "empty", "skipped", "cuts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def draws(hashes: NDArray[np.uint64], stream: int) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each hash, others for each stream: splitmix64 (Steele, Lea, Flood 2014)."""
    x = hashes + np.uint64(stream * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64


def tally(found: Documents, plan: CountPlan) -> Tally:
    """Count the documents of a block, and hold out a share of them.

    Raises:
        TokenizerError: the tokenizer gives ids beyond its vocabulary.
    """
    lengths, vocab_size = np.diff(found.offsets), plan.encoder.vocab_size
    counts = np.bincount(found.token_ids, minlength=vocab_size)
    if len(counts) > vocab_size:
        raise TokenizerError(
            f"The tokenizer gave id {len(counts) - 1}, but the largest id of its vocabulary is {vocab_size - 1}."
        )
    chosen = np.flatnonzero((draws(found.hashes, 2 * plan.seed) < plan.held_out) & (lengths > 0))
    documents = [found.token_ids[found.offsets[at] : found.offsets[at + 1]].astype(np.int32) for at in chosen]
    if documents:
        counts -= np.bincount(np.concatenate(documents), minlength=vocab_size)
    present = int((lengths > 0).sum())
    return Tally(
        counts,
        documents,
        documents=present,
        tokens=len(found.token_ids),
        empty=len(lengths) - present,
        skipped=len(found.bad_after),
        cuts=int(found.cuts.sum()),
        digest=int(found.hashes.sum(dtype=np.uint64)),
        bad=found.bad,
    )


class BlockCounter:
    """Counts blocks; holds the tokenizer and the chat template, so one per process."""

    def __init__(self, plan: CountPlan) -> None:
        self._plan = plan
        self._encoder = build_encoder(plan.encoder)
        self._renderer = lru_cache(self._make_renderer)
        # Templates have few headers; the bound is for one that writes something new each time.
        self._header_ids = lru_cache(4096)(lambda header: self._encoder.encode([header]).token_ids)

    def count(self, source: int, block: Block) -> Documents | Tally:
        """Count one block of a source; where the source has a limit, return its documents.

        Raises:
            TokenizerError: the tokenizer gives ids beyond its vocabulary.
            CorpusError: the input cannot be read.
        """
        found = self.encode(source, block)
        if self._plan.sources[source].is_limited:
            return found
        return tally(found, self._plan)

    def encode(self, source: int, block: Block) -> Documents:
        """Read and encode one block."""
        documents: list[Any] = []
        hashes: list[int] = []
        bad: list[tuple[int, str]] = []
        bad_after: list[int] = []
        for number, document, key in self.documents(source, block):
            if isinstance(document, BadRecord):
                bad_after.append(len(hashes))
                if len(bad) < _MAX_REPORTS:
                    bad.append((number, document.reason))
                if not self._plan.skip_bad:
                    break
            else:
                documents.append(document)
                hashes.append(key)
        if self._plan.sources[source].kind == "text":
            encoded, cuts = encode_all(self._encoder, documents)
            token_ids, offsets = encoded.token_ids, encoded.offsets
        else:
            token_ids, offsets, cuts = self.encode_chats(documents)
        keys, after = np.array(hashes, np.uint64), np.array(bad_after, np.int64)
        return Documents(token_ids, offsets, keys, cuts, tuple(bad), after)

    def documents(self, source: int, block: Block) -> Iterator[tuple[int, str | list[Piece] | BadRecord, int]]:
        """Yield the number of each sampled record, its text or the pieces of its chat, and its hash; or a BadRecord."""
        from xxhash import xxh3_64_intdigest

        plan = self._plan.sources[source]
        pieces_of = None
        if plan.kind == "chat":
            renderer = self._renderer(plan.exact)
            pieces_of = renderer.all_pieces if plan.roles == "all" else renderer.assistant_pieces
        for number, value in block.records(plan.column):
            if isinstance(value, BadRecord):
                yield number, value, 0
                continue
            document: str | list[Piece]
            try:
                if pieces_of is not None:
                    messages = normalise_messages(value)
                    told = json.dumps(messages, sort_keys=True, ensure_ascii=False, default=str)
                    key = xxh3_64_intdigest(told.encode())
                    document = pieces_of(messages) if self._is_sampled(plan, key) else []
                elif isinstance(value, str):
                    document, key = value, xxh3_64_intdigest(value.encode())
                else:
                    raise ChatError(f"expected a string, found {kind_of(value)}")
            except UnicodeEncodeError:
                yield number, BadRecord("half of a surrogate pair (\\ud800 to \\udfff) is not a character"), 0
            except ChatError as error:
                yield number, BadRecord(f"column {plan.column!r}: {error}"), 0
            else:
                if self._is_sampled(plan, key):
                    yield number, document, key

    def _is_sampled(self, plan: SourcePlan, key: int) -> bool:
        return plan.sample is None or draws(np.array([key], np.uint64), 2 * self._plan.seed + 1)[0] < plan.sample

    def encode_chats(
        self, chats: Sequence[list[Piece]]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of all chats that count, their offsets int64 [chats + 1], and the cuts in each chat."""
        pieces = [piece for chat in chats for piece in chat]
        encoded, cuts = encode_all(self._encoder, ["" if piece.spans else piece.text for piece in pieces])
        offsets, token_ids = encoded.offsets, encoded.token_ids
        if any(piece.header_chars or piece.spans for piece in pieces):
            parts = [
                self._counted_part(piece, token_ids[start:stop])
                for piece, start, stop in zip(pieces, offsets[:-1], offsets[1:], strict=True)
            ]
            token_ids = np.concatenate(parts)
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in parts], dtype=np.int64)])
        pieces_before = np.cumsum([0, *map(len, chats)])
        cuts_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(cuts)])
        return token_ids, offsets[pieces_before], np.diff(cuts_before[pieces_before])

    def _counted_part(self, piece: Piece, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        if piece.spans:
            return self._spans.encode(piece.text, piece.spans)
        if not piece.header_chars:
            return token_ids
        header_ids = self._header_ids(piece.text[: piece.header_chars])
        if np.array_equal(token_ids[: len(header_ids)], header_ids):
            return token_ids[len(header_ids) :]
        # A token reaches across the beginning of the turn.
        return self._spans.encode(piece.text, [(piece.header_chars, len(piece.text))])

    @cached_property
    def _spans(self) -> SpanEncoder:
        return SpanEncoder(self._plan.encoder.tokenizer_json)

    def _make_renderer(self, exact: bool) -> ChatRenderer:
        assert self._plan.chat is not None
        return ChatRenderer(self._plan.chat, exact)


# How a corpus will be counted, found out on a probe of it


def open_for_counting(
    sources: Sequence[CorpusSource],
    tokenizer: LoadedTokenizer,
    *,
    tokenizer_library: _Library = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    held_out: float = HELD_OUT_SHARE,
    on_error: Literal["stop", "skip"] = "stop",
    notify: Callable[[str], None] | None = None,
) -> tuple[list[OpenSource], CountPlan]:
    """Open every source and plan the count after a probe; arguments and errors as `count_tokens`."""
    if not sources:
        raise UsageError("Nothing to count: name a file, folder, glob or dataset.")
    if not 0 <= held_out < 1:
        raise UsageError(f"held-out share: expected at least 0 and below 1, found {held_out}.", option="--held-out")
    names = [source.name for source in sources]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"Two sources are called {repeated!r}. Give each a name of its own, as in chat=...")
    opened = [open_source(source, seed) for source in sources]
    refuse_repeated_inputs(opened)
    say = notify or (lambda message: None)
    has_chat = any(source.kind == "chat" for source in opened)
    if chat_template is not None and not has_chat:
        raise UsageError("A chat template was given, but no source holds chats.", option="--chat-template")
    plans = tuple(
        SourcePlan(
            kind=source.kind,
            column=source.column,
            roles=source.source.roles,
            sample=source.source.sample,
            is_limited=source.source.max_documents is not None or source.source.max_tokens is not None,
        )
        for source in opened
    )
    chat = chat_spec(tokenizer, chat_template) if has_chat else None
    encoder = encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    plan = CountPlan(encoder, chat, plans, on_error == "skip", seed, held_out)
    plan = replace(plan, sources=tuple(_probed(plan, at, source, say) for at, source in enumerate(opened)))
    library, reason = choose_library(tokenizer_library, encoder, _probe_texts(plan, opened))
    if tokenizer_library == "auto":
        say(f"tokenizing with {library}: {reason}")
    return opened, replace(plan, encoder=replace(encoder, library=library))


def _probe_texts(plan: CountPlan, opened: Sequence[OpenSource]) -> Iterator[tuple[object, str]]:
    counter = BlockCounter(plan)
    for at, source in enumerate(opened):
        for block in source.probe(_PROBE_BLOCKS):
            texts = chars = 0
            for number, document, _ in counter.documents(at, block):
                if isinstance(document, BadRecord):
                    continue
                for text in [document] if isinstance(document, str) else [piece.text for piece in document]:
                    yield _Place(block, number), text[:_PROBE_CHARS]
                    texts, chars = texts + 1, chars + len(text)
                if texts >= _PROBE_TEXTS or chars >= _PROBE_CHARS:
                    break


@dataclass(frozen=True)
class _Place:
    """Where a probed document is; the line number is looked up only when it is printed."""

    block: Block
    number: int

    def __str__(self) -> str:
        return self.block.place(self.number)


def _probed(plan: CountPlan, at: int, source: OpenSource, say: Callable[[str], None]) -> SourcePlan:
    """Check on real chats that tokens do not change where texts are cut at the added tokens."""
    chosen = plan.sources[at]
    if chosen.kind == "text" or chosen.roles == "all":
        return chosen
    exact = replace(chosen, exact=True)
    counter, whole = BlockCounter(plan), BlockCounter(replace(plan, sources=(exact,)))
    for block in source.probe(_PROBE_BLOCKS):
        pairs = zip(counter.documents(at, block), whole.documents(0, block), strict=False)
        for (number, pieces, _), (_, expected, _) in islice(pairs, _PROBE_CHATS):
            if not isinstance(pieces, list) or not isinstance(expected, list):
                continue
            if not np.array_equal(counter.encode_chats([pieces])[0], whole.encode_chats([expected])[0]):
                say(
                    f"{source.source.name}: tokenizing whole conversations, which is slower: this tokenizer gives "
                    f"other tokens when a text is cut at its added tokens (seen at {block.place(number)})"
                )
                return exact
    return chosen


# Counting


def count_tokens(
    sources: Sequence[CorpusSource],
    tokenizer: LoadedTokenizer,
    *,
    workers: int | None = None,
    run_on: Literal["local", "ray"] = "local",
    tokenizer_library: _Library = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    held_out: float = HELD_OUT_SHARE,
    on_error: Literal["stop", "skip"] = "stop",
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
        run_on: "local" for this machine, or "ray" for a Ray cluster (see ray_workers.py), where a worker is an actor
            with one CPU, and None means one for each CPU of the cluster.
        tokenizer_library: library that encodes; "auto" takes `fastokens` where it is installed and has given the ids of
            `tokenizers` on a probe of the corpus.
        chat_template: Jinja source in place of the tokenizer's own template.
        seed: decides what is sampled, shuffled and held out.
        held_out: share of each source's documents that is held out, by a hash of their text.
        on_error: "stop" at a record that cannot be read, or "skip" it and count how many were skipped.
        progress: show a progress bar on stderr; None: on a terminal; a function is called with the number of tokens
            that each block adds.
        notify: called with messages for the user, such as skipped records.

    Raises:
        UsageError: no sources, names or inputs that repeat, or a setting that fits no source.
        CorpusError: a source or record cannot be read, or a file changed meanwhile.
        TokenizerError: the tokenizer or its chat template cannot be used.
    """
    say = notify or (lambda message: None)
    opened, plan = open_for_counting(
        sources,
        tokenizer,
        tokenizer_library=tokenizer_library,
        chat_template=chat_template,
        seed=seed,
        held_out=held_out,
        on_error=on_error,
        notify=notify,
    )
    if chat_template is not None:
        tokenizer = replace(tokenizer, chat_templates={"default": chat_template})
    counted = []
    with _workers(run_on, plan, workers, opened) as running, ProgressBar(opened, progress) as bar:
        for at, source in enumerate(opened):
            total, last = _count_source(at, source, plan, running, bar, say)
            counted.append(_source_counts(source, total, last, plan, tokenizer.chat_template_hash))
            if held_out and counted[-1].held_out is None:
                say(
                    f"{source.source.name}: none of its {total.documents:,} documents was held out, so its coverage "
                    "can only be measured on what was counted; hold out a larger share"
                )
    return TokenCounts(tuple(counted), tokenizer.tokenizer_hash)


def _count_source(
    at: int, source: OpenSource, plan: CountPlan, workers: Workers, bar: ProgressBar, say: Callable[[str], None]
) -> tuple[Tally, int | None]:
    """Count to the end, or to a limit; return the shard in which a limit fell, too."""
    asked, limited_in, told = source.source, None, 0
    total = Tally(np.zeros(plan.encoder.vocab_size, np.int64))
    results = workers.count(at, source)
    with contextlib.closing(results):
        for block, result in results:
            if isinstance(result, Documents):
                allowed = _allowed(asked, total, result)
                if allowed is not None:
                    result, limited_in = result.first(allowed), block.shard
                result = tally(result, plan)
            for number, reason in result.bad:
                if not plan.skip_bad:
                    raise CorpusError(
                        f"{block.place(number)}: {reason}. Mend the record, or leave such records out with "
                        "`eagle-vocab count --on-error skip`."
                    )
                if told < _MAX_REPORTS:
                    say(f"skipped {block.place(number)}: {reason}")
                told += 1
            total.add(result)
            bar.moved(block.size, result.tokens)
            if limited_in is not None:
                break
    source.check_unchanged()
    if not total.tokens:
        hint = f"Empty documents: {total.empty:,}; records skipped: {total.skipped:,}."
        if total.empty and source.kind == "chat" and asked.roles == "assistant":
            hint = f"None of its conversations ({total.empty:,}) has an assistant turn; count them with roles=all."
        raise CorpusError(f"{asked.location}: no tokens in this source. {hint}")
    if total.skipped:
        say(f"{asked.name}: {total.skipped:,} records skipped in total")
    return total, limited_in


def _allowed(source: CorpusSource, total: Tally, found: Documents) -> int | None:
    """Return how many of a block's documents the limits let in; None when no limit falls in this block."""
    lengths = np.diff(found.offsets)
    lengths = lengths[lengths > 0]
    limits = []
    if source.max_documents is not None and total.documents + len(lengths) >= source.max_documents:
        limits.append(source.max_documents - total.documents)
    if source.max_tokens is not None:
        reached = np.flatnonzero(total.tokens + np.cumsum(lengths) >= source.max_tokens)
        limits += [int(at) + 1 for at in reached[:1]]
    return min(limits) if limits else None


def _source_counts(
    opened: OpenSource, total: Tally, limited_in: int | None, plan: CountPlan, template_hash: str | None
) -> SourceCounts:
    source, is_chat = opened.source, opened.kind == "chat"
    held_out = HeldOut.of_documents(total.held_out) if total.held_out else None
    read = opened.order if limited_in is None else opened.order[: opened.order.index(limited_in) + 1]
    files = sorted((opened.files[shard] for shard in read if opened.files), key=lambda file: file.name)
    provenance: dict[str, JSON] = {
        **opened.origin,
        **({"files": [{"name": file.name, "bytes": file.size} for file in files]} if files else {}),
        "text": source.roles if is_chat else "all",
        "chat": is_chat,
        "chat_template_hash": template_hash if is_chat else None,
        "documents": total.documents - len(total.held_out),
        "tokens": int(total.counts.sum()),
        "empty_documents": total.empty,
        "skipped_records": total.skipped,
        "cuts_in_long_texts": total.cuts,
        "digest": f"{total.digest:016x}",
        "max_documents": source.max_documents,
        "max_tokens": source.max_tokens,
        "ended_by_limit": limited_in is not None,
        "sample": source.sample,
        "shuffle": source.shuffle,
        "seed": plan.seed,
        "tokenizer_library": name_and_version(plan.encoder.library),
        "held_out": {
            "documents": len(total.held_out),
            "tokens": held_out.num_tokens if held_out else 0,
            "rule": "hash of the text and the seed",
            "share": plan.held_out,
        },
    }
    return SourceCounts(source.name, source.weight, total.counts, held_out, provenance)


class ProgressBar:
    """Progress on stderr: share of the corpus where its size is known, tokens, tokens per second."""

    def __init__(self, opened: Sequence[OpenSource], progress: bool | Callable[[int], None] | None) -> None:
        from tqdm import tqdm

        self._call = progress if callable(progress) else None
        shown = False if callable(progress) else progress
        sizes = [source.size for source in opened]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        self._tokens = 0
        self._started = time.monotonic()
        self._bar = tqdm(
            total=total,
            desc="counting",
            disable=None if shown is None else not shown,
            delay=0 if shown else 1,
            bar_format="{desc}: {elapsed}{postfix}"
            if total is None
            else "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def moved(self, size: int, tokens: int) -> None:
        """Advance by a block: its size in units of `OpenSource.size`, and its tokens."""
        if self._call:
            self._call(tokens)
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens / 1e6:.1f}M tokens, {rate / 1e6:.2f}M tokens/s", refresh=False)
        self._bar.update(size)


# Workers

Counted = tuple[Block, Documents | Tally]


class Workers:
    """Counts the blocks of a source and gives the results in their order; these do it in this process."""

    def __init__(self, plan: CountPlan) -> None:
        self._counter = BlockCounter(plan)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def count(self, source: int, opened: OpenSource) -> Generator[Counted, None, None]:
        """Yield each block, its data aside, and what `BlockCounter.count` gives for it."""
        for block in opened.blocks():
            yield block, self._counter.count(source, block)


class Processes(Workers):
    """Counts in worker processes, each with one tokenizer thread."""

    def __init__(self, plan: CountPlan, num_workers: int) -> None:
        self._in_flight = 2 * num_workers + 1
        self._pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (plan,))

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def count(self, source: int, opened: OpenSource) -> Generator[Counted, None, None]:
        """See `Workers`."""
        waiting: deque[tuple[Block, Future[Documents | Tally]]] = deque()
        blocks = opened.blocks()
        try:
            while True:
                for block in islice(blocks, self._in_flight - len(waiting)):
                    waiting.append((block.without_data(), self._pool.submit(_work, source, block)))
                if not waiting:
                    return
                block, future = waiting.popleft()
                yield block, future.result()
        except BrokenProcessPool as error:
            raise EagleSlimError(
                "A worker process died, perhaps because memory ran out; fewer --workers need less memory."
            ) from error
        finally:
            for _, future in waiting:
                future.cancel()


def use_one_tokenizer_thread() -> None:
    """Let the tokenizer of this process encode in one thread; before it first encodes, when rayon reads this."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_counter: BlockCounter | None = None


def _start_worker(plan: CountPlan) -> None:
    """Prepare a worker process: one tokenizer thread, no Ctrl-C of its own, and it ends when its parent does."""
    import signal

    use_one_tokenizer_thread()
    # A terminal sends these to the whole group; the parent process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    global _counter
    _counter = BlockCounter(plan)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(source: int, block: Block) -> Documents | Tally:
    assert _counter is not None
    return _counter.count(source, block)


def _workers(
    run_on: Literal["local", "ray"], plan: CountPlan, num_workers: int | None, opened: Sequence[OpenSource]
) -> Workers:
    if run_on == "ray":
        from .ray_workers import RayWorkers

        return RayWorkers(plan, num_workers)
    if num_workers is None:
        sizes = [source.size for source in opened]
        is_small = None not in sizes and sum(size or 0 for size in sizes) < _SMALL_BYTES
        num_workers = 0 if is_small else len(os.sched_getaffinity(0))
    return Processes(plan, num_workers) if num_workers else Workers(plan)
