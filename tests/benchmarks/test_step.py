"""Steps of a tiny random model on a CPU: a row for each tree and prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.fused import FusedTarget

from benchmarks import step
from benchmarks.shared.decoding import RandomModel, phase_times, prompt_logits, random_target


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
    found = list(step.measure(random_model, 60, trees, 1, [20, 40], 1e9, is_first=True))
    rows = [row for row in found if "prompt" not in row]
    prompts = [row for row in found if "prompt" in row]
    assert [(row["nodes"], row["prompt"]) for row in prompts] == [(8, 20), (1, 20)]
    assert all(row["first_token_ms"] > 0 for row in prompts)
    assert [(row["nodes"], row["prefix"], row["sampled"]) for row in rows] == [
        (8, 20, True), (8, 20, False), (8, 40, False), (4, 20, False), (4, 40, False),
        (1, 20, True), (1, 20, False), (1, 40, False),
    ]  # fmt: skip
    for row in rows:
        least_bytes = random_model.weight_bytes + random_model.kv_bytes(row["prefix"])
        assert row["floor_ms"] == pytest.approx(least_bytes / 1e9 * 1e3)
        assert row["step_ms"] > 0
        assert ("verify_ms" in row) == (row["nodes"] != 4)
