"""One block of a corpus → partial counts: the pure function that workers run on every block.

    CountPlan + Block → BlockCounts          `BlockCounter.count`, in any process, in any order
    PartialCounts + PartialCounts            `merge_partial`, associative and commutative
    PartialCounts → counts and held-out part `PartialCounts.finish`

Only the limits on documents and tokens need an order. They are applied in the order of the corpus by source_run.py:
`BlockCounts.doc_tokens` shows where a limit falls, and `limit` counts a block up to there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..chats import ChatError, ChatRenderer, ChatSpec, Piece, kind_of, normalise_messages
from ..corpus.blocks import BadRecord, Block, Records, document_index
from ..encoding import EncoderSpec, SpanEncoder, build_encoder, encode_all
from ..errors import TokenizerError
from .counts import HeldOut
from .held_out import NO_BOUND, Candidates, HeldOutRule, document_keys, merge_candidates, ranges

# Bad records that a block, or a run of merged ones, reports one by one; beyond that it only counts them.
MAX_REPORTS = 16


@dataclass(frozen=True)
class SourcePlan:
    """How the documents of one source are read: as `CorpusSource` says, `exact` as in `ChatRenderer`.

    The keys are those of the source for `document_keys`, for sampling and for holding out.
    """

    kind: Literal["text", "chat"]
    column: str
    roles: Literal["assistant", "all"]
    exact: bool
    sample: float | None
    sample_key: int
    held_out_key: int


@dataclass(frozen=True)
class CountPlan:
    """Everything a worker needs; picklable. `chat` is None where no source holds chats.

    `skip_bad` leaves out bad records rather than stop at the first of a block.
    """

    encoder: EncoderSpec
    chat: ChatSpec | None
    sources: tuple[SourcePlan, ...]
    skip_bad: bool
    held_out: HeldOutRule


NUMBERS = ("documents", "tokens", "empty", "skipped", "cuts")
"""What `PartialCounts` adds up beside the counts by id."""


@dataclass(frozen=True, eq=False)
class PartialCounts:
    """Counts of a part of a source.

    Attributes:
        counts: int64 [vocab], of everything but the candidates.
        documents: documents with at least one token, candidates included.
        tokens: tokens, candidates included.
        empty: documents without a token.
        skipped: bad records.
        cuts: cuts made in texts too long to be tokenized whole.
        candidates: documents that may yet be held out.
    """

    counts: NDArray[np.int64]
    documents: int
    tokens: int
    empty: int
    skipped: int
    cuts: int
    candidates: Candidates

    @classmethod
    def zero(cls, vocab_size: int) -> PartialCounts:
        """Return the neutral element of `merge_partial`."""
        return cls(np.zeros(vocab_size, np.int64), 0, 0, 0, 0, 0, Candidates.empty())

    def finish(self, rule: HeldOutRule) -> tuple[NDArray[np.int64], HeldOut | None]:
        """Hold out the wanted fraction and count the other candidates.

        Returns:
            counts, int64 [vocab], and the held-out documents; None when the rule holds nothing out.
        """
        held_out, rest = self.candidates.head(rule.documents_of(self.documents))
        counts = self.counts + np.bincount(rest, minlength=len(self.counts))
        if not rule.active:
            return counts, None
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(held_out.lengths, dtype=np.int64)])
        return counts, HeldOut(held_out.token_ids, offsets)


def merge_partial(a: PartialCounts, b: PartialCounts, rule: HeldOutRule) -> PartialCounts:
    """Add up two parts of one source."""
    counts = a.counts + b.counts
    if len(b.candidates.keys) or b.candidates.bound < a.candidates.bound:
        candidates, given_up = merge_candidates(a.candidates, b.candidates, rule)
        if len(given_up):
            counts += np.bincount(given_up, minlength=len(counts))
    else:
        candidates = a.candidates
    return PartialCounts(
        counts, candidates=candidates, **{name: getattr(a, name) + getattr(b, name) for name in NUMBERS}
    )


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """The result of one block.

    Attributes:
        partial: its counts.
        doc_tokens: tokens of each document that has any, in order, int32 [documents].
        bad: the first bad records, at most 16; when they are not skipped, one, and the counts end before it.
    """

    partial: PartialCounts
    doc_tokens: NDArray[np.int32]
    bad: tuple[BadRecord, ...]


class BlockCounter:
    """Counts blocks; holds the tokenizer and the chat template, so one per process."""

    def __init__(self, plan: CountPlan) -> None:
        self._plan = plan
        self._encoder = build_encoder(plan.encoder)
        self._reader = DocumentReader(plan)
        # Templates have few headers; the bound is for one that writes something new each time.
        self._header_ids = lru_cache(4096)(lambda header: self._encoder.encode([header]).token_ids)

    def count(self, source: int, block: Block, bound: int = NO_BOUND, limit: int | None = None) -> BlockCounts:
        """Count one block.

        Args:
            source: ordinal of its source in the plan.
            bound: documents whose key reaches this are known not to be held out. Any bound that the accumulated
                candidates have or had gives the same counts in the end.
            limit: count only so many documents (at least 1), and nothing after them.

        Raises:
            TokenizerError: the tokenizer gives ids beyond its vocabulary.
            CorpusError: the input changed meanwhile.
        """
        plan = self._plan
        token_ids, offsets, cuts, positions, bad = self._read_and_encode(source, block)
        lengths = np.diff(offsets)
        index = document_index(block.shard, positions)
        present = np.flatnonzero(lengths)
        if limit is not None and limit <= len(present):
            stop = int(present[limit - 1]) + 1
            bad = [record for record in bad if record.position < positions[stop - 1]]
            token_ids, lengths, index = token_ids[: offsets[stop]], lengths[:stop], index[:stop]
            present, cuts = present[:limit], cuts[:stop]
        counts = np.bincount(token_ids, minlength=plan.encoder.vocab_size)
        if len(counts) > plan.encoder.vocab_size:
            largest = plan.encoder.vocab_size - 1
            raise TokenizerError(
                f"The tokenizer gave id {len(counts) - 1}, but the largest id of its vocabulary is {largest}."
            )
        keys = document_keys(plan.sources[source].held_out_key, index)
        candidates = self._candidates(keys, lengths, token_ids, bound)
        if len(candidates.token_ids):
            counts -= np.bincount(candidates.token_ids, minlength=len(counts))
        return BlockCounts(
            PartialCounts(
                counts,
                documents=len(present),
                tokens=len(token_ids),
                empty=len(lengths) - len(present),
                skipped=len(bad),
                cuts=int(cuts.sum()),
                candidates=candidates,
            ),
            lengths[present].astype(np.int32),
            tuple(bad[:MAX_REPORTS]),
        )

    def _read_and_encode(
        self, source: int, block: Block
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[BadRecord]]:
        """Return what `_encode` gives for a block, the documents' positions int64 [documents], and the bad records."""
        plain = self._reader.plain_texts(source, block)
        if plain is not None:
            positions, texts = plain
            encoded, cuts = encode_all(self._encoder, texts)
            return encoded.token_ids, encoded.offsets, cuts, positions, []
        places: list[int] = []
        documents: list[list[Piece]] = []
        bad: list[BadRecord] = []
        for position, document in self._reader.documents(source, block):
            if isinstance(document, BadRecord):
                bad.append(document)
                if not self._plan.skip_bad:
                    break
            else:
                places.append(position)
                documents.append(document)
        return *self._encode(documents), np.array(places, np.int64), bad

    def encode_document(self, document: list[Piece]) -> NDArray[np.uint32]:
        """Return the token ids of one document that count, uint32 [tokens]."""
        return self._encode([document])[0]

    def _candidates(
        self, keys: NDArray[np.uint64], lengths: NDArray[np.int64], token_ids: NDArray[np.uint32], bound: int
    ) -> Candidates:
        """Return the documents that may be held out."""
        rule = self._plan.held_out
        chosen = (keys < np.uint64(bound)) & (lengths > 0) & (lengths <= rule.max_tokens)
        if not rule.active or not chosen.any():
            return Candidates.empty()
        starts = np.cumsum(lengths) - lengths
        of_candidates = token_ids[ranges(starts[chosen], lengths[chosen])].astype(np.int32)
        raw = Candidates(keys[chosen], lengths[chosen], of_candidates)
        return merge_candidates(Candidates.empty(), raw, rule)[0]

    def _encode(
        self, documents: Sequence[list[Piece]]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of all documents in one array, their offsets int64 [documents + 1], and the cuts in each."""
        pieces = [piece for document in documents for piece in document]
        encoded, cuts = encode_all(self._encoder, ["" if piece.spans else piece.text for piece in pieces])
        offsets, token_ids = encoded.offsets, encoded.token_ids
        if any(piece.header_chars or piece.spans for piece in pieces):
            parts = [
                self._counted_part(piece, token_ids[start:stop])
                for piece, start, stop in zip(pieces, offsets[:-1], offsets[1:], strict=True)
            ]
            token_ids = np.concatenate(parts)
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in parts], dtype=np.int64)])
        pieces_before = np.cumsum([0, *map(len, documents)])
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


class DocumentReader:
    """Blocks → documents, each as the pieces of text that are counted."""

    def __init__(self, plan: CountPlan) -> None:
        self._plan = plan
        self._renderer = lru_cache(self._make_renderer)

    def plain_texts(self, source: int, block: Block) -> tuple[NDArray[np.int64], list[str]] | None:
        """Return positions and texts of the sampled documents if all are plain text, else None; see `documents`."""
        plan = self._plan.sources[source]
        if plan.kind != "text":
            return None
        records, selected = self._sampled(plan, block)
        texts = records.texts(selected)
        return None if texts is None else (records.positions[selected], texts)

    def _sampled(self, plan: SourcePlan, block: Block) -> tuple[Records, NDArray[np.int64]]:
        records = block.read(plan.column)
        if plan.sample is None:
            return records, np.arange(len(records.positions))
        keys = document_keys(plan.sample_key, document_index(block.shard, records.positions))
        return records, np.flatnonzero(keys.astype(np.float64) < plan.sample * 2.0**64)

    def documents(self, source: int, block: Block) -> Iterator[tuple[int, list[Piece] | BadRecord]]:
        """Yield position and pieces of every sampled document, or what is wrong with it."""
        plan = self._plan.sources[source]
        records, selected = self._sampled(plan, block)
        renderer = self._renderer(plan.exact) if plan.kind == "chat" else None
        for position, value in zip(records.positions[selected].tolist(), records.values(selected), strict=True):
            if isinstance(value, BadRecord):
                yield position, value
            elif renderer is None:
                if isinstance(value, str):
                    yield position, [Piece(value)]
                else:
                    reason = f"column {plan.column!r}: expected a string, found {kind_of(value)}"
                    yield position, BadRecord(block.shard, position, reason)
            else:
                try:
                    messages = normalise_messages(value)
                    pieces = renderer.all_pieces if plan.roles == "all" else renderer.assistant_pieces
                    yield position, pieces(messages)
                except ChatError as error:
                    yield position, BadRecord(block.shard, position, f"column {plan.column!r}: {error}")

    def _make_renderer(self, exact: bool) -> ChatRenderer:
        assert self._plan.chat is not None
        return ChatRenderer(self._plan.chat, exact)
