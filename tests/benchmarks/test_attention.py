"""The sweep over attention's tiles: its grid, what it counts, and which tiles can be the best."""

from __future__ import annotations

import pytest
from eagle_slim.runtime.settings import TreeConfig

from benchmarks import attention
from benchmarks.shared.decoding import RandomModel


def test_a_point(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU tiles change nothing: the tiny model has two key heads, each shared by two heads; 1,000 is 15 blocks."""
    slow = iter([*range(40, 0, -1)])
    monkeypatch.setattr(attention, "time_queued_us", lambda *_: next(slow) * 1e3)
    row = attention.measure(random_model, TreeConfig(2, 4, 20), 60, 3, 1000, rounds=1, times=1)
    default, variants = row["default"], row["variants"]
    grid = {(each["programs"], each["rows"], each["num_stages"], each["tail_warps"]) for each in variants}
    assert len(variants) == len(grid) == 18 * 2 + (default["tail_warps"] not in (2, 4) or default["num_stages"] > 4)
    assert all(each["is_equal"] for each in variants)
    # 40 query rows of a key head are two blocks of 32, or one of 64; the tail of the deepest node begins at 960.
    assert {each["rows"]: each["blocks_executed"] for each in variants} == {32: 3 * 2 * 2 * 15, 64: 3 * 2 * 1 * 15}
    assert {each["blocks_skipped"] for each in variants if each["rows"] == 64} == {3 * 2 * (17 - 15)}
    assert row["best"] == variants[-1]
    assert row["default_over_best"] == pytest.approx(default["step_ms"] / variants[-1]["step_ms"])
    monkeypatch.setattr(attention, "time_queued_us", lambda *_: 1e3)
    differs = iter([True] * 2 + [False] * 60)
    monkeypatch.setattr(attention.torch, "equal", lambda *_: next(differs))
    row = attention.measure(random_model, TreeConfig(2, 4, 20), 60, 3, 1000, rounds=1, times=1)
    assert row["best"] in row["variants"][:2]
