"""Whether two choices of a token can differ by rounding alone: how far the target was from choosing the other one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings import SamplingConfig
from .sampling import uniform_stream, warp

# Rounding adds up over a forward; a few units in the last place of the largest logit are usual.
_UNITS = 4


@dataclass(frozen=True)
class Boundary:
    """How far a choice was from another: ``distance`` of logits (greedy) or of probability, and what rounding moves."""

    distance: float
    rounding: float
    is_greedy: bool

    @property
    def is_within_rounding(self) -> bool:
        """Whether rounding can have decided."""
        return self.distance <= self.rounding

    def __str__(self) -> str:
        kind = "the logits of the two tokens differ by" if self.is_greedy else "the draw is off the other token by"
        within = "within rounding" if self.is_within_rounding else "more than rounding explains"
        return f"{within}: {kind} {self.distance:.2g}, and rounding moves them by up to {self.rounding:.2g}"


def distance_to(
    logits: Tensor, chosen: int, other: int, sampling: SamplingConfig, place: int, dtype: torch.dtype
) -> Boundary:
    """Measure how far the target was from ``other`` when it chose ``chosen`` at position ``place`` of request 0.

    ``logits`` float32 [target_vocab], of a target that computes in ``dtype``.
    """
    unit = torch.finfo(dtype).eps * float(logits[logits.isfinite()].abs().max())
    if sampling.is_greedy:
        return Boundary(float(logits[chosen] - logits[other]), _UNITS * unit, True)
    cumulative = warp(logits[None], sampling)[0].softmax(-1, dtype=torch.float64).cumsum(-1).cpu()
    point = float(uniform_stream(sampling.seed, 0, place + 1)[place] * cumulative[-1])
    low, high = (float(cumulative[other - 1]) if other else 0.0), float(cumulative[other])
    # A probability moves by its logit's rounding, relative to itself; cumulated ones by no more than that.
    rounding = _UNITS * unit / max(sampling.temperature, 1e-6)
    return Boundary(max(low - point, point - high, 0.0), min(rounding, 1.0), False)
