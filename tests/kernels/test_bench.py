"""The benchmark script itself, on a CPU with toy dimensions: rows, checks before times, ratios, curves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime.bench import draft, plots, precompile, problem, stages, timing
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.kernels.launch_params import PROJECTIONS

TINY = problem.Dims(64, 96, 4, 2, 16, 300)
ROW = draft.Row("tiny", 120, 1, 1, 20)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> draft.Problems:
    monkeypatch.setitem(problem.MODELS, "tiny", TINY)
    monkeypatch.setattr(draft, "TOTAL_TOKENS", 20)
    monkeypatch.setattr(draft, "supported_weights", lambda device: ["fp8"])
    return draft.Problems(torch.device("cpu"), torch.float16)


def test_a_run_end_to_end(tiny: draft.Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "supported_weights", lambda device: ["bf16"])
    rows = [ROW, draft.Row("tiny", 300, 1, 1, 20)]
    result = draft.run(rows, tiny, 1000, 1, lambda run: run, time.perf_counter())
    assert [row["faults"] for row in result["rows"]] == [[], []]
    assert result["left_out"] == []
    first = result["rows"][0]
    assert set(first["times"]) == {"bf16", "bf16 plain", "A", "B"}
    assert first["bf16_vs_B"] == first["times"]["B"]["median_us"] / first["times"]["bf16"]["median_us"]
    assert first["floor_us"]["bf16"] == pytest.approx(first["draft_bytes"] / result["copy_bytes_per_s"] * 1e6)
    assert first["barriers"] == {"bf16": 4 + 2 * 11 - 1}
    draft.write(result, tmp_path / "deep" / "result.json")
    assert json.loads((tmp_path / "deep" / "result.json").read_text()) == result


def test_a_wrong_draft_is_not_timed(tiny: draft.Problems, capsys: pytest.CaptureFixture[str]) -> None:
    """A reference of other weights disagrees with all of them."""
    other = problem.random_head(TINY, torch.device("cpu"), torch.float16, seed=1)
    tiny.head("tiny")
    tiny._heads |= {"fp8": draft.exact_head(other, tiny.config(ROW, "bf16"))}
    bench = draft.Bench(tiny, 1e12, 1, lambda run: run)
    measured = draft.run_row(bench, ROW, 20)
    assert any("fp8: a log-probability is off" in fault for fault in measured["faults"])
    assert "times" not in measured
    draft.print_row(measured, 1)
    assert "NOT TIMED" in capsys.readouterr().out


def test_out_of_time(tiny: draft.Problems) -> None:
    result = draft.run([ROW], tiny, -1, 1, lambda run: run, time.perf_counter())
    assert result["rows"] == []
    assert result["left_out"] == [ROW.name]


def test_rows() -> None:
    rows = draft.all_rows()
    assert rows[0] == draft.HEADLINE
    eight = {(row.draft_vocab, row.depth, row.batch, row.prefix) for row in rows if row.model == "llama-3.1-8b"}
    assert len(eight) == 4 * 2 * 4 * 2
    assert {row.model for row in rows} == set(problem.MODELS)
    assert len(rows) == 64 + 5
    assert draft.capacity_of(draft.HEADLINE, rows) == 8192


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    draft.main(["--quick", "--list"])
    assert capsys.readouterr().out.split() == ["llama-3.1-8b/v32000/d5/b1/p512", "llama-3.1-8b/v32000/d5/b1/p8192"]
    for pattern, said in (("gpt", "no row matches"), ("(", "no regular expression")):
        with pytest.raises(SystemExit) as stopped:
            draft.main(["--rows", pattern])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as stopped:
            draft.main(["--quick"])
        assert stopped.value.code == 1


def test_times_are_medians_of_interleaved_calls() -> None:
    order: list[str] = []
    times = timing.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, torch.device("cpu"), 8, frozenset({"b"})
    )
    assert "".join(order) == "a" + "a" + "ab" + "aaa" + "ab" + "aaa"
    assert (times["a"].samples, times["b"].samples) == (8, 2)
    summary = timing.Times.of([float(x) for x in range(21)])
    assert (summary.median_us, summary.low_us, summary.high_us) == (10, 2, 18)


def test_barriers_by_kind() -> None:
    grouped, alone = dict.fromkeys(PROJECTIONS, 4), dict.fromkeys(PROJECTIONS, 1)
    cfg = problem.draft_config(TINY, 120, TreeConfig(5, 10, 60), 1, 20)
    assert len(stages.phases(cfg, grouped)) == 4 + 6 * 11 - 1
    assert len(stages.phases(cfg, alone)) == 3 + 6 * 8 - 1
    assert stages.phases(cfg, {**grouped, "qkv": 1})[:6] == ["rows", "fc", "fc sum", "norm", "qkv", "attention"]
    eagle = problem.draft_config(problem.Dims(64, 96, 4, 2, 16, 300, "eagle"), 120, TreeConfig(5, 10, 60), 1, 20)
    assert len(stages.phases(eagle, grouped)) == 1 + 6 * 13 - 1


def test_stamps_are_summed_up_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    """Two programs, three barriers: arrivals and leavings in microseconds, the same in two drafts."""
    draft_stamps = torch.tensor([[[1.0, 3], [2, 3]], [[5, 8], [7, 8]], [[10, 11], [9, 11]]], dtype=torch.float64)
    entries = stages.summarise(["fc", "qkv", "qkv"], torch.stack([draft_stamps, draft_stamps]))
    assert entries == [
        {"phase": "qkv", "times": 2, "total_us": 8.0, "work_us": 2.25, "slowest_us": 3.0, "barrier_us": 1.0}
    ]
    stages.print_phases("toy", entries)
    assert "8 us from the first barrier" in capsys.readouterr().out


def test_curves(tmp_path: Path) -> None:
    def row(vocab: int, batch: int) -> dict[str, Any]:
        times = {
            name: {"median_us": vocab * batch / 30, "low_us": 1.0, "high_us": 9.0} for name in ("bf16", "fp8", "B")
        }
        return {
            "model": "llama-3.1-8b", "draft_vocab": vocab, "depth": 5, "batch": batch, "prefix": 512, "times": times,
            "floor_us": {"bf16": 900.0, "fp8": 500.0}, "draft_bytes": vocab * 1e5,
        }  # fmt: skip

    described = {"device": "toy", "torch": "2", "triton": "3"}
    result = {"machine": described, "rows": [row(8192, 1), row(32000, 1), row(32000, 4), {"faults": ["no"]}]}
    drawn = plots.plot_curves(result, tmp_path / "r.json")
    assert [path.name for path in drawn] == ["r-vocab.png", "r-batch.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn)
    assert plots.plot_curves({"machine": described, "rows": [row(8192, 1)]}, tmp_path / "one.json") == []


def test_compiling_ahead_needs_more_than_one_kernel() -> None:
    assert precompile.compile_all([], 1.0) == []
    cfg = problem.draft_config(TINY, 120, TreeConfig(1, 2, 5), 1, 20)
    from eagle_slim.runtime.kernels.launch_params import INTERPRETER, choose_launch

    assert precompile.compile_all([precompile.Job(TINY, cfg, choose_launch(cfg, INTERPRETER))], 1.0) == [False]


def test_the_commit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_COMMIT", "abc")
    assert timing.machine(torch.device("cpu"))["commit"] == "abc"
    monkeypatch.delenv("EAGLE_SLIM_COMMIT")
    assert timing.commit()
