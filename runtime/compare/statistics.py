"""Speeds from noisy timings: medians over steps, and paired bootstrap intervals over prompts.

All candidates answer the same prompts, so a resample draws the same prompts for all of them, and an easy or a hard
prompt cancels in the ratio of two candidates. Verifying costs the same for every draft vocabulary: its time is the
median over the steps of all candidates whose trees have as many nodes. An interval is the bootstrap's standard error of
the logarithm times Student's t for the number of prompts. Fewer than five prompts give none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

_NUM_RESAMPLES = 400
_CONFIDENCE = 0.95
_FEWEST_PROMPTS = 5


@dataclass(frozen=True)
class Timings:
    """Times and tokens of one candidate, step by step.

    ``draft_s``, ``verify_s``, ``host_s`` float64 [steps]; ``prompt_of_step`` int64 [steps], numbers from 0. By prompt,
    float64 [prompts]: ``tokens`` that its steps added to answers, ``passes``, the target passes of its sequences (as
    many as its steps, unless several share a step), and ``accepted``, the tokens of these passes. ``nodes``: of the
    trees, 1 for plain decoding, 0 where each step chose its tree; such steps have a mean, others a median. A server's
    answers are one step each, whose ``draft_s`` is the time to the first token.
    """

    draft_s: NDArray[np.float64]
    verify_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    prompt_of_step: NDArray[np.int64]
    tokens: NDArray[np.float64]
    accepted: NDArray[np.float64]
    passes: NDArray[np.float64]
    nodes: int


@dataclass(frozen=True)
class Estimate:
    """A positive quantity, with the interval that holds it with 95% confidence; infinite for too few prompts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: NDArray[np.float64], num_prompts: int, comparisons: int = 1) -> Estimate:
        """Build from the value and its resamples; ``comparisons`` made with the same data widen the interval."""
        if num_prompts < _FEWEST_PROMPTS or value <= 0:
            return cls(value, 0.0, math.inf)
        error = float(np.log(resampled).std() * math.sqrt(num_prompts / (num_prompts - 1)))
        factor = math.exp(min(700.0, t.ppf(1 - (1 - _CONFIDENCE) / (2 * comparisons), num_prompts - 1) * error))
        return cls(value, value / factor, value * factor)


@dataclass(frozen=True)
class Measured:
    """The figures of one candidate: estimates, and the same quantities for every resample, float64 [resamples]."""

    accepted_length: Estimate
    tokens_per_s: Estimate
    draft_s: float
    """Median over steps, as are the next two."""
    verify_s: float
    """Median over the steps of all candidates with as many nodes."""
    host_s: float
    first_s: Estimate
    """``draft_s`` with its interval: a server's time to the first token."""
    resampled_tokens_per_s: NDArray[np.float64]

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.draft_s + self.verify_s + self.host_s


def measure(timings: Mapping[str, Timings], seed: int = 0) -> dict[str, Measured]:
    """Measure candidates that answered the same prompts; those that made no step are left out."""
    timings = {name: each for name, each in timings.items() if len(each.draft_s) and each.tokens.sum() > 0}
    if not timings:
        return {}
    num_prompts = len(next(iter(timings.values())).accepted)
    draws = np.random.default_rng(seed).multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=_NUM_RESAMPLES
    )
    weights = np.concatenate([np.ones((1, num_prompts), dtype=np.int64), draws])  # [1 + resamples, prompts]
    verify_s = {}
    for nodes in {each.nodes for each in timings.values()}:
        pool = [each for each in timings.values() if each.nodes == nodes]
        times, prompts = (np.concatenate([getattr(each, n) for each in pool]) for n in ("verify_s", "prompt_of_step"))
        verify_s[nodes] = _averages(nodes, times, prompts, weights)
    found = {}
    for name, each in timings.items():
        steps = np.bincount(each.prompt_of_step, minlength=num_prompts)
        draft_s, host_s = (
            _averages(each.nodes, times, each.prompt_of_step, weights) for times in (each.draft_s, each.host_s)
        )
        tokens, accepted, passes, num_steps = (
            weights @ per_prompt for per_prompt in (each.tokens, each.accepted, each.passes, steps)
        )
        # A resample without a single step of a candidate says nothing about it.
        valid = num_steps > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            lengths = np.where(valid & (accepted > 0), accepted / passes, accepted[0] / passes[0])
            speeds = tokens / num_steps / (draft_s + verify_s[each.nodes] + host_s)
            speeds = np.where(valid & (speeds > 0), speeds, speeds[0])
        found[name] = Measured(
            Estimate.of(float(lengths[0]), lengths[1:], num_prompts),
            Estimate.of(float(speeds[0]), speeds[1:], num_prompts),
            float(draft_s[0]),
            float(verify_s[each.nodes][0]),
            float(host_s[0]),
            Estimate.of(float(draft_s[0]), np.where(valid, draft_s, draft_s[0])[1:], num_prompts),
            speeds[1:],
        )
    return found


def ratio(one: Measured, other: Measured, num_prompts: int, comparisons: int = 1) -> Estimate:
    """Return how many times faster ``one`` is than ``other``, from paired resamples of one `measure`."""
    value = one.tokens_per_s.value / other.tokens_per_s.value
    return Estimate.of(value, one.resampled_tokens_per_s / other.resampled_tokens_per_s, num_prompts, comparisons)


def _averages(
    nodes: int, times: NDArray[np.float64], prompt_of_step: NDArray[np.int64], weights: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the average step of each resample, float64 [1 + resamples]: a mean where steps differ by their trees."""
    if nodes:
        return _weighted_medians(times, prompt_of_step, weights)
    sums, counts = (np.bincount(prompt_of_step, each, weights.shape[1]) for each in (times, np.ones_like(times)))
    means: NDArray[np.float64] = (weights @ sums) / np.maximum(weights @ counts, 1)
    return means


def _weighted_medians(
    times: NDArray[np.float64], prompts: NDArray[np.int64], weights: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the median of ``times`` [steps] where each counts as often as its prompt in each row of ``weights``.

    ``prompts`` int64 [steps], ``weights`` int64 [rows, prompts]; gives float64 [rows], NaN for a row without steps.
    """
    repeated = (np.repeat(times, counts[prompts]) for counts in weights)
    return np.array([np.median(each) if len(each) else np.nan for each in repeated])
