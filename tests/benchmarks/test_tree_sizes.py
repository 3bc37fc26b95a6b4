"""The tables that choose the size of a tree: made of committed results, and what goes into them measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.prompt_file import Prompt
from eagle_slim.runtime.requests import tree_size

from benchmarks import tree_sizes


def test_the_tables_are_made_of_results() -> None:
    """What ships is what the committed results of the benchmarks give."""
    assert tree_sizes.collect() == tree_sizes.read(tree_size.TABLES)


def test_drafts_behind_a_screen(tmp_path: Path) -> None:
    row = {
        "model": "llama-3.1-8b", "draft_vocab": 32000, "batch": 1, "screen_rank": 256,
        "times": {"bf16": {"median_us": 1400.04}, "bf16_screen": {"median_us": 1100.0}, "fp8": {"median_us": 9}},
    }  # fmt: skip
    rows = [row, {**row, "batch": 4}, {**row, "times": {"bf16": {"median_us": 1.0}}}]
    (tmp_path / "draft.json").write_text(json.dumps({"machine": {"device": "Some GPU"}, "rows": rows}))
    (found,) = (tree_size.ScreenTimes(**times) for times in tree_sizes.screens([tmp_path / "draft.json"]))
    assert found == tree_size.ScreenTimes("Some GPU", "bf16", 4096, 32000, 256, 1400.0, 1100.0)
    sizes = tree_size.TreeSizes({}, (), (found, found._replace(hidden=2048)))
    assert sizes.screens_on("Some GPU", "bf16", 4096) == (found,)
    assert not sizes.screens_on("Some GPU", "fp8", 4096)
    assert not sizes.screens_on("Another", "bf16", 4096)
    for draft_vocab, rank, pays in ((32000, 256, True), (128256, 96, True), (31999, 256, False), (32000, 257, False)):
        assert tree_size.screen_pays([found], draft_vocab, rank) == pays
    assert not tree_size.screen_pays([found._replace(screened_us=1400.0)], 32000, 256)


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
