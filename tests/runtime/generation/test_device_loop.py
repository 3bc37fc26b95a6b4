"""The loop on the device, run on the CPU with the twins: its state machine is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.generation.device import capacity_for
from support.tiny_models import HIDDEN, plain_greedy, random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")


@pytest.mark.parametrize("is_drafted", [True, False])
def test_greedy_equals_transformers(tmp_path: Path, is_drafted: bool) -> None:
    """Four prompts over two slots: ends at different steps, slots taken again, prompts of one token and of chunks."""
    target, head = tiny_target("llama"), write_head(tmp_path)
    tree = {"depth": 3, "top_k": 3, "total_tokens": 15}
    pieces = SpeculativeModel.from_pretrained(target, head, **tree)
    model = SpeculativeModel.from_pretrained(target, head, target_backend="fused", **tree)
    options = {"max_new_tokens": 20, "max_slots": 2, "speculative": is_drafted}
    prompts = random_prompts([1, 9, 70, 2])
    output, expected = model.generate(prompts, **options), pieces.generate(prompts, **options)
    assert output.stats.path.startswith("steps on the device")
    assert expected.stats.path.startswith("steps in pieces")
    assert output.token_ids == expected.token_ids == [plain_greedy(target, prompt, 20) for prompt in prompts]
    assert [result.finish_reason for result in output.results] == [r.finish_reason for r in expected.results]
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths
    again = model.generate(prompts[::-1], **options)
    assert again.token_ids == output.token_ids[::-1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "seed": 4},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 9, "suppress_tokens": [5, 6, 7]},
        {"temperature": 1.0, "repetition_penalty": 0.8, "min_new_tokens": 4, "seed": 5},
    ],
)
def test_drafted_equals_plain_and_pieces(tmp_path: Path, options: dict[str, Any]) -> None:
    target, head = tiny_target("qwen3"), write_head(tmp_path)
    tree = {"depth": 3, "top_k": 3, "total_tokens": 15}
    pieces = SpeculativeModel.from_pretrained(target, head, **tree)
    model = SpeculativeModel.from_pretrained(target, head, target_backend="fused", **tree)
    prompts = random_prompts([5, 12, 3])
    drafted = model.generate(prompts, max_new_tokens=16, **options)
    assert drafted.stats.path.startswith("steps on the device")
    assert drafted.token_ids == model.generate(prompts, max_new_tokens=16, speculative=False, **options).token_ids
    assert drafted.token_ids == pieces.generate(prompts, max_new_tokens=16, **options).token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"fc_norm": True, "extra": {f"fc_norm.{i}.weight": torch.linspace(0.5 + i, 1.5, HIDDEN) for i in range(3)},
         "layer_types": ["sliding_attention"], "sliding_window": 5, "norm_before_residual": True},
        {"norm_before_fc": True, "extra": {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * HIDDEN)},
         "attention_bias": True, "norm_output": True, "hidden_act": "gelu"},
    ],
    ids=["each tap normed", "all taps normed"],
)  # fmt: skip
def test_options_of_a_head_are_the_reference_drafters(tmp_path: Path, options: dict[str, Any]) -> None:
    target, head = tiny_target("llama"), write_head(tmp_path, **options)
    tree = {"depth": 3, "top_k": 3, "total_tokens": 15}
    prompts = random_prompts([9, 30])
    pieces = SpeculativeModel.from_pretrained(target, head, **tree).generate(prompts, max_new_tokens=12)
    model = SpeculativeModel.from_pretrained(target, head, target_backend="fused", **tree)
    output = model.generate(prompts, max_new_tokens=12)
    assert output.stats.path.startswith("steps on the device")
    assert output.token_ids == pieces.token_ids
    assert output.stats.accepted_lengths == pieces.stats.accepted_lengths


def test_what_only_the_host_can_do_runs_in_pieces(tmp_path: Path) -> None:
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), target_backend="fused")
    prompts = random_prompts([5])
    for options in ({"typical_p": 0.9, "temperature": 1.0}, {"no_repeat_ngram_size": 2}):
        assert model.generate(prompts, max_new_tokens=4, **options).stats.path.startswith("steps in pieces")


def test_the_cache_grows_in_powers_of_two_up_to_the_longest_contexts() -> None:
    assert [capacity_for(rows) for rows in (1, 1024, 1025, 70_000, 131_072)] == [1024, 1024, 2048, 131_072, 131_072]
    assert capacity_for(131_072 + 61) == 131_133
