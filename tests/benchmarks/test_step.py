from typing import Any

import pytest
import torch
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.fused import FusedTarget

from benchmarks import step
from benchmarks.shared import decoding
from benchmarks.shared.decoding import RandomModel, phase_times, prompt_logits, random_target, run_once


@pytest.mark.parametrize("weights", ["fp8", "fp8-blocks"])
def test_random_targets_in_fp8(random_model: RandomModel, weights: str) -> None:
    """Our forward against transformers' own, whose layers multiply by the dequantised matrices."""
    model: Any = random_target("tiny", random_model.dims, torch.float32, torch.device("cpu"), weights)
    assert model.model.layers[0].mlp.up_proj.weight.words.dtype == torch.int32
    ids = [5, 80, 2, 7]
    wanted = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(prompt_logits(FusedTarget(model, None), ids), wanted, rtol=1e-4, atol=1e-5)


def test_rows(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "phase_times", lambda *a, **options: phase_times(*a, **options, rounds=1, times=1))
    trees = [TreeConfig(1, 4, 8), TreeConfig(1, 4, 4)]
    found = list(step.measure(random_model, [(60, "bf16")], trees, 1, [20, 40], 1e9, is_first=True))
    rows = [row for row in found if "prompt" not in row]
    prompts = [row for row in found if "prompt" in row]
    assert [(row["nodes"], row["prompt"]) for row in prompts] == [(8, 20), (1, 20)]
    assert all(row["first_token_ms"] > 0 for row in prompts)
    all_three = (20, True), (20, False), (40, False)
    wanted = [(nodes, *each) for nodes in (8, 4, 1) for each in (all_three[1:] if nodes == 4 else all_three)]
    assert [(row["nodes"], row["prefix"], row["sampled"]) for row in rows] == wanted
    for row in rows:
        least_bytes = random_model.weight_bytes + random_model.kv_bytes(row["prefix"])
        assert row["floor_ms"] == pytest.approx(least_bytes / 1e9 * 1e3)
        assert row["step_ms"] > 0
        assert ("verify_ms" in row) == (row["nodes"] != 4)


def test_rows_of_several_draft_vocabularies(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plain row; sampling and a prompt with the first draft vocabulary alone."""
    monkeypatch.setattr(step, "phase_times", lambda *a, **options: phase_times(*a, **options, rounds=1, times=1))
    drafts = [(60, "bf16"), (40, "bf16")]
    found = list(step.measure(random_model, drafts, [TreeConfig(1, 4, 8)], 1, [20], 1e9, is_first=True))
    rows = [(row["nodes"], row.get("draft_vocab"), row["sampled"]) for row in found if "prompt" not in row]
    assert rows == [(8, 60, True), (8, 60, False), (8, 40, False), (1, None, True), (1, None, False)]
    assert [row["nodes"] for row in found if "prompt" in row] == [8, 1]


def test_prompts_with_a_window_of_drafts(random_model: RandomModel) -> None:
    """The head's cache holds keys and values of 2 heads of 8 float32 numbers: of all places, or those of the window."""
    tree, draft = TreeConfig(1, 4, 8), (60, "bf16")
    whole, windowed = step.measure_prompts(random_model, tree, draft, [2500], [0, 16])
    assert [(row["prompt"], row["draft_window"]) for row in (whole, windowed)] == [(2500, 0), (2500, 16)]
    assert whole["head_cache_bytes"] >= 2500 * 2 * 2 * 8 * 4 > 3 * windowed["head_cache_bytes"]
    for row in (whole, windowed):
        assert row["head_share"] == pytest.approx(row["head_ms"] / row["first_token_ms"])


@pytest.mark.parametrize("tree", [TreeConfig(1, 4, 8), None])
def test_steps_run_ahead(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch, tree: TreeConfig | None) -> None:
    seen = []
    monkeypatch.setattr(decoding, "prompt_time", lambda decoder, *_, **options: seen.append(decoder))
    run_once("tiny", "bf16", tree, 1, 100, (60, "bf16"), 20)
    assert [(each.tree, each.cache.capacity, len(each.cache.layers)) for each in seen] == [(tree, 100, 8)]


@pytest.mark.slow
def test_a_sweep_of_attentions_tiles(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU tiles change nothing: the tiny model has two key heads, each shared by two heads; 256 is 4 blocks."""
    slow = iter([*range(40, 0, -1)])
    monkeypatch.setattr(step, "time_queued_us", lambda *_: next(slow) * 1e3)
    row = step.sweep(random_model, TreeConfig(2, 4, 20), 60, 3, 300, rounds=1, times=1)
    default, variants = row["default"], row["variants"]
    grid = {(each["programs"], each["rows"], each["num_stages"], each["tail_warps"]) for each in variants}
    assert len(variants) == len(grid) == 18 * 2 + (default["tail_warps"] not in (2, 4) or default["num_stages"] > 4)
    assert all(each["is_equal"] for each in variants)
    # 40 query rows of a key head are two blocks of 32, or one of 64; the tail of the deepest node begins at 256.
    assert {each["rows"]: each["blocks_executed"] for each in variants} == {32: 3 * 2 * 2 * 4, 64: 3 * 2 * 1 * 4}
    assert {each["blocks_skipped"] for each in variants if each["rows"] == 64} == {3 * 2 * (6 - 4)}
    assert row["best"] == variants[-1]
    assert row["default_over_best"] == pytest.approx(default["step_ms"] / variants[-1]["step_ms"])
    monkeypatch.setattr(step, "time_queued_us", lambda *_: 1e3)
    monkeypatch.setattr(step, "count_blocks", lambda *_: 0)
    differs = iter([True] * 2 + [False] * 60)
    monkeypatch.setattr(step.torch, "equal", lambda *_: next(differs))
    row = step.sweep(random_model, TreeConfig(2, 4, 20), 60, 3, 300, rounds=1, times=1)
    assert row["best"] in row["variants"][:2]
