"""List the tokens that a draft vocabulary holds and leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .counts import TokenCounts
from .errors import TokenizerError, printable
from .tokenizer import LoadedTokenizer, check_tokenizer
from .vocabulary import DraftVocab


@dataclass(frozen=True)
class TokenRow:
    """One token in a listing.

    Attributes:
        token_id: target id.
        rank: place in the vocabulary from 0, None for a token left out.
        text: decoded and escaped, see `readable_token`.
        count: weighted count, None without counts.
        reason: why it is forced, None for others.
    """

    token_id: int
    rank: int | None
    text: str
    count: float | None
    reason: str | None


@dataclass(frozen=True)
class VocabularyListing:
    """Tokens that a vocabulary holds and leaves out.

    Attributes:
        size, num_forced, target_vocab: of the vocabulary.
        real_tokens: ids of the target that some token has.
        forced: all forced tokens with their reasons, in rank order.
        held: the first of the other tokens, in rank order.
        last: the last tokens that still got in, in rank order.
        left_out: the most frequent tokens left out (the lowest ids, without counts).
    """

    size: int
    num_forced: int
    target_vocab: int
    real_tokens: int
    forced: tuple[TokenRow, ...]
    held: tuple[TokenRow, ...]
    last: tuple[TokenRow, ...]
    left_out: tuple[TokenRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the listing JSON-ready."""
        lists = ("forced", "held", "last", "left_out")
        return {**vars(self), **{name: [vars(row) for row in getattr(self, name)] for name in lists}}

    def text(self) -> str:
        """Return the listing as plain text."""
        # Up to 256 single bytes would bury the markers; the JSON form lists them all.
        markers = [row for row in self.forced if not (row.reason or "").startswith("byte 0x")]
        lines = [
            f"{self.size} of {self.real_tokens} tokens ({self.num_forced} forced, {len(self.forced) - len(markers)} of "
            f"them single bytes); the target's vocabulary has {self.target_vocab} rows"
        ]
        titles = ("forced", "most frequent", "last ones in", "most frequent left out")
        for title, rows in zip(titles, (markers, self.held, self.last, self.left_out), strict=True):
            if rows:
                lines += ["", f"{title}:", *(_line(row) for row in rows)]
        return "\n".join(lines)


def show_vocabulary(
    vocab: DraftVocab, tokenizer: LoadedTokenizer, counts: TokenCounts | None = None, limit: int = 20
) -> VocabularyListing:
    """List what a vocabulary holds and what it leaves out: `limit` rows per list, but all forced tokens.

    Counts are shown, and order the tokens left out.

    Raises:
        TokenizerError: vocabulary or counts were made with another tokenizer, or ids belong to no token.
    """
    check_tokenizer(tokenizer, vocab.provenance.get("tokenizer_hash"), "the vocabulary")
    real = tokenizer.real_ids[tokenizer.real_ids < vocab.target_vocab]
    strange = np.setdiff1d(vocab.target_ids, real)
    if len(strange):
        raise TokenizerError(
            f"Id {strange[0]} of the vocabulary belongs to no token of {tokenizer.source} ({len(strange)} such ids). "
            "Name the target's tokenizer."
        )
    score = np.zeros(vocab.target_vocab)
    if counts is not None:
        check_tokenizer(tokenizer, counts.tokenizer_hash, "the counts")
        weighted = counts.weighted()[: vocab.target_vocab]
        score[: len(weighted)] = weighted
    reasons = vocab.provenance.get("forced", {})
    rank_of_id = dict(zip(vocab.target_ids.tolist(), range(vocab.size), strict=True))

    def rows(ids: Iterable[int]) -> tuple[TokenRow, ...]:
        return tuple(
            TokenRow(
                token_id=token_id,
                rank=rank_of_id.get(token_id),
                text=readable_token(tokenizer, token_id),
                count=None if counts is None else float(score[token_id]),
                reason=reasons.get(str(token_id)),
            )
            for token_id in ids
        )

    ids = vocab.target_ids.tolist()
    forced = vocab.num_forced if vocab.ranked else 0
    left_out = np.setdiff1d(real, vocab.target_ids)
    left_out = left_out[np.lexsort((left_out, -score[left_out]))]
    return VocabularyListing(
        size=vocab.size,
        num_forced=forced,
        target_vocab=vocab.target_vocab,
        real_tokens=len(real),
        forced=rows(ids[:forced]),
        held=rows(ids[forced : forced + limit]),
        last=rows(ids[max(forced + limit, vocab.size - limit) :]),
        left_out=rows(left_out[:limit].tolist()),
    )


def readable_token(tokenizer: LoadedTokenizer, token_id: int) -> str:
    """Return a token's text fit for a terminal: spaces kept, control characters and lone bytes escaped.

    A token that is part of a character shows its bytes, as in `\\xe4\\xbd`; a newline is `\\n`, an unprintable
    character `\\u200b`. For example "Ġhello" of a byte-level vocabulary is " hello".
    """
    # surrogateescape keeps every byte that is not UTF-8 as one code point of U+DC80 to U+DCFF.
    text = tokenizer.token_bytes(token_id).decode("utf-8", "surrogateescape").replace("\\", "\\\\")
    return printable(text)


def _line(row: TokenRow) -> str:
    rank = "-" if row.rank is None else str(row.rank)
    count = "" if row.count is None else f"{row.count:>14,.0f}"
    reason = "" if row.reason is None else f"  ({printable(row.reason)})"
    return f"  {rank:>7}  id {row.token_id:>7}{count}  '{row.text}'{reason}"
