"""Count the blocks of a source, in this process or in others, in any order.

A document is held out, and never counted, by a hash of its text (of a chat, its messages): the same document always,
whatever stands beside it, so that counts of parts add up to the counts of the whole.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .chats import ChatRenderer, ChatSpec, Piece
from .encoding import Encoded, EncoderSpec, build_encoder, encode_all, encode_tail
from .errors import EagleSlimError
from .messages import ChatError, kind_of, normalise_messages
from .records import BadRecord, Block
from .sources import OpenSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_REPORTS = 10
"""Bad records of a block that are told one by one; the others are only counted."""


@dataclass(frozen=True)
class CountPlan:
    """Everything a worker needs, picklable. Bad records are left out with `skip_bad`, else the first ends its block."""

    encoder: EncoderSpec
    chat: ChatSpec | None
    sources: tuple[OpenSource, ...]
    skip_bad: bool
    seed: int
    held_out: float


@dataclass(eq=False)
class Tally:
    """Counts of a part of a source.

    Attributes:
        counts: int64 [vocab], held-out documents left out.
        held_out: token ids of each held-out document, int32 [tokens].
        documents, tokens: with the held-out ones; documents are those with a token, `empty` those without.
        skipped: bad records; `bad` are number in the block and reason of the first ones.
        apart: messages of the assistant that no turn of the template holds, encoded by themselves.
        digest: sum of the hashes of all documents, modulo 2^64.
    """

    counts: NDArray[np.int64]
    held_out: list[NDArray[np.int32]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    skipped: int = 0
    apart: int = 0
    digest: int = 0
    bad: tuple[tuple[int, str], ...] = ()

    def add(self, other: Tally) -> None:
        """Add another part of the same source."""
        self.counts += other.counts
        self.held_out += other.held_out
        self.digest = (self.digest + other.digest) % 2**64
        self.bad = (*self.bad, *other.bad)[:MAX_REPORTS]
        for name in ("documents", "tokens", "empty", "skipped", "apart"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def draws(hashes: NDArray[np.uint64], stream: int) -> NDArray[np.float64]:
    """Map hashes to numbers from 0 to 1, different ones for each stream: splitmix64 (Steele, Lea, Flood 2014)."""
    x = hashes + np.uint64(stream * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype(np.float64) / 2.0**64


class BlockCounter:
    """Counts blocks; holds the tokenizer and the chat template, so one per process. Raises CorpusError."""

    def __init__(self, plan: CountPlan) -> None:
        self._plan = plan
        self._encode = build_encoder(plan.encoder)
        # Templates have few headers; the bound is for one that writes something new each time.
        self._header_ids = lru_cache(4096)(lambda header: self._encode([header]).token_ids)

    def count(self, source: int, block: Block) -> Tally:
        """Count one block of a source."""
        return self._tally(self.documents(source, block))

    def count_up_to(self, source: int, block: Block, documents: float, tokens: float) -> Tally:
        """Count a block document by document, up to the one that reaches a number of documents or tokens."""
        total = Tally(np.zeros(self._plan.encoder.vocab_size, np.int64))
        for record in self.documents(source, block):
            total.add(self._tally([record]))
            if total.documents >= documents or total.tokens >= tokens:
                break
        return total

    def _tally(self, records: Iterable[tuple[int, list[Piece] | BadRecord, int]]) -> Tally:
        hashed: list[tuple[int, list[Piece]]] = []
        bad: list[tuple[int, str]] = []
        for number, document, key in records:
            if not isinstance(document, BadRecord):
                hashed.append((key, document))
                continue
            bad.append((number, document.reason))
            if not self._plan.skip_bad:
                break
        documents = [document for _, document in hashed]
        encoded, vocab_size = self._encode_pieces(documents), self._plan.encoder.vocab_size
        token_ids, offsets = encoded.token_ids, encoded.offsets
        counts = np.bincount(token_ids, minlength=vocab_size)
        keys, present = np.array([key for key, _ in hashed], np.uint64), np.diff(offsets) > 0
        chosen = np.flatnonzero((draws(keys, 2 * self._plan.seed) < self._plan.held_out) & present)
        held_out = [token_ids[offsets[at] : offsets[at + 1]].astype(np.int32) for at in chosen]
        if held_out:
            counts -= np.bincount(np.concatenate(held_out), minlength=vocab_size)
        tally = Tally(counts, held_out, documents=int(present.sum()), tokens=len(token_ids), skipped=len(bad))
        tally.empty = len(documents) - tally.documents
        tally.apart = sum(piece.is_apart for pieces in documents for piece in pieces)
        tally.digest, tally.bad = int(keys.sum(dtype=np.uint64)), tuple(bad[:MAX_REPORTS])
        return tally

    def documents(self, source: int, block: Block) -> Iterator[tuple[int, list[Piece] | BadRecord, int]]:
        """Yield the number of each sampled record, its text or turns as pieces, and its hash; or a BadRecord."""
        opened, share = self._plan.sources[source], self._plan.sources[source].source.sample
        for number, value in block.records(opened.column):
            if isinstance(value, BadRecord):
                yield number, value, 0
                continue
            try:
                if opened.kind == "chat":
                    messages = normalise_messages(value)
                    text = json.dumps(messages, sort_keys=True, ensure_ascii=False, default=str)
                elif isinstance(value, str):
                    text = value
                else:
                    raise ChatError(f"expected a string, found {kind_of(value)}")
                key = xxh3_64_intdigest(text.encode())
                if share is not None and draws(np.array([key], np.uint64), 2 * self._plan.seed + 1)[0] >= share:
                    continue
                if opened.kind == "text":
                    pieces = [Piece(text)]
                elif opened.source.roles == "all":
                    pieces = self._renderer.all_pieces(messages)
                else:
                    pieces = self._renderer.assistant_pieces(messages)
            except UnicodeEncodeError:
                yield number, BadRecord("half of a surrogate pair (\\ud800 to \\udfff) is not a character"), 0
            except ChatError as error:
                yield number, BadRecord(f"column {opened.column!r}: {error}"), 0
            else:
                yield number, pieces, key

    def _encode_pieces(self, documents: Sequence[list[Piece]]) -> Encoded:
        pieces = [piece for document in documents for piece in document]
        encoded = encode_all(self._encode, [piece.text for piece in pieces])
        offsets, token_ids = encoded.offsets, encoded.token_ids
        if any(piece.header_chars for piece in pieces):
            parts = list(map(self._counted_part, pieces, np.split(token_ids, offsets[1:-1])))
            token_ids, offsets = np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return Encoded(token_ids, offsets[np.cumsum([0, *map(len, documents)])])

    def _counted_part(self, piece: Piece, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        if not piece.header_chars:
            return token_ids
        header_ids = self._header_ids(piece.text[: piece.header_chars])
        if np.array_equal(token_ids[: len(header_ids)], header_ids):
            return token_ids[len(header_ids) :]
        # A token reaches across the beginning of the turn.
        return encode_tail(self._tokenizer, piece.text, piece.header_chars)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._plan.encoder.tokenizer_json)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        assert self._plan.chat is not None
        return ChatRenderer(self._plan.chat)


Counted = tuple[Block, Tally]
Count = Callable[[int, OpenSource], Iterator[Counted]]
"""Counts a source, given with its place in the plan: each block with its tally, in the order of the source."""
T = TypeVar("T")
F = TypeVar("F")


@contextmanager
def this_process(plan: CountPlan) -> Iterator[Count]:
    """Count in this process."""
    counter = BlockCounter(plan)
    yield lambda source, opened: ((block, counter.count(source, block)) for block in opened.blocks())


@contextmanager
def processes(plan: CountPlan, num_workers: int) -> Iterator[Count]:
    """Count in worker processes, each with one tokenizer thread."""
    try:
        pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (plan,))
    except OSError as error:
        problem = f"Worker processes need /dev/shm ({error.strerror})"
        raise EagleSlimError(f"{problem}. Count in one process with --workers 0.") from error

    def count(source: int, opened: OpenSource) -> Iterator[Counted]:
        blocks = in_order(opened.blocks(), lambda block: pool.submit(_work, source, block), 2 * num_workers + 1)
        try:
            for block, future in blocks:
                yield block, future.result()
        except BrokenProcessPool as error:
            why = "perhaps because memory ran out; fewer --workers need less memory"
            raise EagleSlimError(f"A worker process died, {why}.") from error

    try:
        yield count
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(units: Iterator[T], submit: Callable[[T], F], max_units: int) -> Iterator[tuple[T, F]]:
    """Keep at most `max_units` units submitted, and yield each unit with its future, in order."""
    waiting: deque[tuple[T, F]] = deque()
    while True:
        waiting.extend((unit, submit(unit)) for unit in islice(units, max_units - len(waiting)))
        if not waiting:
            return
        yield waiting.popleft()


def use_one_tokenizer_thread() -> None:
    """Limit the tokenizer of this process to one thread; call it before anything is encoded."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_counter: BlockCounter | None = None


def _start_worker(plan: CountPlan) -> None:
    """Prepare a worker process: one tokenizer thread, no Ctrl-C of its own, and it ends when its parent does."""
    import signal

    use_one_tokenizer_thread()
    # A terminal sends these to the whole group; the parent process ends the workers.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    global _counter
    _counter = BlockCounter(plan)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(source: int, block: Block) -> Tally:
    assert _counter is not None
    return _counter.count(source, block)
