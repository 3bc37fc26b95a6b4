"""List the tokens that a draft vocabulary holds and leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .counts import TokenCounts
from .errors import TokenizerError, printable
from .tokenizer import LoadedTokenizer, check_tokenizer
from .vocabulary import DraftVocab


@dataclass(frozen=True)
class TokenRow:
    """One token: target id, rank (None if left out), text, weighted count (None without counts), why it is forced."""

    token_id: int
    rank: int | None
    text: str
    count: float | None
    reason: str | None

    def __str__(self) -> str:
        rank = "-" if self.rank is None else str(self.rank)
        count = "" if self.count is None else f"{self.count:>14,.0f}"
        reason = "" if self.reason is None else f"  ({printable(self.reason)})"
        return f"  {rank:>7}  id {self.token_id:>7}{count}  '{self.text}'{reason}"


@dataclass(frozen=True)
class VocabularyListing:
    """Tokens that a vocabulary holds and leaves out.

    Attributes:
        size, num_forced, target_vocab: of the vocabulary.
        real_tokens: number of ids of the target that some token has.
        forced: all forced tokens, in rank order.
        held: the first of the other tokens, in rank order.
        left_out: the most frequent tokens left out (the lowest ids, without counts).
    """

    size: int
    num_forced: int
    target_vocab: int
    real_tokens: int
    forced: tuple[TokenRow, ...]
    held: tuple[TokenRow, ...]
    left_out: tuple[TokenRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the listing JSON-ready."""
        return asdict(self)

    def text(self) -> str:
        """Return the listing as plain text, without the up to 256 forced single bytes."""
        markers = [row for row in self.forced if not (row.reason or "").startswith("byte 0x")]
        lines = [
            f"{self.size} of {self.real_tokens} tokens ({self.num_forced} forced, {len(self.forced) - len(markers)} of "
            f"them single bytes); the target's vocabulary has {self.target_vocab} rows"
        ]
        lists = {"forced": markers, "most frequent": self.held, "most frequent left out": self.left_out}
        for title, rows in lists.items():
            if rows:
                lines += ["", f"{title}:", *map(str, rows)]
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
    ids = vocab.target_ids.tolist()
    rank_of_id = {token_id: rank for rank, token_id in enumerate(ids)}

    def rows(ids: Iterable[int]) -> tuple[TokenRow, ...]:
        found = []
        for token_id in ids:
            text, count = readable_token(tokenizer, token_id), None if counts is None else float(score[token_id])
            found.append(TokenRow(token_id, rank_of_id.get(token_id), text, count, reasons.get(str(token_id))))
        return tuple(found)

    forced = vocab.num_forced if vocab.ranked else 0
    left_out = np.setdiff1d(real, vocab.target_ids)
    left_out = left_out[np.lexsort((left_out, -score[left_out]))][:limit].tolist()
    lists = rows(ids[:forced]), rows(ids[forced : forced + limit]), rows(left_out)
    return VocabularyListing(vocab.size, forced, vocab.target_vocab, len(real), *lists)


def readable_token(tokenizer: LoadedTokenizer, token_id: int) -> str:
    """Return a token's text fit for a terminal: spaces kept, control characters and lone bytes escaped.

    For example "Ġhello" of a byte-level vocabulary is " hello", a newline `\\n`, part of a character `\\xe4\\xbd`.
    """
    # surrogateescape keeps every byte that is not UTF-8 as one code point of U+DC80 to U+DCFF.
    text = tokenizer.token_bytes(token_id).decode("utf-8", "surrogateescape").replace("\\", "\\\\")
    return printable(text)
