"""Speeds from noisy timings: medians over steps, and paired bootstrap intervals over prompts.

All candidates answer the same prompts, so a resample draws the same prompts for all of them, and an easy or a hard
prompt cancels in the ratio of two candidates. Verifying costs the same for every draft vocabulary: its time is the
median over the steps of all candidates whose trees have as many nodes. An interval is the bootstrap's standard error of
the logarithm times Student's t for the number of prompts. Fewer than `ENOUGH_PROMPTS` give none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

ENOUGH_PROMPTS = 5
_NUM_RESAMPLES = 400
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Timings:
    """Times and tokens of one candidate.

    ``times_s``: float64 [steps, 3], drafting, verifying, host; ``prompt_of_step``: int64 [steps], from 0. ``accepted``,
    ``passes``: float64 [prompts], tokens that target passes gave, and passes of all sequences. ``nodes``: of the trees,
    1 for plain decoding, 0 where each step chose its tree; such steps have a mean, others a median.
    """

    times_s: NDArray[np.float64]
    prompt_of_step: NDArray[np.int64]
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
        if num_prompts < ENOUGH_PROMPTS or value <= 0:
            return cls(value, 0.0, math.inf)
        error = float(np.log(resampled).std() * math.sqrt(num_prompts / (num_prompts - 1)))
        factor = math.exp(min(700.0, t.ppf(1 - (1 - _CONFIDENCE) / (2 * comparisons), num_prompts - 1) * error))
        return cls(value, value / factor, value * factor)


@dataclass(frozen=True)
class Measured:
    """The figures of one candidate; the speed of every resample is float64 [resamples]."""

    accepted_length: Estimate
    tokens_per_s: Estimate
    draft_s: float
    verify_s: float
    host_s: float
    resampled_tokens_per_s: NDArray[np.float64]

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.draft_s + self.verify_s + self.host_s


def measure(timings: Mapping[str, Timings], seed: int = 0) -> dict[str, Measured]:
    """Measure candidates that answered the same prompts; those that made no step are left out."""
    timings = {name: each for name, each in timings.items() if len(each.times_s) and each.accepted.sum() > 0}
    if not timings:
        return {}
    num_prompts = len(next(iter(timings.values())).accepted)
    shares = np.full(num_prompts, 1 / num_prompts)
    draws = np.random.default_rng(seed).multinomial(num_prompts, shares, size=_NUM_RESAMPLES)
    weights = np.concatenate([np.ones((1, num_prompts), dtype=np.int64), draws])  # [1 + resamples, prompts]
    verify_s = {}
    for nodes in {each.nodes for each in timings.values()}:
        pool = [each for each in timings.values() if each.nodes == nodes]
        times = np.concatenate([each.times_s[:, 1] for each in pool])
        verify_s[nodes] = _averages(nodes, times, np.concatenate([each.prompt_of_step for each in pool]), weights)
    return {name: _measure_one(each, verify_s[each.nodes], weights) for name, each in timings.items()}


def _measure_one(each: Timings, verify_s: NDArray[np.float64], weights: NDArray[np.int64]) -> Measured:
    num_prompts = weights.shape[1]
    steps = np.bincount(each.prompt_of_step, minlength=num_prompts)
    draft_s, host_s = (_averages(each.nodes, each.times_s[:, i], each.prompt_of_step, weights) for i in (0, 2))
    accepted, passes, num_steps = (weights @ per_prompt for per_prompt in (each.accepted, each.passes, steps))
    # A resample without a single step of a candidate says nothing about it.
    is_valid = (num_steps > 0) & (accepted > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        lengths = np.where(is_valid, accepted / passes, accepted[0] / passes[0])
        speeds = accepted / num_steps / (draft_s + verify_s + host_s)
        speeds = np.where(is_valid, speeds, speeds[0])
    length, speed = (Estimate.of(float(each[0]), each[1:], num_prompts) for each in (lengths, speeds))
    return Measured(length, speed, float(draft_s[0]), float(verify_s[0]), float(host_s[0]), speeds[1:])


def ratio(one: Measured, other: Measured, num_prompts: int, comparisons: int = 1) -> Estimate:
    """Return how many times faster ``one`` is than ``other``, from paired resamples of one `measure`."""
    value = one.tokens_per_s.value / other.tokens_per_s.value
    return Estimate.of(value, one.resampled_tokens_per_s / other.resampled_tokens_per_s, num_prompts, comparisons)


def _averages(
    nodes: int, times: NDArray[np.float64], prompts: NDArray[np.int64], weights: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Average ``times`` [steps] by each row of ``weights`` [rows, prompts]: the mean where trees differ, or median."""
    average = np.median if nodes else np.mean
    repeated = (np.repeat(times, counts[prompts]) for counts in weights)
    return np.array([average(each) if len(each) else np.nan for each in repeated])
