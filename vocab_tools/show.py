"""List the tokens that a draft vocabulary holds and leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .counts import TokenCounts
from .coverage import aligned
from .errors import TokenizerError, printable
from .tokenizer import LoadedTokenizer, check_tokenizer
from .vocabulary import DraftVocab


@dataclass(frozen=True)
class VocabularyListing:
    """Tokens that a vocabulary holds and leaves out, of the `real_tokens` that the target has.

    `tokens`: in rank order, then those left out: "token" (its text), "forced" (the reason, or None), "rank" (None if
    left out), "id" and "count" (weighted; None without counts).
    """

    size: int
    num_forced: int
    target_vocab: int
    real_tokens: int
    tokens: tuple[dict[str, Any], ...]

    def text(self) -> str:
        """Return the listing as a plain text table, without the up to 256 forced single bytes."""
        rows = [("token", "forced", "rank", "id", "count")]
        for token in self.tokens:
            forced = printable(token["forced"] or "")
            if not forced.startswith("byte 0x"):
                rank = "-" if token["rank"] is None else str(token["rank"])
                count = "" if token["count"] is None else f"{token['count']:,.0f}"
                rows.append((f"'{token['token']}'", forced, rank, str(token["id"]), count))
        num_bytes = 1 + len(self.tokens) - len(rows)
        kept = f"{self.size} of {self.real_tokens} tokens ({self.num_forced} forced, {num_bytes} of them single bytes)"
        return f"{kept}; the target's vocabulary has {self.target_vocab} rows\n\n{aligned(rows, num_left=2)}"


def show_vocabulary(
    vocab: DraftVocab, tokenizer: LoadedTokenizer, counts: TokenCounts | None = None, limit: int = 20
) -> VocabularyListing:
    """List all forced tokens, the first `limit` others, and the `limit` most frequent that are left out.

    Without counts, those left out are the ones of the lowest ids. Raises TokenizerError for a vocabulary or counts made
    with another tokenizer, and for ids that belong to no token.
    """
    check_tokenizer(tokenizer, vocab.provenance.get("tokenizer_hash"), "the vocabulary")
    if vocab.is_size_inferred and vocab.target_vocab < tokenizer.vocab_size:
        vocab = vocab.for_target(tokenizer.vocab_size)
    real = tokenizer.real_ids[tokenizer.real_ids < vocab.target_vocab]
    strange = np.setdiff1d(vocab.target_ids, real)
    if len(strange):
        problem = f"belongs to no token of {tokenizer.source} ({len(strange)} such ids)"
        raise TokenizerError(f"Id {strange[0]} of the vocabulary {problem}. Name the target's tokenizer.")
    score = np.zeros(vocab.target_vocab)
    if counts is not None:
        check_tokenizer(tokenizer, counts.tokenizer_hash, "the counts")
        score = np.pad(counts.weighted(), (0, vocab.target_vocab))
    num_forced = vocab.num_forced if vocab.ranked else 0
    kept = vocab.target_ids[: num_forced + limit].tolist()
    left_out = np.setdiff1d(real, vocab.target_ids)
    left_out = left_out[np.lexsort((left_out, -score[left_out]))][:limit].tolist()
    reasons = vocab.provenance.get("forced", {})
    tokens = tuple(
        {
            "token": readable_token(tokenizer, token_id),
            "forced": reasons.get(str(token_id)),
            "rank": rank if rank < len(kept) else None,
            "id": token_id,
            "count": None if counts is None else float(score[token_id]),
        }
        for rank, token_id in enumerate(kept + left_out)
    )
    return VocabularyListing(vocab.size, num_forced, vocab.target_vocab, len(real), tokens)


def readable_token(tokenizer: LoadedTokenizer, token_id: int) -> str:
    """Return a token's text fit for a terminal: spaces kept, control characters and lone bytes escaped.

    For example "Ġhello" of a byte-level vocabulary is " hello", a newline `\\n`, part of a character `\\xe4\\xbd`.
    """
    # surrogateescape keeps every byte that is not UTF-8 as one code point of U+DC80 to U+DCFF.
    return printable(tokenizer.token_bytes(token_id).decode("utf-8", "surrogateescape").replace("\\", "\\\\"))
