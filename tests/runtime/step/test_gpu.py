"""The reference on a GPU: exact in fp32, and close in bf16 with the rate of answers that differ on record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel

pytestmark = pytest.mark.gpu
PROMPTS = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


def prompts(model: SpeculativeModel) -> list[list[int]]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:12]
    return [model.encode_chat(json.loads(line)["turns"][0]) for line in lines]


def test_fp32_is_exact_and_needs_the_measured_passes() -> None:
    model = SpeculativeModel.from_pretrained(dtype=torch.float32, device="cuda")
    output = model.generate(prompts(model), max_new_tokens=40)
    plain = model.generate(prompts(model), max_new_tokens=40, speculative=False)
    assert output.token_ids == plain.token_ids
    assert output.stats.num_accepted_tokens == pytest.approx(484, abs=3)
    assert output.stats.num_passes == pytest.approx(160, abs=2)
    assert output.stats.draft_s > 0
    assert output.stats.verify_s > 0
    sampled = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 0.9, "seed": 1}
    drafted = model.generate(prompts(model), **sampled)
    assert drafted.token_ids == model.generate(prompts(model), speculative=False, **sampled).token_ids


def test_bf16_stays_close(record_property: Callable[[str, object], None]) -> None:
    model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device="cuda")
    output = model.generate(prompts(model), max_new_tokens=40)
    plain = model.generate(prompts(model), max_new_tokens=40, speculative=False)
    same = [a == b for a, b in zip(output.token_ids, plain.token_ids, strict=True)]
    record_property("answers_equal_in_bf16", f"{sum(same)}/{len(same)}")
    assert sum(same) >= len(same) // 2
    assert output.stats.mean_accepted_length == pytest.approx(3.025, rel=0.05)
