"""The benchmark end to end, on a CPU with toy dimensions: rows, drawn acceptance, gains, loss, plot."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.bench import answers, generate, plots, problem, random_decoding
from eagle_slim.runtime.bench.acceptance_loss import FR_SPEC, AcceptanceLoss, measured_loss
from eagle_slim.runtime.bench.generate import Point, Settings
from eagle_slim.runtime.errors import UsageError
from eagle_slim.vocab_tools import DraftVocab
from support.raising import raises
from support.tiny_models import VOCAB, random_prompts, tiny_target, write_head

CPU = torch.device("cpu")
LOSS = AcceptanceLoss("toy: of 90 rows", {20: 1.5, 60: 2.0}, 90, 2.5)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(problem.MODELS, "tiny", problem.Dims(32, 48, 4, 2, 8, 90))
    monkeypatch.setitem(random_decoding.LAYERS, "tiny", 4)
    monkeypatch.setattr(generate, "DEPTH", 2)
    monkeypatch.setattr(generate, "TOP_K", 4)
    monkeypatch.setattr(generate, "PUBLIC_ROWS", 60)
    monkeypatch.setattr(Point, "tree", property(lambda self: generate.TreeConfig(2, 4, 12)))


@pytest.mark.usefixtures("tiny")
def test_a_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 240 lengths are met exactly by as many steps; here by fewer, so they are all the same.
    monkeypatch.setattr(generate, "draw_lengths", lambda mean, longest, seed: [round(mean)] * 240)
    monkeypatch.setattr(generate, "phase_times", _one_of_each)
    settings = Settings((0, 60, 20), accepted=2.5, steps=2, rounds=2, transformers_tokens=2)
    out = tmp_path / "deep" / "result.json"
    result = generate.run([Point("tiny", 2, 20)], settings, CPU, 1000, time.perf_counter(), [LOSS], out=out)
    assert result["left_out"] == []
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    rows = result["rows"]
    assert [(row["variant"], row["draft_vocab"]) for row in rows] == [
        ("transformers", None), ("plain", None), ("drafted", 90), ("drafted", 60), ("drafted", 20)
    ]  # fmt: skip
    assert [row["accepted_length"] for row in rows] == [1, 1, 2, 2, 2]
    assert [row.get("acceptance_factor") for row in rows] == [None, None, 1.0, 0.8, 0.6]
    assert [row.get("drawn_length") for row in rows[3:]] == [2.0, 1.5]
    assert {row["acceptance_from"] for row in rows[3:]} == {LOSS.source}
    assert all(row["is_verdict_drawn"] and row["is_length_met"] for row in rows[2:])
    for row in rows[1:]:
        assert row["tokens_per_s"] == pytest.approx(row["accepted_length"] * 2 / row["step_ms"] * 1e3)
        assert {"verify_ms", "accept_ms", "commit_ms"} < set(row)
    assert rows[4]["net_over_full"] == pytest.approx(rows[4]["tokens_per_s"] / rows[2]["tokens_per_s"])
    assert rows[4]["gross_over_32000"] == pytest.approx(rows[3]["step_ms"] / rows[4]["step_ms"])
    lines = out.with_suffix(".md").read_text().splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {12}
    assert "90 (full)" in lines[4]
    assert f"{100 * rows[4]['net_over_full'] - 100:+.1f}%" in lines[6]
    assert lines[6].endswith(f"| {LOSS.source} |")
    late = generate.run([Point("tiny", 1, 20)], settings, CPU, -1, time.perf_counter(), [LOSS])
    assert late["rows"] == []
    assert late["left_out"] == ["tiny/b1/p20"]


def _one_of_each(decoder: Any, *rest: Any) -> dict[str, float]:
    return random_decoding.phase_times(decoder, *rest, rounds=1, times=1)


@pytest.mark.usefixtures("tiny")
def test_a_smaller_vocabulary_needs_a_loss() -> None:
    model = random_decoding.RandomModel("tiny", CPU)
    with raises(UsageError, option="sizes", found=60):
        generate.measure_point(model, Point("tiny", 1, 20), Settings((0, 60)), [])


@pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
def test_real_answers(tmp_path: Path) -> None:
    """Real prompts, every variant; the loss of smaller vocabularies is read off the rows."""
    head = write_head(tmp_path, draft_ids=list(range(20)))
    model = SpeculativeModel.from_pretrained(
        tiny_target("llama"), head, target_backend="fused", depth=2, top_k=3, total_tokens=8
    )
    # Only of a converted head, or of the built-in one, a number says which rows.
    over = model.with_draft_vocab
    model.with_draft_vocab = lambda size: over(DraftVocab(np.arange(size), 0, VOCAB))  # type: ignore[method-assign]
    measured = answers.measure(model, random_prompts([5, 9]), ["full", "10"], 6, 1, transformers_tokens=4)
    rows = generate.example_rows(measured)
    assert [(row["variant"], row["draft_vocab"]) for row in rows] == [
        ("transformers", None), ("plain", None), ("drafted", 20), ("drafted", 10)
    ]  # fmt: skip
    assert {row["equal_answers"] for row in rows} == {"2/2"}
    assert all(row["is_verdict_drawn"] is False for row in rows[2:])
    assert all(row["draft_ms"] > 0 and row["verify_ms"] > 0 for row in rows[2:])
    assert rows[3]["net_over_full"] == pytest.approx(rows[3]["tokens_per_s"] / rows[2]["tokens_per_s"])
    loss = measured_loss(rows)
    assert loss is not None
    assert loss.factor(10) == pytest.approx(rows[3]["accepted_length"] / rows[2]["accepted_length"])
    assert measured_loss(rows[:3]) is None
    drawn = {"is_verdict_drawn": True, "is_full": True, "draft_vocab": 99, "accepted_length": 9.0}
    assert measured_loss([drawn, *rows, drawn]) == loss


def test_losses() -> None:
    assert [LOSS.factor(rows) for rows in (20, 60, 90, 1000)] == [0.6, 0.8, 1.0, 1.0]
    assert 0.6 < LOSS.factor(30) < LOSS.factor(40) < 0.8
    with raises(UsageError, option="sizes", found=19, expected=20):
        LOSS.factor(19)
    with raises(UsageError, lengths=0):
        AcceptanceLoss("nothing", {}, 10, 2.0)
    # The shares that FR-Spec prints.
    eight = FR_SPEC["llama-3.1-8b"]
    assert [round(100 * eight.factor(rows), 1) for rows in (65536, 32768, 16384, 8192)] == [97.7, 93.3, 87.4, 80.5]
    assert [round(100 * FR_SPEC["llama-3.2-1b"].factor(rows), 1) for rows in (32768, 16384)] == [95.8, 92.6]


def test_rows_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = generate.all_points()
    assert points[:2] == [Point("llama-3.1-8b", 1, 512), Point("llama-3.2-1b", 1, 512)]
    assert len(points) == len(set(points)) == 3 * 3 * 3
    generate.main(["--rows", "1b/b1/|examples", "--list"])
    assert capsys.readouterr().out.split() == [
        "smollm2-135m/examples", *(f"llama-3.2-1b/b1/p{prefix}" for prefix in (512, 8192, 32768))
    ]  # fmt: skip
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    for arguments in (
        ["--rows", "gpt"], ["--rows", "("], ["--sizes", "all"], ["--transformers-tokens", "1"],
        ["--smollm2", str(other)], ["--smollm2", str(tmp_path)], ["--out", str(tmp_path)],
        ["--out", str(other / "deep")],
        ["--sizes", "0"], ["--sizes=full,-5"], ["--rows", "8b", "--sizes", "full,8191"], ["--steps", "0"],
        ["--rounds", "0"], ["--new", "1"], ["--limit", "0"], ["--rows", "8b", "--accepted", "7.1"],
        ["--rows", "8b", "--accepted", "1.1"], ["--prompts", str(tmp_path / "missing")],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            generate.main(arguments)
        assert stopped.value.code == 2


def test_gains_are_drawn(tmp_path: Path) -> None:
    def row(rows: int, source: str, gross: float, net: float) -> dict[str, Any]:
        return {
            "row": "toy/b1", "draft_vocab": rows, "is_full": rows == 128256, "acceptance_from": source,
            "gross_over_full": gross, "net_over_full": net,
        }  # fmt: skip

    rows = [row(128256, "asked", 1, 1), row(32000, "SmolLM2, x", 1.2, 1.1), row(32000, "FR-Spec: y", 1.2, 1.05)]
    described = {"device": "toy", "torch": "2", "triton": "3"}
    result = {"machine": described, "rows": [{"row": "toy/b1", "variant": "plain"}, *rows]}
    (drawn,) = plots.plot_gains(result, tmp_path / "r.json")
    assert drawn.name == "r.png"
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert plots.plot_gains({"machine": described, "rows": rows[:1]}, tmp_path / "none.json") == []
