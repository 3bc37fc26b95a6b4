"""transformers' own forward on the device: steps over targets that are not fused, with the twins on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from eagle_slim.runtime import SpeculativeModel, UnsupportedModelError
from eagle_slim.runtime.generation.device import DeviceDecoders
from eagle_slim.runtime.kernels.tree_rows import ForwardRows
from eagle_slim.runtime.target.captured import CapturedTarget, DeviceContext
from eagle_slim.runtime.target.device_buffers import KVCache
from support.tiny_models import SIZES, WINDOW, plain_greedy, random_prompts, widen, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "two rotations": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW}),
    "partial rotation": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_key_value_heads": 4}),
    "window in the mask alone": ("PhimoeForCausalLM", "PhimoeConfig", {"sliding_window": WINDOW, **EXPERTS}),
    "one projection": ("Phi3ForCausalLM", "Phi3Config", {}),
    "soft-capped": ("Gemma2ForCausalLM", "Gemma2Config",
                    {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "sinks": ("GptOssForCausalLM", "GptOssConfig", {"head_dim": 8, "sliding_window": WINDOW, **EXPERTS}),
}  # fmt: skip


def model_of(folder: Path, family: tuple[str, str, dict[str, Any]]) -> SpeculativeModel:
    """A tiny model of the family whose steps run on the device; the device is the CPU."""
    model_class, config_class, options = family
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    target = getattr(transformers, model_class)(config).eval()
    widen(target.named_parameters())
    model = SpeculativeModel.from_pretrained(target, write_head(folder), depth=3, top_k=3, total_tokens=15)
    model._decoders = DeviceDecoders(CapturedTarget(model.target), model.drafter)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_targets_own(tmp_path: Path, family: str) -> None:
    model = model_of(tmp_path, FAMILIES[family])
    prompts = random_prompts([1, 9, 70])
    wanted = [plain_greedy(model.target.model, prompt, 12, eos=None) for prompt in prompts]
    for options in ({}, {"speculative": False, "max_slots": 2}):
        output = model.generate(prompts, max_new_tokens=12, ignore_eos=True, **options)
        assert output.token_ids == wanted
        assert output.stats.path.startswith("steps on the device")


def test_values_of_another_width_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, FAMILIES["one projection"])
    assert model._decoders is not None
    rows = ForwardRows.allocate(1, 2, torch.zeros(1, dtype=torch.int32))
    cache, bufs = KVCache(model._decoders.target, 1, 8), model._decoders.target.new_buffers(1, 2, 2)
    context = DeviceContext(rows, cache, bufs)
    query, value = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 4)
    with pytest.raises(UnsupportedModelError):
        context.attend(0, query, value, value, 1.0, None, None, None)
