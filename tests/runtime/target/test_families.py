"""Attention with a twist: capped scores, sinks, windows in some layers, keys wider than values, partial rotation."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from eagle_slim.runtime import SpeculativeModel, TreeConfig, UnsupportedModelError
from eagle_slim.runtime.errors import TargetWarning
from support.sweeps import sweep
from support.tiny_models import LAYERS, WINDOW, plain_greedy, random_prompts, tiny_target, widen, write_head
from support.tiny_models import SIZES as FEW_LAYERS
from transformers.models.llama import modeling_llama as llama

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
SIZES = {**FEW_LAYERS, "num_hidden_layers": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWED = {"head_dim": 8, "sliding_window": WINDOW}
LATENT = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LATENT |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3, "num_experts": 4}
SOME_WINDOWS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SHARED_KEYS = {**WINDOWED, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 24}
SHARED_KEYS |= {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3}
ALTERNATING = {**SHARED_KEYS, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6, "altup_num_inputs": 2}
CROSSED = {"cross_attention_layers": [3], "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}}
NOT_RECURRENT = {"layer_types": ["attention"] * 6, "shared_intermediate_size": 48, "mamba_n_heads": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-capped": ("Gemma2", {**WINDOWED, "query_pre_attn_scalar": 8}),
    "two rotations": ("Gemma3", WINDOWED),
    "sinks": ("GptOss", {**WINDOWED, **EXPERTS}),
    "partial rotation": ("GPTNeoX", {}),
    "one projection": ("Phi3", {}),
    "latent": ("DeepseekV3", LATENT),
    "window in the mask alone": ("Phimoe", {"sliding_window": WINDOW, **EXPERTS}),
    "windows in some masks alone": ("Qwen2Moe", SOME_WINDOWS),
    "keys shared by layers": ("Gemma4", {**SHARED_KEYS, "global_head_dim": 8}),
    "no recurrent layer, rotated": (
        "GraniteMoeHybrid",
        {**NOT_RECURRENT, "position_embedding_type": "rope", "num_local_experts": 0},
    ),
    "no recurrent layer, without positions": ("GraniteMoeHybrid", {**NOT_RECURRENT, **EXPERTS}),
    "no convolving layer": ("Lfm2", {"layer_types": ["full_attention"] * 6}),
}


def build(family: str, options: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    return getattr(transformers, f"{family}ForCausalLM")(config(**{**SIZES, **options})).eval()


@pytest.mark.parametrize("name", sweep(FAMILIES, "soft-capped", "sinks"))
def test_greedy_equals_the_targets_own(tmp_path: Path, name: str) -> None:
    family, options = FAMILIES[name]
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}ForCausalLM")
    target = build(family, options)
    if not target._supports_attention_backend:
        pytest.skip(f"{family} takes no registered attention function in transformers {transformers.__version__}")
    widen(target.named_parameters())
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(3, 4, 25))
    prompts = random_prompts([1, 9, 17])
    wanted = [plain_greedy(target, prompt, 16, eos=None) for prompt in prompts]
    output = model.generate(prompts, max_new_tokens=16, ignore_eos=True)
    assert output.token_ids == wanted
    assert max(output.stats.accepted_lengths) > 1
    plain = model.generate(prompts, max_new_tokens=16, ignore_eos=True, speculative=False, max_slots=2)
    assert plain.token_ids == wanted


@pytest.mark.parametrize("family", ["Llama", "Granite"])
def test_a_window_that_no_layer_reads_is_told(tmp_path: Path, family: str) -> None:
    target = build(family, {"sliding_window": WINDOW})
    widen(target.named_parameters())
    with pytest.warns(TargetWarning, match=f"{family}ForCausalLM does not read sliding_window = {WINDOW}"):
        model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(3, 4, 25))
    prompt = random_prompts([9])[0]
    tokens = model.generate(prompt, max_new_tokens=16, ignore_eos=True).token_ids[0]
    assert tokens != plain_greedy(target, prompt, 16, eos=None)  # by a cache that is cut
    target.generation_config.use_cache = False
    assert tokens == plain_greedy(target, prompt, 16, eos=None)


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
        ("Doge", {}, "DogeAttention computes an attention mask of its own"),
        # A tap at a layer that text does not pass; hidden states of another form.
        ("Mllama", CROSSED, "MllamaForCausalLM leaves out decoder layer 3"),
        ("Gemma3n", ALTERNATING, r"hands hidden states of shape \[2, 1, 1, 32\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_verifies_no_tree_is_refused(tmp_path: Path, family: str, options: dict[str, Any], problem: str) -> None:
    target = build(family, options)
    with pytest.raises(UnsupportedModelError, match=problem):
        SpeculativeModel.from_pretrained(target, write_head(tmp_path))
