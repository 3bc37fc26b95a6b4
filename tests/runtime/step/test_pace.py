"""Drafting that does not pay ends: the rule by hand, and calls whose clock a test sets; tokens are always the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step import pace
from eagle_slim.runtime.step.decoder import Decoder
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("error::eagle_slim.runtime.errors.AcceptanceWarning")
SetClock = Callable[[float], list[float]]


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SHARE", 0.02)
    one = pace.Pace(16)
    assert not one.is_due
    for _ in range(24):
        one.add(2.0, 0.100, 0.0499, 0.004)
        assert (one.is_due, one.loses) == (False, None)
    one.add(3.0, 0.100, 0.0499, 0.004)
    assert one.is_due  # 0.0499 s of 2.5 s
    one.plain_s.append(0.0489)
    assert one.rates == pytest.approx((2.04 / 0.1, 1 / (0.0489 + 0.004 / 2.04)))
    assert one.loses is None  # 20.4 and 19.6
    for _ in range(23):
        one.add(2.0, 0.100, 0.0499, 0.004)
        assert not one.is_due
    one.add(2.0, 0.100, 0.0499, 0.004)
    assert one.is_due
    one.plain_s.append(0.040)
    assert one.loses == ("drafting does not pay here: 20.2 tokens/s a sequence with trees of 16 nodes, 21.5 without")
    for _ in range(1000):
        one.add(2.0, 0.100, 0.0499, 0.004)
    one.plain_s += [0.04] * 3
    assert not one.is_due
    assert len(one.steps) < 1000


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Give a function that lets plain forwards be timed at any time, and take as long as a test says."""
    time_plain, timed = Decoder.time_plain, list[float]()

    def set_clock(seconds: float) -> list[float]:
        def timer(self: Decoder, *arguments: Any) -> float:
            timed.append(time_plain(self, *arguments))
            return seconds

        monkeypatch.setattr(pace, "SHARE", float("inf"))
        monkeypatch.setattr(Decoder, "time_plain", timer)
        return timed

    return set_clock


def build(folder: Path, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(folder), depth=3, top_k=4, **options)


SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 3}


@pytest.mark.parametrize(
    ("max_slots", "sampling"),
    [
        (1, {}),
        (2, SAMPLED),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, {}), (5, {}), (5, SAMPLED))),
    ],
    ids=str,
)
def test_a_call_goes_on_plainly_and_later_ones_begin_so(
    tmp_path: Path, set_clock: SetClock, sampling: dict[str, Any], max_slots: int
) -> None:
    """With prompts that still wait, and lengths that differ."""
    options = {"max_new_tokens": 18, "max_slots": max_slots, "ignore_eos": True, **sampling}
    prompts, model = random_prompts([5, 9, 1, 30, 12]), build(tmp_path)
    expected = model.generate(prompts, **options)
    assert max(expected.stats.accepted_lengths) > 1
    timed = set_clock(0.0)
    output = model.generate(prompts, **options)
    assert output.token_ids == expected.token_ids
    assert len(timed) == 1
    assert output.stats.accepted_lengths[1] > expected.stats.accepted_lengths[1]
    assert ", then plain decoding (drafting does not pay here: " in output.stats.path
    later = model.generate(prompts, **options)
    assert later.token_ids == expected.token_ids
    assert "plain decoding" in later.stats.path
    assert "; plain decoding (drafting does not pay here: " in later.stats.path
    assert len(timed) == 1
    assert model.with_tree(TreeConfig(3, 4, 16)).generate(prompts, **options).stats.path.count("trees of 16 nodes")


def test_timing_leaves_a_call_as_it_was(tmp_path: Path, set_clock: SetClock) -> None:
    model, prompts = build(tmp_path), random_prompts([5, 9, 1])
    options = {"max_new_tokens": 30, "ignore_eos": True, "repetition_penalty": 1.1}
    expected = model.generate(prompts, **options)
    timed = set_clock(1e9)
    output = model.generate(prompts, **options)
    assert 0 < len(timed) <= 15  # at most five for each number of sequences
    assert (output.token_ids, output.stats.accepted_lengths) == (expected.token_ids, expected.stats.accepted_lengths)
    assert output.stats.path == expected.stats.path


def test_the_clock_decides_only_where_no_token_can_tell(tmp_path: Path, set_clock: SetClock) -> None:
    timed, prompt = set_clock(0.0), random_prompts([7])[0]
    model = build(tmp_path)
    model.with_tree(TreeConfig(3, 4, 16)).generate(prompt, max_new_tokens=12)
    model.generate(prompt, max_new_tokens=12, speculative=False)
    half = SpeculativeModel.from_pretrained(
        tiny_target("llama").to(torch.bfloat16), write_head(tmp_path / "half"), depth=3, top_k=4
    )
    half.generate(prompt, max_new_tokens=12)
    assert timed == []
    model.generate(prompt, max_new_tokens=12)
    assert len(timed) == 1
