"""The benchmark of rows that join, on a CPU with toy dimensions: what it checks, times and writes, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.bench import draft_tails, follow_table, precompile, problem, timing
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.drafter.config import MAX_NEW_TOKENS, DrafterConfig

TINY = problem.Dims(32, 32, 2, 1, 16, 100)


def test_rows_are_checked_timed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(
        variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
    ) -> Mapping[str, timing.Times]:
        # The drafts have run by now, as they were checked.
        variants["join"]()
        return {name: timing.Times.of([float(rounds)]) for name in variants}

    monkeypatch.setattr(draft_tails, "TREE", TreeConfig(1, 2, 4))
    monkeypatch.setattr(draft_tails, "PREFIX", 5)
    monkeypatch.setattr(draft_tails, "interleave", once)
    out = tmp_path / "deep" / "tails.json"
    args = draft_tails.parser().parse_args(["--base", "40", "--batch", "1", "--tails", "20", "--out", str(out)])
    result = draft_tails.bench(TINY, args, torch.device("cpu"), torch.float16, lambda run: run)
    assert json.loads(out.read_text()) == result
    (row,) = result["rows"]
    assert (row["base"], row["batch"], row["faults"]) == (40, 1, [])
    assert set(row["times"]) == {"none", "tail 20", "join"}
    assert row["row_bytes"] == 32 * 2


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compared(size: int, follow: str | None, category: str, length: float, speed: float) -> dict[str, object]:
        return {
            "draft_vocab": size, "follow": follow, "category": category, "mean_accepted_length": length,
            "tokens_per_s": speed, "speedup": 2.0, "missed_rate": 0.25, "draft_s_per_step": 0.0015,
        }  # fmt: skip

    rows = [
        compared(0, None, "all", 1.0, 50), compared(2048, "prompt", "all", 2.2, 110),
        compared(2048, "prompt", "code", 3.3, 1), compared(2048, None, "all", 2.0, 100),
        compared(2048, None, "code", 3.0, 1), compared(512, "text", "all", 1.5, 90),
        compared(512, "text", "code", 1.25, 1),
    ]  # fmt: skip
    times = {name: {"median_us": value} for name, value in {"none": 200.0, "tail 16": 210.0, "join": 5.0}.items()}
    tails = [{"base": 2048, "batch": 4, "times": times}, {"base": 32000, "batch": 1, "faults": ["wrong"]}]
    for name, result in {"compare": {"rows": rows}, "tails": {"dims": "tiny", "rows": tails}}.items():
        (tmp_path / name).write_text(json.dumps(result))
    follow_table.main([str(tmp_path / "compare"), str(tmp_path / "tails")])
    assert capsys.readouterr().out.splitlines() == [
        "| rows | follows | code | all | missed | draft, ms | tokens/s | × plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 512 | text | 1.250 | 1.500 | 25.0% | 1.500 | 90 | 2.00 |",
        "| 2,048 | - | 3.000 | 2.000 | 25.0% | 1.500 | 100 | 2.00 |",
        "| 2,048 | prompt | 3.300 (+10.0%) | 2.200 (+10.0%) | 25.0% | 1.500 | 110 (+10.0%) | 2.00 |",
        "| base | sequences | none | tail 16 | join |",
        "| --- | --- | --- | --- | --- |",
        "| 2,048 | 4 | 200.0 | 210.0 (+5.0%) | 5.0 |",
    ]


def test_the_kernels_of_a_comparison_are_those_that_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of its own with rows that join, as a drafter over that head has it."""
    monkeypatch.setitem(problem.MODELS, "tiny", TINY)
    cpu, tree = torch.device("cpu"), TreeConfig(1, 2, 4)
    full = problem.random_head(TINY, cpu)
    for rows in (0, 20):
        head = draft_tails.following(full, 40, rows) if rows else problem.first_rows(full, 40)
        job = precompile.job_of("tiny", tree, 1, 64, 40, cpu, 100, rows)
        assert job.cfg == DrafterConfig.of(head, tree, 1, 64 + MAX_NEW_TOKENS)
        assert job.packed_vocab == 100
