"""The tables that choose the size of a tree: made of committed results, and what goes into them measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.prompts import Prompt
from eagle_slim.runtime.requests import tree_size

from benchmarks import tree_sizes


def test_the_tables_are_made_of_results() -> None:
    """What ships is what the committed results of the benchmarks give."""
    assert tree_sizes.collect() == tree_sizes.read(tree_size.TABLES)


def test_bytes_of_known_dimensions() -> None:
    """Llama-3.1-8B: 32 layers of 218,103,808 matrix weights, and an LM head of 128,256 x 4,096."""
    assert tree_sizes.weight_bytes("llama-3.1-8b") == 2 * (32 * 218_103_808 + 128_256 * 4_096)
    assert tree_sizes.draft_bytes("smollm2-135m", 49152) == pytest.approx(6 * 66.8e6, rel=0.01)


@pytest.mark.slow
def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_sizes, "NODES", (6,))
    model = SpeculativeModel.from_pretrained(depth=2, top_k=3)
    plain, drafted = tree_sizes.measure(model, [Prompt(("Hi",), "chat"), Prompt(("Bye",), "chat")], [2], 4)
    assert (plain["batch"], plain["nodes"], plain["accepted_length"]) == (2, 1, 1.0)
    assert (drafted["batch"], drafted["nodes"]) == (2, 6)
    assert drafted["prefix"] == round(sum(len(model.encode_chat(text)) for text in ("Hi", "Bye")) / 2 + 2)
    assert drafted["accepted_length"] > 1
    assert drafted["step_ms"] > drafted["draft_ms"] > 0


def test_the_file_is_written(tmp_path: Path) -> None:
    tree_sizes.main(["--out", str(tmp_path / "sizes.json")])
    assert (tmp_path / "sizes.json").read_text() == tree_size.TABLES.read_text()
