"""The share of every id in the text of several weighted sources, counted or held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..counting.counts import TokenCounts
from ..errors import VocabularyError

Part = Literal["held-out", "counted"]


def source_shares(counts: TokenCounts, weights: Mapping[str, float] | None = None) -> NDArray[np.float64]:
    """Return the share of each source in a weighted mean, float64 [sources], 1 in sum."""
    given = np.array(list(counts.source_weights(weights).values()), np.float64)
    shares: NDArray[np.float64] = given / given.sum()
    return shares


def tokens_for_sizing(
    counts: TokenCounts, weights: Mapping[str, float] | None = None
) -> tuple[NDArray[np.float64], Part]:
    """Return the weighted share of every id in the text that coverage is about, float64 [vocab], and which text it is.

    It is the held-out text, if every source with a weight above 0 has some, else the counted one. Sources without a
    token are left out, as in `TokenCounts.weighted`.
    """
    shares = source_shares(counts, weights)
    parts = [
        np.zeros(counts.vocab_size, np.int64)
        if source.held_out is None
        else np.bincount(source.held_out.token_ids, minlength=counts.vocab_size)
        for source in counts.sources
    ]
    part: Part = "held-out"
    if any(share > 0 and not held_out.any() for share, held_out in zip(shares, parts, strict=True)):
        parts, part = [source.counts for source in counts.sources], "counted"
    shares = shares * [bool(tokens.any()) for tokens in parts]
    if not shares.any():
        raise VocabularyError("No source with a weight above 0 holds a token. Count some text first.")
    mixed = np.zeros(counts.vocab_size, np.float64)
    for share, tokens in zip(shares / shares.sum(), parts, strict=True):
        if share > 0:
            mixed += share * (tokens / tokens.sum())
    return mixed, part
