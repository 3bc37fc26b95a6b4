"""Attention with a twist: capped scores, sinks, windows in some layers, keys wider than values, partial rotation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from eagle_slim.runtime import SpeculativeModel, TreeConfig, UnsupportedModelError
from support.tiny_models import LAYERS, WINDOW, plain_greedy, random_prompts, tiny_target, widen, write_head
from support.tiny_models import SIZES as FEW_LAYERS
from transformers.models.llama import modeling_llama as llama
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")

SIZES = {**FEW_LAYERS, "num_hidden_layers": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "soft-capped": ("Gemma2ForCausalLM", "Gemma2Config",
                    {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "two rotations": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW}),
    "sinks": ("GptOssForCausalLM", "GptOssConfig", {"head_dim": 8, "sliding_window": WINDOW, **EXPERTS}),
    "partial rotation": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "one projection": ("Phi3ForCausalLM", "Phi3Config", {}),
    "latent": ("DeepseekV3ForCausalLM", "DeepseekV3Config",
               {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1}),
    "window in the mask alone": ("PhimoeForCausalLM", "PhimoeConfig", {"sliding_window": WINDOW, **EXPERTS}),
    "windows in some masks alone": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "keys shared by layers": (
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        {"head_dim": 8, "global_head_dim": 8, "sliding_window": WINDOW, "num_kv_shared_layers": 2,
         "layer_types": ["sliding_attention", "full_attention"] * 3, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 24}),
    "no recurrent layer, rotated": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {"layer_types": ["attention"] * 6, "position_embedding_type": "rope", "shared_intermediate_size": 48,
         "mamba_n_heads": 8, "num_local_experts": 0}),
    "no recurrent layer, without positions": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {"layer_types": ["attention"] * 6, "shared_intermediate_size": 48, "mamba_n_heads": 8, **EXPERTS}),
    "no convolving layer": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["full_attention"] * 6}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_targets_own(tmp_path: Path, family: str) -> None:
    model_class, config_class, options = FAMILIES[family]
    if not hasattr(transformers, model_class):
        pytest.skip(f"transformers {transformers.__version__} has no {model_class}")
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    target = getattr(transformers, model_class)(config).eval()
    if not target._supports_attention_backend:
        pytest.skip(f"{model_class} takes no registered attention function in transformers {transformers.__version__}")
    widen(target.named_parameters())
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(3, 4, 25))
    prompts = random_prompts([1, 9, 17])
    wanted = [plain_greedy(target, prompt, 16, eos=None) for prompt in prompts]
    output = model.generate(prompts, max_new_tokens=16, ignore_eos=True)
    assert output.token_ids == wanted
    assert max(output.stats.accepted_lengths) > 1
    plain = model.generate(prompts, max_new_tokens=16, ignore_eos=True, speculative=False, max_slots=2)
    assert plain.token_ids == wanted


def test_text_of_a_vision_language_model_whose_tower_has_as_many_layers(tmp_path: Path) -> None:
    text = tiny_target("qwen2").config
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**tower, image_size=28, patch_size=14)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=0)
    target = transformers.LlavaForConditionalGeneration(config).eval()
    widen(target.named_parameters())
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(3, 4, 25))
    prompts = random_prompts([1, 9])
    output = model.generate(prompts, max_new_tokens=16, ignore_eos=True)
    assert output.token_ids == [plain_greedy(target, prompt, 16, eos=None) for prompt in prompts]


def test_a_mask_of_the_models_own_is_refused(tmp_path: Path) -> None:
    target = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES)).eval()
    with pytest.raises(UnsupportedModelError, match="DogeAttention computes an attention mask of its own"):
        SpeculativeModel.from_pretrained(target, write_head(tmp_path))


def test_a_prompt_that_sees_what_follows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(3, 4, 25))
    prompt, refused = random_prompts([9])[0], "LlamaAttention computes an attention mask of its own"
    with monkeypatch.context() as patch:  # as PaliGemma and others add it for images
        first_four = partial(llama.create_causal_mask, or_mask_function=lambda batch, head, query, key: key < 4)
        patch.setattr(llama, "create_causal_mask", first_four)
        with pytest.raises(UnsupportedModelError, match=refused):
            model.generate(prompt, max_new_tokens=4)
    model.generate(prompt, max_new_tokens=4)
    for layer in target.model.layers:  # as Gemma in PaliGemma
        layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match=refused):
        model.generate(prompt, max_new_tokens=4)


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("Llama4", {"layer_types": ["full_attention"] * 6, "num_local_experts": 2}, "layer 3 computes with the length"),
        ("Gemma2", {"sliding_window": None}, "Gemma2ForCausalLM cannot run a token"),
        ("GPTJ", {"rotary_dim": 8}, "not take a registered attention function"),
        ("GraniteMoeHybrid", {"layer_types": ["attention"] * 5 + ["mamba"], "mamba_n_heads": 8}, "a recurrent state"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_verify_trees_is_refused_by_its_reason(
    tmp_path: Path, family: str, options: dict[str, Any], problem: str
) -> None:
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    target = getattr(transformers, f"{family}ForCausalLM")(config_class(**{**SIZES, **options})).eval()
    with pytest.raises(UnsupportedModelError, match=problem):
        SpeculativeModel.from_pretrained(target, write_head(tmp_path))


def test_a_tap_at_a_layer_that_text_does_not_pass_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = MllamaTextConfig(**SIZES, cross_attention_layers=[3], rope_scaling=rope)
    target = transformers.MllamaForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="MllamaForCausalLM leaves out decoder layer 3"):
        SpeculativeModel.from_pretrained(target, write_head(tmp_path))


def test_hidden_states_of_another_form_are_refused(tmp_path: Path) -> None:
    options = {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 24,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 6,
        "altup_num_inputs": 2,
    }
    target = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**{**SIZES, **options})).eval()
    with pytest.raises(UnsupportedModelError, match=r"hands hidden states of shape \[2, 1, 1, 32\]"):
        SpeculativeModel.from_pretrained(target, write_head(tmp_path))
