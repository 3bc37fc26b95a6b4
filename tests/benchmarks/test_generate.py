"""Generation end to end, on a CPU with toy dimensions: rows, drawn acceptance, gains, loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.drafter.tuning import problem
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig
from support.raising import raises

from benchmarks import generate
from benchmarks.generate import Point
from benchmarks.shared import decoding
from benchmarks.shared.acceptance_loss import FR_SPEC, AcceptanceLoss, measured_loss

LOSS = AcceptanceLoss("toy: of 90 rows", {20: 1.5, 60: 2.0, 90: 2.5})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Point:
    monkeypatch.setitem(problem.MODELS, "tiny", problem.Dims(32, 48, 4, 2, 8, 90))
    monkeypatch.setitem(decoding.LAYERS, "tiny", 4)
    monkeypatch.setattr(generate, "TOP_K", 4)
    monkeypatch.setattr(generate, "PUBLIC_ROWS", 60)
    monkeypatch.setattr(Point, "tree", property(lambda self: TreeConfig(2, 4, 12)))
    # 240 lengths are met exactly by as many steps; here by fewer, so they are all the same.
    monkeypatch.setattr(generate, "draw_lengths", lambda mean, longest: [round(mean)] * 240)
    return Point("tiny", 2, 20)


def test_a_row(tiny: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = decoding.phase_times
    monkeypatch.setattr(generate, "phase_times", lambda *arguments: timed(*arguments, rounds=1, times=1))
    draws = generate.draws_of(tiny, [0, 60, 20], 2.5, LOSS)
    model = decoding.RandomModel("tiny", torch.device("cpu"), torch.float32)
    rows = generate.measure(model, tiny, draws, steps=2, rounds=2)
    assert [(row["variant"], row.get("draft_vocab")) for row in rows] == [
        ("plain", None), ("drafted", 90), ("drafted", 60), ("drafted", 20)
    ]  # fmt: skip
    assert [row["accepted_length"] for row in rows] == [1, 2, 2, 2]
    assert [row.get("acceptance_factor") for row in rows] == [None, 1.0, 0.8, 0.6]
    assert [row.get("drawn_length") for row in rows[2:]] == [2.0, 1.5]
    assert {row["acceptance_from"] for row in rows[2:]} == {LOSS.source}
    assert all(row["is_length_met"] for row in rows[1:])
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["accepted_length"] * 2 / row["step_ms"] * 1e3)
        assert {"verify_ms", "accept_ms", "commit_ms"} < set(row)
    assert rows[3]["over_plain"] == pytest.approx(rows[3]["tokens_per_s"] / rows[0]["tokens_per_s"])
    assert rows[3]["net_over_full"] == pytest.approx(rows[3]["tokens_per_s"] / rows[1]["tokens_per_s"])
    assert rows[3]["gross_over_32000"] == pytest.approx(rows[2]["step_ms"] / rows[3]["step_ms"])
    assert "net_over_32000" not in rows[1]


def test_each_loss_is_drawn(tiny: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FR_SPEC, "tiny", AcceptanceLoss("other", {20: 1.0, 90: 2.0}))
    draws = generate.draws_of(tiny, [0, 20], 2.5, LOSS)
    assert [(drawn.rows, drawn.source, drawn.factor) for drawn in draws] == [
        (90, "the length asked for", 1.0), (20, LOSS.source, 0.6), (20, "other", 0.5)
    ]  # fmt: skip


def test_losses() -> None:
    assert [LOSS.factor(rows) for rows in (20, 60, 90, 1000)] == [0.6, 0.8, 1.0, 1.0]
    assert 0.6 < LOSS.factor(30) < LOSS.factor(40) < 0.8
    with raises(UsageError, option="sizes", found=19, expected=20):
        LOSS.factor(19)
    # The shares that FR-Spec prints.
    eight = FR_SPEC["llama-3.1-8b"]
    assert [round(100 * eight.factor(rows), 1) for rows in (65536, 32768, 16384, 8192)] == [97.7, 93.3, 87.4, 80.5]
    assert [round(100 * FR_SPEC["llama-3.2-1b"].factor(rows), 1) for rows in (32768, 16384)] == [95.8, 92.6]


def test_a_loss_is_read_off_answers() -> None:
    answers = [
        {"draft_vocab": size, "accepted_length": length, "sampled": False}
        for size, length in (("plain", 1.0), (40, 3.0), (20, 2.4))
    ]
    others = [{**answers[1], "sampled": True, "accepted_length": 9.0}, {**answers[1], "drawn_length": 3.0}]
    assert measured_loss([*others, *answers, *others], "toy").lengths == {40: 3.0, 20: 2.4}
    with raises(UsageError, lengths=1):
        measured_loss(answers[:2], "toy")
    # The default.
    committed = json.loads(generate.ANSWERS.read_text())["rows"]
    assert sorted(measured_loss(committed, "").lengths) == [8192, 16000, 32000, 49152]


def test_rows_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = generate.all_points()
    assert len(points) == len(set(points)) == 3 * 3 * 3
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--rows", "1b/b1/", "--list"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.split() == [f"llama-3.2-1b/b1/p{prefix}" for prefix in (512, 8192, 32768)]
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    for arguments in (
        ["--rows", "gpt"], ["--rows", "("], ["--sizes", "all"], ["--answers", str(other)], ["--answers", str(tmp_path)],
        ["--out", str(tmp_path)], ["--out", str(other / "deep")], ["--sizes", "0"], ["--sizes=full,-5"],
        ["--sizes", "full,8191"], ["--sizes", "9"], ["--steps", "0"], ["--rounds", "0"], ["--accepted", "7.1"],
        ["--accepted", "1.1"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            generate.main(["--rows", "8b/b1/p512$", *arguments])
        assert stopped.value.code == 2
