"""What a draft vocabulary holds and what it leaves out, for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..counting.counts import TokenCounts
from ..errors import TokenizerError
from ..tokenizer.load import check_tokenizer
from ..tokenizer.tokenizer import LoadedTokenizer
from ..vocabulary.draft_vocab import DraftVocab

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


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
    reason: str | None = None


@dataclass(frozen=True)
class VocabularyListing:
    """What a vocabulary holds and leaves out.

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
        return {
            "size": self.size,
            "num_forced": self.num_forced,
            "target_vocab": self.target_vocab,
            "real_tokens": self.real_tokens,
            **{
                name: [dict(vars(row)) for row in getattr(self, name)]
                for name in ("forced", "held", "last", "left_out")
            },
        }

    def text(self) -> str:
        """Return the listing as plain text."""
        lines = [
            f"{self.size} of {self.real_tokens} tokens ({self.num_forced} forced); "
            f"the target's vocabulary has {self.target_vocab} rows"
        ]
        # Up to 256 single bytes would bury the markers; the JSON form lists them all.
        markers = [row for row in self.forced if not (row.reason or "").startswith("byte 0x")]
        if self.forced:
            lines += ["", "forced:", *_table(markers)]
            lines += [f"  and {len(self.forced) - len(markers)} single bytes"] * (len(self.forced) > len(markers))
        for title, rows in (
            ("most frequent", self.held),
            ("last ones in", self.last),
            ("most frequent left out", self.left_out),
        ):
            if rows:
                lines += ["", f"{title}:", *_table(rows)]
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
    if counts is not None:
        check_tokenizer(tokenizer, counts.tokenizer_hash, "the counts")
    real = tokenizer.real_ids[tokenizer.real_ids < vocab.target_vocab]
    strange = np.setdiff1d(vocab.target_ids, real)
    if len(strange):
        raise TokenizerError(
            f"Id {strange[0]} of the vocabulary belongs to no token of {tokenizer.source} ({len(strange)} such ids). "
            "Name the target's tokenizer.",
            ids=strange.tolist(),
        )
    weighted = None if counts is None else counts.weighted()
    reasons: Mapping[str, str] = vocab.provenance.get("forced", {})

    def row(token_id: int, rank: int | None) -> TokenRow:
        count = None
        if weighted is not None:
            count = float(weighted[token_id]) if token_id < len(weighted) else 0.0
        return TokenRow(token_id, rank, readable_token(tokenizer, token_id), count, reasons.get(str(token_id)))

    def rows(ids: Iterable[int], first_rank: int | None) -> tuple[TokenRow, ...]:
        return tuple(
            row(token_id, None if first_rank is None else first_rank + place) for place, token_id in enumerate(ids)
        )

    ids = vocab.target_ids
    forced = vocab.num_forced if vocab.ranked else 0
    last_start = max(forced + limit, vocab.size - limit)
    left_out = np.setdiff1d(real, ids)
    if weighted is not None:
        score = np.zeros(vocab.target_vocab)
        score[: len(weighted)] = weighted[: vocab.target_vocab]
        left_out = left_out[np.lexsort((left_out, -score[left_out]))]
    return VocabularyListing(
        size=vocab.size,
        num_forced=forced,
        target_vocab=vocab.target_vocab,
        real_tokens=len(real),
        forced=rows(ids[:forced].tolist(), 0),
        held=rows(ids[forced : forced + limit].tolist(), forced),
        last=rows(ids[last_start:].tolist(), last_start),
        left_out=rows(left_out[:limit].tolist(), None),
    )


def readable_token(tokenizer: LoadedTokenizer, token_id: int) -> str:
    """Return a token's text fit for a terminal: spaces kept, control characters and lone bytes escaped.

    A token that is part of a character shows its bytes, as in `\\xe4\\xbd`; a newline is `\\n`, an unprintable
    character `\\u200b`. For example "Ġhello" of a byte-level vocabulary is " hello".
    """
    shown = []
    # surrogateescape keeps every byte that is not UTF-8 as one code point of U+DC80 to U+DCFF.
    for character in tokenizer.token_bytes(token_id).decode("utf-8", "surrogateescape"):
        if character in _ESCAPES:
            shown.append(_ESCAPES[character])
        elif 0xDC80 <= ord(character) <= 0xDCFF:
            shown.append(f"\\x{ord(character) - 0xDC00:02x}")
        elif character == " " or character.isprintable():
            shown.append(character)
        else:
            code = ord(character)
            shown.append(f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return "".join(shown)


def _table(rows: Iterable[TokenRow]) -> list[str]:
    lines = []
    for row in rows:
        rank = "-" if row.rank is None else str(row.rank)
        count = "" if row.count is None else f"{row.count:>14,.0f}"
        reason = "" if row.reason is None else f"  ({row.reason})"
        lines.append(f"  {rank:>7}  id {row.token_id:>7}{count}  '{row.text}'{reason}")
    return lines
