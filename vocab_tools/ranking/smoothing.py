"""Mix a prior from the id order into small counts.

The ids of a merge-ordered BPE tokenizer are themselves a ranking: a lower id is a merge that was more frequent in the
tokenizer's own training text. Where few tokens were counted, or text of another kind, that order knows more than the
counts. Model: the rate of token i is Gamma distributed with shape `a` and mean `p_i`, and its count among T tokens is
Poisson, so the posterior mean rate is

    (count_i + a) / (T + a / p_i)

(empirical Bayes; Gelman et al., Bayesian Data Analysis, 2.6). The prior mean is Zipf-Mandelbrot in the merge rank,
`p_i ∝ (rank_i + shift) ** -exponent`, fitted to the counted text by maximum likelihood. The strength `a` is the number
of observations that the prior is worth at every token: 0 leaves the counts alone, infinity leaves the id order. "auto"
takes the strength that makes the held-out text likeliest. It does not depend on the draft vocabulary's size, so
vocabularies stay nested.

Plain counts with ties by id already use the order for the ids never seen, so smoothing changes little where enough text
of the right kind was counted; it helps where the text is scarce and the held-out part is broader than it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..tokenizer.tokenizer import LoadedTokenizer
from .shares import held_out_shares, training_shares

if TYPE_CHECKING:
    from ..counting.counts import TokenCounts

_EXPONENTS = np.round(np.arange(0.5, 2.01, 0.1), 2)
_SHIFTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
_STRENGTHS = 10.0 ** np.arange(-3, 2.01, 0.25)


@dataclass(frozen=True, eq=False)
class SmoothedCounts:
    """Posterior rates and how they were found.

    Attributes:
        score: posterior mean rate by id, float64 [vocab].
        strength: observations the prior is worth at every token.
        exponent, shift: of the fitted prior.
        chosen_on: "held-out" or "given".
        log_likelihood: mean held-out log-likelihood (nats per token) by strength tried; empty when given.
    """

    score: NDArray[np.float64]
    strength: float
    exponent: float
    shift: float
    chosen_on: Literal["held-out", "given"]
    log_likelihood: Mapping[float, float]

    def to_json(self) -> dict[str, Any]:
        """Return the account for a provenance."""
        return {
            "prior": "Zipf-Mandelbrot over merge rank",
            "exponent": self.exponent,
            "shift": self.shift,
            "strength": self.strength,
            "chosen_on": self.chosen_on,
        }


def smooth_counts(
    counts: TokenCounts,
    tokenizer: LoadedTokenizer,
    strength: Literal["auto"] | float = "auto",
    weights: Mapping[str, float] | None = None,
    target_vocab: int | None = None,
) -> SmoothedCounts:
    """Return the posterior rate of every id.

    Args:
        counts: counted text; "auto" needs its held-out part.
        tokenizer: merge-ordered BPE.
        strength: "auto", or a number above 0.
        weights: share of each source by name.
        target_vocab: rows of the LM head, when they are fewer than the tokenizer's ids.

    Raises:
        UsageError: no merge order, no held-out part for "auto", a strength that is not positive, nothing counted.
    """
    rank = tokenizer.merge_rank
    if rank is None:
        raise UsageError(
            f"--smooth needs a BPE tokenizer whose ids follow the merge order; those of {tokenizer.source} do not. "
            "Leave smoothing off.",
            tokenizer=tokenizer.source,
        )
    size = max(counts.vocab_size, len(rank))
    size = size if target_vocab is None else min(size, target_vocab)
    share = _fit_length(training_shares(counts, weights), size)
    rank = _fit_length(rank, size, -1)
    # Added tokens have no place in the merge order: they get the rate of the last rank.
    rank = np.where(rank < 0, rank.max(), rank)
    total = float(sum(int(source.counts.sum()) for source in counts.sources))
    exponent, shift, prior = _fit_prior(share, rank)
    if strength != "auto":
        if not 0 < strength < np.inf:
            raise UsageError(
                f"smoothing strength {strength}: expected a number above 0, `auto` or `off`.", strength=strength
            )
        score = _posterior(share, total, prior, strength)
        return SmoothedCounts(score, float(strength), exponent, shift, "given", {})
    held_out = held_out_shares(counts, weights)
    if held_out is None:
        raise UsageError(
            "--smooth auto chooses its strength on held-out text, but these counts have none. "
            "Count with a held-out part, or give a strength (0.1 is a usual one).",
            strength="auto",
        )
    held_out = _fit_length(held_out, size)
    likelihood = {float(a): _log_likelihood(held_out, _posterior(share, total, prior, a)) for a in _STRENGTHS}
    best = max(likelihood, key=lambda a: likelihood[a])
    return SmoothedCounts(_posterior(share, total, prior, best), best, exponent, shift, "held-out", likelihood)


def _posterior(
    share: NDArray[np.float64], total: float, prior: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    rate: NDArray[np.float64] = (share * total + strength) / (total + strength / prior)
    normalised: NDArray[np.float64] = rate / rate.sum()
    return normalised


def _fit_prior(share: NDArray[np.float64], rank: NDArray[np.int64]) -> tuple[float, float, NDArray[np.float64]]:
    """Return exponent, shift and prior mean [vocab] of the likeliest Zipf-Mandelbrot law on a grid."""
    # Many ids share a rank at most twice (alphabet and products), so work per rank: the sums are the same.
    by_rank = np.bincount(rank, weights=share)
    ids_of_rank = np.bincount(rank)
    best = (-np.inf, 1.0, 1.0)
    for shift in _SHIFTS:
        log_rank = np.log(np.arange(len(by_rank)) + shift)
        mean_log_rank = float(by_rank @ log_rank)
        for exponent in _EXPONENTS:
            log_norm = float(np.log(ids_of_rank @ np.exp(-exponent * log_rank)))
            likelihood = -exponent * mean_log_rank - log_norm
            best = max(best, (likelihood, float(exponent), shift))
    _, exponent, shift = best
    prior = (rank + shift) ** -exponent
    return exponent, shift, prior / prior.sum()


def _log_likelihood(held_out: NDArray[np.float64], rate: NDArray[np.float64]) -> float:
    seen = held_out > 0
    return float(held_out[seen] @ np.log(rate[seen]))


def _fit_length(values: NDArray[Any], size: int, fill: int = 0) -> NDArray[Any]:
    return np.pad(values[:size], (0, max(0, size - len(values))), constant_values=fill)
