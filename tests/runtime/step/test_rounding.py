"""How far a choice was from another, by cases worked by hand."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.requests.rounding import distance_to
from eagle_slim.runtime.requests.sampling import uniform_stream
from eagle_slim.runtime.settings import SamplingConfig


def test_greedy_near_ties_and_clear_choices() -> None:
    logits = torch.tensor([16.0, 15.9, 3.0])
    near = distance_to(logits, 0, 1, SamplingConfig(), 0, torch.bfloat16)
    assert near.distance == pytest.approx(0.1, abs=1e-5)
    assert near.rounding == pytest.approx(4 * 16 * 2**-7)
    assert near.is_within_rounding
    assert str(near).startswith("within rounding")
    assert not distance_to(logits, 0, 1, SamplingConfig(), 0, torch.float32).is_within_rounding
    clear = distance_to(logits, 0, 2, SamplingConfig(), 0, torch.bfloat16)
    assert not clear.is_within_rounding
    assert str(clear).startswith("more than rounding explains")


def test_draws_near_a_boundary() -> None:
    seed = next(s for s in range(1000) if 0.40 < float(uniform_stream(s, 0, 4)[3]) < 0.45)
    point = float(uniform_stream(seed, 0, 4)[3])
    logits = torch.tensor([point - 0.001, 1 - point + 0.001]).log()  # the draw is just beyond the first token
    sampling = SamplingConfig(1.0, seed=seed)
    near = distance_to(logits, 1, 0, sampling, 3, torch.bfloat16)
    assert near.distance == pytest.approx(0.001, abs=1e-6)
    assert near.is_within_rounding
    assert not distance_to(logits, 1, 0, sampling, 3, torch.float32).is_within_rounding
