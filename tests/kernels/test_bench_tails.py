"""The benchmark of rows that join, on a CPU with toy dimensions: what it checks, times and writes, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.bench import draft_tails, problem, timing
from eagle_slim.runtime.config import TreeConfig

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
