"""Counts → DraftVocab.

Forced ids come first, by count descending and then by id; after them all other ids by weighted count descending, ties
by id. One order serves every size, so vocabularies are nested. Counts (id: count) 0: 5, 1: 9, 2: 9, 3: 0, 4: 7 with
forced id 3 rank as 3, 1, 2, 4, 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..counting.counts import TokenCounts
from ..errors import UsageError
from ..tokenizer.forced import ForcedIds
from ..tokenizer.load import check_tokenizer
from ..tokenizer.tokenizer import LoadedTokenizer
from ..vocabulary.draft_vocab import (
    COUNTED_IDS,
    TARGET_VOCAB_FROM,
    DraftVocab,
    check_ids,
    doubts_of_rank,
    uncounted_warning,
)
from .pool import Pool, check_made_with, round_up, some
from .shares import tokens_for_sizing


def rank_vocabulary(
    counts: TokenCounts,
    size: int | None = None,
    coverage: float | None = None,
    tokenizer: LoadedTokenizer | None = None,
    forced: ForcedIds | Sequence[int] | None = None,
    target_vocab: int | None = None,
    candidates: ArrayLike | DraftVocab | None = None,
    weights: Mapping[str, float] | None = None,
) -> DraftVocab:
    """Rank the vocabulary by counted text and cut it to a size.

    Args:
        counts: counts by target id, with or without a held-out part.
        size: number of ids N, kept exactly. Without `size` and `coverage` all rankable ids are ranked.
        coverage: find the size instead: the smallest one that covers this share of the held-out tokens (of the
            counted ones where nothing was held out; the provenance says which), sources weighted as in the ranking,
            rounded up to a multiple of 64 and capped at what can be chosen.
        tokenizer: the target's tokenizer; gives the real ids and, unless `forced` is given, the forced ones.
        forced: ids that must be in, overriding the tokenizer's; a plain sequence of ids has no reasons.
        target_vocab: rows of the target's LM head; ids from there on are never chosen. Default: `counts.vocab_size`.
        candidates: ids the head was trained on, when it already has a map. Forced ids outside are listed in a warning
            and never added; N may equal their number.
        weights: share of each source by name, overriding the counts' own weights.

    Raises:
        UsageError: size and coverage together, N below the forced ids or not below the
            real tokens, a coverage that no allowed size reaches.
        TokenizerError: the counts or the candidates were made with another tokenizer.
        VocabularyError: candidate ids break a rule.
    """
    if size is not None and coverage is not None:
        raise UsageError(
            "A size and a coverage exclude each other: give only one of them.", options=["size", "coverage"]
        )
    provenance: dict[str, Any] = {"method": "counts", "sources": _describe(counts, weights)}
    if target_vocab is None:
        target_vocab, provenance[TARGET_VOCAB_FROM] = counts.vocab_size, "counts"
    warnings = [] if tokenizer is None else check_tokenizer(tokenizer, counts.tokenizer_hash, "the counts")
    beyond = sum(int(source.counts[target_vocab:].sum()) for source in counts.sources)
    if beyond:
        warnings.append(
            f"{beyond:,} counted tokens have ids beyond the target's vocabulary of {target_vocab}; they are left out"
        )
    pool = Pool.of(tokenizer, counts.vocab_size, target_vocab, candidates, forced, warnings)
    score = counts.weighted(weights)
    order = pool.order_by_score(score)
    if counts.tokenizer_hash is not None:
        provenance["tokenizer_hash"] = counts.tokenizer_hash
    if coverage is not None:
        size, account = _size_for_coverage(counts, weights, order, coverage, pool)
        provenance["size_from_coverage"] = account
        if account["measured_on"] == "counted":
            warnings.append(
                "the size for --coverage was found on the counted text itself, because nothing was held out: other "
                "text will be covered less. Count with a held-out part"
            )
    chosen = order[len(pool.forced) : size]
    counted = score[:target_vocab]
    provenance[COUNTED_IDS] = int((counted[chosen[chosen < len(counted)]] > 0).sum())
    vocab = pool.cut(order, size, provenance)
    # All ids together are ranked to be cut later: only a size that was asked for is warned about.
    warnings.extend(uncounted_warning(vocab) if size is not None else ())
    return vocab


def rank_by_order(
    order: ArrayLike | DraftVocab | None = None,
    size: int | None = None,
    tokenizer: LoadedTokenizer | None = None,
    forced: ForcedIds | Sequence[int] | None = None,
    target_vocab: int | None = None,
    candidates: ArrayLike | DraftVocab | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> DraftVocab:
    """Rank the vocabulary by a given order, without counts: a token map, or the ids themselves.

    Forced ids come first, in that order. Those that the order lacks are added, displacing its last ids, with a
    warning. `order=None` is `--order ids`: id order, which for BPE is merge order and needs no corpus.

    Args:
        order: target ids, most important first, or an imported token map, whose warnings are passed on; None is all
            real ids ascending.
        size: number of ids N, kept exactly; default all of the order (all rankable ids for None).
        tokenizer: as in `rank_vocabulary`.
        forced: as in `rank_vocabulary`.
        target_vocab: rows of the target's LM head; needed unless a tokenizer is given.
        candidates: as in `rank_vocabulary`.
        provenance: where the order came from.

    Raises:
        UsageError: N does not fit, or neither tokenizer nor target_vocab is given.
        VocabularyError: ids of the order break a rule.
        TokenizerError: the order, or the candidates, are a vocabulary that was made with another tokenizer.
    """
    found: dict[str, Any] = {}
    if target_vocab is None:
        if tokenizer is None:
            raise UsageError(
                "Ranking by order needs the tokenizer or the size of the target's vocabulary.", missing="tokenizer"
            )
        target_vocab, found[TARGET_VOCAB_FROM] = tokenizer.vocab_size, "tokenizer"
    if tokenizer is not None:
        found["tokenizer_hash"] = tokenizer.tokenizer_hash
    warnings: list[str] = []
    if isinstance(order, DraftVocab):
        check_made_with(order, tokenizer, "the vocabulary")
        warnings.extend(order.warnings if order.provenance.get("method") == "token map" else ())
        order = order.target_ids
    pool = Pool.of(tokenizer, target_vocab, target_vocab, candidates, forced, warnings)
    if order is None:
        ranked = pool.order_by_score(np.zeros(target_vocab))
        found["method"] = "ids"
    else:
        ranked, size = _follow(order, size, pool, warnings)
        found["method"] = "token map"
    return pool.cut(ranked, size, {**found, **(provenance or {})})


def check_coverage(coverage: float) -> None:
    """Raise UsageError for a number that is not a share of tokens."""
    if not 0 < coverage <= 1:
        raise UsageError(
            f"A coverage of {coverage} is not a share of tokens: give a number above 0 and at most 1.",
            coverage=coverage,
        )


def _size_for_coverage(
    counts: TokenCounts, weights: Mapping[str, float] | None, order: NDArray[np.int64], coverage: float, pool: Pool
) -> tuple[int, dict[str, Any]]:
    """Return the smallest allowed size that covers a share of the tokens, and the account of it."""
    check_coverage(coverage)
    tokens, part = tokens_for_sizing(counts, weights)
    held = np.zeros(max(pool.target_vocab, len(tokens)), np.float64)
    held[: len(tokens)] = tokens
    reached = np.cumsum(held[order])
    best = float(reached[-1])
    # Sums of float64 shares are a few ulps off the exact figure.
    enough = np.flatnonzero(reached >= coverage - 1e-12)
    if len(enough) == 0 or enough[0] + 1 > pool.largest_size:
        limit = float(reached[pool.largest_size - 1])
        raise UsageError(
            f"A coverage of {coverage} of the {part} tokens cannot be reached: the largest draft vocabulary, "
            f"{pool.largest_size} ids, covers {min(limit, best):.6f}.",
            coverage=coverage,
            reached=min(limit, best),
            size=pool.largest_size,
        )
    smallest = max(int(enough[0]) + 1, len(pool.forced), 1)
    size = min(round_up(smallest), pool.largest_size)
    account = {"asked": coverage, "measured_on": part, "smallest": smallest, "reached": float(reached[size - 1])}
    return size, account


def _follow(
    order: ArrayLike, size: int | None, pool: Pool, warnings: list[str]
) -> tuple[NDArray[np.int64], int | None]:
    """Return the pool's ids in a given order, forced ones first, and the size (that of the order by default)."""
    order = check_ids(order, pool.target_vocab, "token map")
    usable = order[np.isin(order, pool.ids)]
    # Those behind the size asked for would not be taken anyway.
    if gone := order[:size][~np.isin(order[:size], pool.ids)].tolist():
        why = "belong to no token" if pool.trained is None else "have no row in this head or belong to no token"
        warnings.append(f"{len(gone)} ids of the token map {why} and are left out: {some(gone)}")
    missing = pool.forced[~np.isin(pool.forced, usable)]
    if len(missing):
        warnings.append(
            f"the token map lacks {len(missing)} forced ids; they are added in place of its last ones: "
            f"{some(missing.tolist())}"
        )
    is_forced = np.isin(usable, pool.forced)
    ranked = np.concatenate([usable[is_forced], missing, usable[~is_forced]])
    if size is None:
        size = min(max(len(usable), len(pool.forced)), pool.largest_size)
    elif size > len(ranked):
        pool.check_size(size)
        why = f" ({'; '.join(warnings)})" if warnings else ""
        raise UsageError(
            f"A draft vocabulary of {size} was asked for, but only {len(ranked)} usable ids are ranked{why}. Ask for "
            f"at most {len(ranked)}.",
            size=size,
            usable=len(ranked),
        )
    elif size < len(usable):
        warnings.extend(doubts_of_rank(order, size))
    return ranked, size


def _describe(counts: TokenCounts, weights: Mapping[str, float] | None) -> list[dict[str, Any]]:
    return [
        {
            "name": source.name,
            "weight": weight,
            "tokens": int(source.counts.sum()),
            "provenance": dict(source.provenance),
        }
        for source, weight in zip(counts.sources, counts.source_weights(weights).values(), strict=True)
    ]
