import json
from pathlib import Path

import pytest
from eagle_slim.runtime import TreeConfig, UsageError
from support.raising import raises

from benchmarks import generate
from benchmarks.generate import FR_SPEC, SMOLLM2, Point, factor
from benchmarks.shared.decoding import RandomModel, phase_times

RESULTS = Path(generate.__file__).parent / "results"
LOSS = {20: 1.5, 60: 2.0, 90: 2.5}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Point:
    monkeypatch.setitem(FR_SPEC, "tiny", {20: 1.0, 90: 2.0})
    monkeypatch.setattr(generate, "SMOLLM2", LOSS)
    monkeypatch.setattr(generate, "PUBLIC_ROWS", 60)
    monkeypatch.setattr(Point, "tree", property(lambda self: TreeConfig(2, 4, 12)))
    return Point("tiny", 2, 20)


def test_a_row(random_model: RandomModel, tiny: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "phase_times", lambda *arguments: phase_times(*arguments, rounds=1, times=1))
    sizes = tiny.sizes([0, 60, 20, 1000])
    # 240 lengths are met exactly by as many steps; here by fewer, so they are all the same.
    rows = generate.measure(random_model, tiny, sizes, [2] * 240, steps=2, rounds=2)
    variants = [("plain", None), *(("drafted", size) for size in (90, 60, 20))]
    assert [(row["variant"], row.get("draft_vocab")) for row in rows] == variants
    assert [row["accepted_length"] for row in rows] == [1, 2, 2, 2]
    assert [row.get("losses", {}).get("SmolLM2") for row in rows] == [None, 1.0, 0.8, 0.6]
    assert rows[3]["losses"]["FR-Spec"] == 0.5
    assert all(row["is_length_met"] for row in rows[1:])
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["accepted_length"] * 2 / row["step_ms"] * 1e3)
        assert {"verify_ms", "accept_ms", "commit_ms"} < set(row)
    assert rows[3]["over_plain"] == pytest.approx(rows[3]["tokens_per_s"] / rows[0]["tokens_per_s"])
    gross = rows[1]["step_ms"] / rows[3]["step_ms"]
    assert rows[3]["over_90"] == pytest.approx({"gross": gross, "SmolLM2": 0.6 * gross, "FR-Spec": 0.5 * gross})
    gross = rows[2]["step_ms"] / rows[3]["step_ms"]
    assert rows[3]["over_60"]["gross"] == pytest.approx(gross)
    assert rows[3]["over_60"]["SmolLM2"] == pytest.approx(0.6 / 0.8 * gross)
    assert not {"over_60", "over_90"} & set(rows[1])


def test_losses() -> None:
    assert [factor(LOSS, rows) for rows in (20, 60, 90, 1000)] == [0.6, 0.8, 1.0, 1.0]
    assert 0.6 < factor(LOSS, 30) < factor(LOSS, 40) < 0.8
    with raises(UsageError):
        factor(LOSS, 19)
    # The shares that FR-Spec prints.
    eight = FR_SPEC["llama-3.1-8b"]
    assert [round(100 * factor(eight, rows), 1) for rows in (65536, 32768, 16384, 8192)] == [97.7, 93.3, 87.4, 80.5]
    assert [round(100 * factor(FR_SPEC["llama-3.2-1b"], rows), 1) for rows in (32768, 16384)] == [95.8, 92.6]


def test_what_smollm2_lost_was_measured() -> None:
    rows = json.loads((RESULTS / "2026-11-26-h100-answers.json").read_text())["rows"]
    greedy = {row["draft_vocab"]: round(row["accepted_length"], 4) for row in rows if not row["sampled"]}
    assert {size: greedy[size] for size in SMOLLM2} == SMOLLM2
