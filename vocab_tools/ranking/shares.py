"""The share of every id in the text of several weighted sources, counted or held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, VocabularyError

if TYPE_CHECKING:
    from ..counting.counts import TokenCounts

Part = Literal["held-out", "counted"]


def source_shares(counts: TokenCounts, weights: Mapping[str, float] | None = None) -> NDArray[np.float64]:
    """Return the share of each source in a weighted mean, float64 [sources], 1 in sum.

    Raises:
        UsageError: a weight is for no known source, is negative, or all are zero.
    """
    names = [source.name for source in counts.sources]
    unknown = sorted(set(weights or {}) - set(names))
    if unknown:
        raise UsageError(
            f"No source is named {unknown[0]!r}. There are: {', '.join(names)}.", source=unknown[0], sources=names
        )
    given = np.array([(weights or {}).get(source.name, source.weight) for source in counts.sources], np.float64)
    if not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise UsageError(
            f"weights: expected numbers of 0 or more, not all 0; found {given.tolist()}.", weights=given.tolist()
        )
    shares: NDArray[np.float64] = given / given.sum()
    return shares


def training_shares(counts: TokenCounts, weights: Mapping[str, float] | None = None) -> NDArray[np.float64]:
    """Return the weighted share of every id among the counted tokens, float64 [vocab], 1 in sum.

    Sources without a token are left out, as in `TokenCounts.weighted`.
    """
    return _mixture([source.counts for source in counts.sources], counts, weights)


def held_out_shares(counts: TokenCounts, weights: Mapping[str, float] | None = None) -> NDArray[np.float64] | None:
    """Return the weighted share of every id among the held-out tokens, float64 [vocab].

    None unless every source with a weight above 0 has held-out tokens.
    """
    parts = []
    for share, source in zip(source_shares(counts, weights), counts.sources, strict=True):
        tokens = np.empty(0, np.int32) if source.held_out is None else source.held_out.token_ids
        if share > 0 and len(tokens) == 0:
            return None
        parts.append(np.bincount(tokens, minlength=counts.vocab_size)[: counts.vocab_size])
    return _mixture(parts, counts, weights)


def tokens_for_sizing(
    counts: TokenCounts, weights: Mapping[str, float] | None = None
) -> tuple[NDArray[np.float64], Part]:
    """Return the share of every id in the text that coverage is about, float64 [vocab], and which text that is."""
    held_out = held_out_shares(counts, weights)
    if held_out is not None:
        return held_out, "held-out"
    return training_shares(counts, weights), "counted"


def _mixture(
    parts: Sequence[NDArray[Any]], counts: TokenCounts, weights: Mapping[str, float] | None
) -> NDArray[np.float64]:
    shares = source_shares(counts, weights) * [bool(part.any()) for part in parts]
    if not shares.any():
        raise VocabularyError("No source with a weight above 0 holds a token. Count some text first.", tokens=0)
    mixed = np.zeros(counts.vocab_size, np.float64)
    for share, part in zip(shares / shares.sum(), parts, strict=True):
        if share > 0:
            mixed += share * (part / part.sum())
    return mixed
