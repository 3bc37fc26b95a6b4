"""The size that a measured cost and a coverage curve make fastest, from comparisons whose truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.ranking.size_from_cost import StepCost, choose_size
from support.comparisons import COVERED, SIZES, comparison
from support.raising import raises


def test_the_cost_is_read_back(tmp_path: Path) -> None:
    cost = StepCost.load(path := comparison(tmp_path, 1e-6))
    assert StepCost.load(path.parent) == cost
    assert (cost.depth, cost.device, cost.sizes) == (6, "here", (4000, 16000, 48000))
    assert cost.per_row_s == pytest.approx(1e-6)
    assert cost.fixed_s == pytest.approx(0.05)
    assert cost.rate == pytest.approx(0.6, abs=0.001)


def test_the_fastest_size_follows_the_price_of_a_row(tmp_path: Path) -> None:
    found = []
    for per_row_s in (1e-8, 1e-6, 1e-5):
        cost = StepCost.load(comparison(tmp_path, per_row_s))
        size, why = choose_size(cost, SIZES, COVERED, 238, 48000)
        every = np.arange(256, 48001, 64, dtype=np.float64)
        speeds = cost.tokens_per_s(every, np.interp(np.log(every), np.log(SIZES), COVERED))
        assert size % 64 == 0
        chosen = speeds[list(every).index(size)]
        assert chosen >= 0.99 * speeds.max()
        assert (speeds[: list(every).index(size)] < 0.99 * speeds.max()).all()  # no smaller one would do
        assert why["predicted_speed_against_all"] == pytest.approx(chosen / speeds[-1], rel=0.01)
        found.append(size)
    assert found[0] > found[1] > found[2] >= 256


def test_bounds_are_kept(tmp_path: Path) -> None:
    cost = StepCost.load(comparison(tmp_path, 1e-3))
    assert choose_size(cost, SIZES, COVERED, 238, 48000)[0] == 256
    free = StepCost(0.05, 0.0, 6, 0.6, "here", (1, 2))
    assert choose_size(free, (64, 48000), (0.1, 1.0), 238, 4000)[0] <= 4000


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "no JSON"), ("not json", "no JSON"), ("{}", "no 'rows' in it"), ("[]", "no speed"),
     ('{"rows": []}', "no speed"), (None, "No such file")],
    ids=str,
)  # fmt: skip
def test_what_is_no_comparison(tmp_path: Path, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with raises(UsageError, option="--cost", path=str(tmp_path / "x.json")) as error:
        StepCost.load(tmp_path / "x.json")
    assert error.value.facts["found"].startswith(found)


def test_one_size_has_no_slope(tmp_path: Path) -> None:
    with raises(UsageError, option="--cost", found=1):
        StepCost.load(comparison(tmp_path, 1e-6, sizes=(4000,)))
