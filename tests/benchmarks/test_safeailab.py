"""The benchmark of the drop-in around the stand-in of SafeAILab's EAGLE: checks, times, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from eagle_slim.runtime.settings import TreeConfig
from support.upstream_models import build, prompt

from benchmarks import safeailab


def test_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("stand-in eagle3", tmp_path)
    # Upstream's allocates what a tree of another size needs.
    monkeypatch.setattr(model.ea_layer, "init_tree", lambda: None, raising=False)
    rows = safeailab.run(model, TreeConfig(2, 3, 8), prompt(model), "reference", new_tokens=6, rounds=1)
    assert [row["variant"] for row in rows] == ["upstream", "drafter", "whole"]
    assert all(row["is_equal"] and row["equal_tokens"] == row["new_tokens"] for row in rows)
    assert [set(row) >= {"pass_ms", "tokens_per_s"} for row in rows] == [True] * 3
    assert ["draft_ms" in row for row in rows] == [True, True, False]


def test_the_first_difference() -> None:
    assert safeailab.equal_length([1, 2, 3], [1, 2, 4]) == 2
    assert safeailab.equal_length([1, 2], [1, 2, 4]) == 2


def test_a_clone_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        safeailab.main(["--upstream", str(tmp_path)])
    assert stopped.value.code == 2
    assert "must name a clone" in capsys.readouterr().err
