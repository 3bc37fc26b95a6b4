"""Opening heads: every spelling is one head, and what is not such a head is refused by name."""

import itertools
import json

import numpy as np
import pytest
import torch
from eagle_slim.convert import CheckpointError, MismatchError, UnsupportedHeadError, open_head, verify_artifact
from eagle_slim.convert.engines import HeadFacts, head_findings
from eagle_slim.convert.heads.config import quantisation, sliding_window
from eagle_slim.convert.heads.taps import AUX_LAYER_KEY
from eagle_slim.convert.slim.tensors import config_of
from eagle_slim.runtime.drafter.rope import rotary_embedding
from safetensors.torch import load_file, save_file
from support import heads
from support.conversion import convert
from support.heads import HIDDEN, VOCAB, eagle3_tensors, trained_ids, write_dflash, write_eagle1, write_eagle3
from support.raising import raises_with
from transformers import AutoConfig


@pytest.mark.parametrize("spelling", ["midlayer", "layers.0", "model.layers.0", "midlayer.0", "speculators"])
@pytest.mark.parametrize("container", ["safetensors", "bin", "sharded"])
def test_every_spelling_and_container_is_one_head(tmp_path, spelling, container):
    ids = trained_ids()
    head = open_head(write_eagle3(tmp_path / "head", ids=ids, spelling=spelling, container=container))
    expected = eagle3_tensors(rows=len(ids))
    assert head.kind == "eagle3"
    assert set(head.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(head.tensors.get(name), tensor), name
    assert torch.equal(head.tensors.rows("lm_head.weight", np.array([7, 3])), expected["lm_head.weight"][[7, 3]])
    assert head.draft_ids_to_target.tolist() == ids.tolist()
    assert (head.target_vocab, head.draft_vocab, head.hidden_size) == (VOCAB, len(ids), HIDDEN)
    assert head.config["model_type"] == "llama"
    assert head.config["num_attention_heads"] == 4


def test_speculators_defaults_are_made_explicit(tmp_path):
    head = open_head(write_eagle3(tmp_path / "head", spelling="speculators"))
    assert head.config["norm_before_residual"] is True
    assert head.target_name == "org/target"
    assert "transformer_layer_config" not in head.config
    kept = open_head(write_eagle3(tmp_path / "kept", spelling="speculators", norm_before_residual=False))
    assert kept.config["norm_before_residual"] is False
    flat = open_head(write_eagle3(tmp_path / "flat"))
    assert "norm_before_residual" not in flat.config


def test_a_null_outside_gives_way_to_the_value_inside(tmp_path):
    inside = {"rope_theta": 5e5, "rms_norm_eps": 1e-4}
    head = open_head(write_eagle3(tmp_path / "head", text_config=inside, **dict.fromkeys(inside)))
    assert {key: head.config[key] for key in inside} == inside


def test_maps_of_both_widths_sorted_or_not(tmp_path):
    for d2t_dtype, ascending, t2d in itertools.product((torch.int32, torch.int64), (True, False), (True, False)):
        ids = trained_ids(ascending=ascending)
        head = open_head(write_eagle3(tmp_path / "head", ids=ids, d2t_dtype=d2t_dtype, t2d=t2d))
        assert head.draft_ids_to_target.tolist() == ids.tolist()
        assert any("ascending" in warning for warning in head.warnings) == (not ascending)


def test_absolute_map_is_refused_unless_said(tmp_path):
    ids = trained_ids()
    folder = write_eagle3(tmp_path / "head", ids=ids, d2t="absolute")
    with pytest.raises(MismatchError, match="--d2t-form absolute"):
        open_head(folder)
    assert open_head(folder, d2t_form="absolute").draft_ids_to_target.tolist() == ids.tolist()


@pytest.mark.parametrize("stated", [..., None, VOCAB])
def test_no_lm_head_means_the_targets(tmp_path, stated):
    head = open_head(write_eagle3(tmp_path / "head", lm_head=False, draft_vocab_size=stated))
    assert not head.has_lm_head
    assert head.draft_vocab == VOCAB


def test_own_embedding_of_another_width(tmp_path):
    tensors = eagle3_tensors(rows=VOCAB, target_hidden=48, embedding=True)
    head = open_head(write_eagle3(tmp_path / "head", tensors=tensors, target_hidden_size=48))
    assert (head.hidden_size, head.target_hidden_size) == (HIDDEN, 48)
    del tensors["embed_tokens.weight"]
    with raises_with(MismatchError, "embed_tokens.weight"):
        open_head(write_eagle3(tmp_path / "without", tensors=tensors, target_hidden_size=48))
    trained = open_head(write_eagle3(tmp_path / "trained", embed_requires_grad=True))
    assert any("the file has none" in warning for warning in trained.warnings)


def test_last_hidden_state_only(tmp_path):
    tensors = eagle3_tensors(rows=VOCAB)
    del tensors["fc.weight"]
    head = open_head(write_eagle3(tmp_path / "head", tensors=tensors, eagle_config={"use_aux_hidden_state": False}))
    assert head.tap_layers == ()


ATTENTION = "midlayer.self_attn"
Q_BIAS = {f"{ATTENTION}.q_proj.bias": heads.random((HIDDEN,), 1)}
WHOLE = ("embed_tokens", "norm", "layers.0.self_attn.q_proj", "layers.0.self_attn.q_norm")
WHOLE_MODEL = {f"model.{name}.weight": torch.ones(4, 4) for name in WHOLE}
PLAIN_ROPE = {"rope_theta": 1e6, "rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SECTIONS = {"rope_type": "default", "mrope_section": [16, 24, 24]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
AT_5E5, AT_1E6 = {"rope_theta": 5e5}, {"rope_theta": 1e6, "rope_scaling": None}
BY_KIND = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
NEUTRAL = {"residual_multiplier": 1, "attn_logit_softcapping": None, "no_rope_layers": [1, 0], "alibi": False}
NEUTRAL |= {"attention_multiplier": heads.HEAD_DIM**-0.5, "query_pre_attn_scalar": heads.HEAD_DIM}
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "mlp_bias": False, "rope_theta": 1e4}
DEFAULTS["intermediate_size"] = heads.MIDDLE
LLAMA4 = {"model_type": "llama4_text", "intermediate_size": 16, "intermediate_size_mlp": heads.MIDDLE}
SLIDING = ["sliding_attention", "full_attention"]
WINDOWED, HALF = {"layer_types": SLIDING[:1], "sliding_window": 16}, {"partial_rotary_factor": 0.5}
NORMED = "return_hidden_post_norm"
TAP_NORMS = eagle3_tensors(rows=VOCAB, fc_norms=True)
INPUT_NORM = {"tensors": eagle3_tensors(rows=VOCAB, input_norm=True), "norm_before_fc": True}
BEFORE_FC = {"norm_before_fc": True, "eagle_config": {"norm_before_fc": True}}


def test_a_configuration_is_rewritten_as_engines_read_it(tmp_path):
    for changes, expected in (
        (dict.fromkeys(DEFAULTS), DEFAULTS),
        ({"num_hidden_layers": 40}, {"num_hidden_layers": 1}),
        # Llama 4 names the width of its dense layers apart.
        (LLAMA4, {"intermediate_size": heads.MIDDLE, "intermediate_size_mlp": ...}),
        # SGLang would take an empty list in eagle_config to mean that no layer is captured.
        ({AUX_LAYER_KEY: []}, {AUX_LAYER_KEY: ..., "eagle_config": ...}),
        ({"eagle_config": {AUX_LAYER_KEY: [], "more": 1}}, {AUX_LAYER_KEY: ..., "eagle_config": {"more": 1}}),
        # Rotations as transformers reads them.
        ({"rope_theta": ..., "rope_parameters": AT_5E5 | LLAMA3}, AT_5E5 | {"rope_scaling": LLAMA3}),
        ({"rope_theta": 1e4, "rope_parameters": PLAIN_ROPE}, AT_1E6),
        ({"rope_theta": ..., "rope_scaling": PLAIN_ROPE}, AT_1E6),
        (AT_5E5 | {"rope_scaling": LINEAR}, AT_5E5 | {"rope_scaling": LINEAR}),
        (NEUTRAL, NEUTRAL),
        ({"rope_theta": ..., "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, AT_1E6),
        ({**WINDOWED, "rope_parameters": BY_KIND}, {"rope_theta": 2e4, "rope_scaling": None}),
        ({"rope_parameters": PLAIN_ROPE | HALF}, {**HALF, "rope_scaling": None}),
        ({"rope_parameters": {"rope_theta": 1e6, **SECTIONS}}, {"rope_theta": 1e6, "rope_scaling": SECTIONS}),
        # Flags of norms stand where engines read them.
        ({"eagle_config": {"norm_before_residual": True}}, {"norm_before_residual": True}),
        ({"eagle_config": {"norm_output": True}}, {"norm_output": True}),
        ({"eagle_config": {NORMED: True}}, {"norm_output": True, "eagle_config": {NORMED: True}}),
        ({NORMED: True, "norm_output": False}, {"norm_output": True}),
        ({"tensors": TAP_NORMS, "use_aux_norm": True}, {"fc_norm": True}),
        ({"tensors": TAP_NORMS, "eagle_config": {"fc_norm": True}}, {"fc_norm": True}),
        ({**INPUT_NORM, "eagle_config": {"norm_before_fc": False}}, BEFORE_FC),
        (INPUT_NORM, BEFORE_FC),
    ):
        head = open_head(write_eagle3(tmp_path / "head", **changes))
        assert {key: head.config.get(key, ...) for key in expected} == expected
        assert any("40" in warning for warning in head.warnings) == ("num_hidden_layers" in changes)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"layer_types": SLIDING[:1], "sliding_window": 16}, 16),
        ({"layer_types": SLIDING, "sliding_window": 16, "use_sliding_window": True}, 16),
        ({"layer_types": SLIDING[::-1], "sliding_window": 16, "use_sliding_window": True}, None),
        ({"layer_types": [], "sliding_window": 16}, None),
        ({"layer_types": ["chunked_attention", "full_attention"], "sliding_window": 16}, None),
        ({"sliding_window": 16}, None),
        ({"sliding_window": 16, "use_sliding_window": True}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, None),
    ],
)
@pytest.mark.parametrize("spelling", ["midlayer", "speculators"])
def test_the_layers_window_stands_where_vllm_reads_it(tmp_path, changes, window, spelling):
    config = open_head(write_eagle3(tmp_path / "head", spelling=spelling, **changes)).config
    assert sliding_window(config) == window
    assert bool(config.get("layer_types")) == (window is not None)
    if window is not None:
        assert config["layer_types"] == ["sliding_attention"]
        assert (config["sliding_window"], config["use_sliding_window"]) == (16, True)
    # transformers, and with it vLLM, has layer types by model: Qwen's own, any other's from the file.
    for name in ("llama", "qwen3"):
        read = AutoConfig.for_model(**{**config, "model_type": name})
        types = getattr(read, "layer_types", None)
        assert (read.sliding_window if types == ["sliding_attention"] else None) == window


@pytest.mark.parametrize("write", [write_eagle3, write_eagle1])
def test_sizes_in_a_text_config(tmp_path, write):
    plain = convert(write(tmp_path / "plain"), draft_vocab="full", out=tmp_path / "a").folder
    config = heads.config_of(write(tmp_path / "head"))
    outer = ("architectures", "draft_vocab_size", "torch_dtype", "bias")
    nested = {key: value for key, value in config.items() if key not in outer}
    nested |= {"model_type": "qwen2_5_vl_text", "rope_theta": 5e5}
    kept = {key: config[key] for key in outer if key in config}
    vision = {"vision_config": {"hidden_size": 7}, "model_type": "qwen2_5_vl"}
    heads.write_json(tmp_path / "head" / "config.json", {**kept, **vision, "text_config": nested})
    done = convert(tmp_path / "head", draft_vocab="full", out=tmp_path / "b")
    found, expected = map(heads.config_of, (done.folder, plain))
    assert found == {**expected, "rope_theta": 5e5}
    assert verify_artifact(done.folder, head=tmp_path / "head").ok


def test_eagle1_without_the_lm_head_that_it_may_store(tmp_path):
    stored = {"lm_head.weight": heads.random((VOCAB, HIDDEN), 9)}
    head = open_head(write_eagle1(tmp_path / "head", container="bin", extra=stored))
    assert (head.kind, head.draft_ids_to_target) == ("eagle", None)
    assert "layers.0.mlp.up_proj.weight" in head.tensors
    assert "lm_head.weight" not in head.tensors
    assert "vLLM" in head.dropped["lm_head.weight"]


def test_eagle1_that_is_not_what_its_configuration_says(tmp_path):
    for arguments, words in (
        ({"num_key_value_heads": 4}, ("layers.0.self_attn.k_proj.weight", "[32, 32]")),
        ({"qkv_bias": True}, ("attention_bias",)),
        ({"extra": {"layers.0.self_attn.o_proj.bias": ones(32)}, "attention_bias": None}, ("self_attn.o_proj.bias",)),
        ({"extra": {"layers.0.mlp.down_proj.bias": ones(32)}, "mlp_bias": False}, ("mlp_bias", "mlp.down_proj.bias")),
    ):
        with raises_with(MismatchError, *words):
            open_head(write_eagle1(tmp_path / "head", **arguments))


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bfloat16)


def test_every_layer_of_eagle1_is_checked(tmp_path):
    second = {name: ones(*shape) for name, shape in heads.layer_shapes("layers.1.", HIDDEN).items()}
    second |= {f"layers.1.{name}_layernorm.weight": ones(HIDDEN) for name in ("input", "post_attention")}
    two = open_head(write_eagle1(tmp_path / "two", extra=second, num_hidden_layers=...))
    assert two.config["num_hidden_layers"] == 2
    with raises_with(MismatchError, "layers.1.mlp.up_proj.weight", "[3, 4]"):
        open_head(write_eagle1(tmp_path / "wrong", extra=second | {"layers.1.mlp.up_proj.weight": ones(3, 4)}))


@pytest.mark.parametrize("own", [False, True])
def test_a_tensor_that_the_index_has_not_in_its_shard_is_refused(tmp_path, own):
    head = write_eagle3(tmp_path / "head", lm_head=own, container="sharded")
    placed = json.loads((head / "model.safetensors.index.json").read_text())["weight_map"].get("lm_head.weight")
    shard = next(path for path in sorted(head.glob("*.safetensors")) if path.name != placed)
    save_file(load_file(shard) | {"lm_head.weight": ones(VOCAB, HIDDEN)}, shard)
    with raises_with(CheckpointError, shard.name, "lm_head.weight"):
        open_head(head)


@pytest.mark.parametrize("container", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("other", ["model.bin", "head.safetensors", "model-00003-of-00003.safetensors"])
def test_weights_that_are_not_read_beside_a_head_are_named(tmp_path, container, other):
    head = write_eagle3(tmp_path / "head", container=container)
    for name in ("optimizer.pt", "training_args.bin", "freq_8.pt", "d2t.pt", "training_state.pt", other):
        (head / name).touch()
    assert [warning.startswith(f"{other}: not read") for warning in open_head(head).warnings] == [True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"residual_multiplier": 0.22, "logit_scale": 1}, "residual_multiplier = 0.22:"),
        ({"attention_multiplier": 1.0}, "attention_multiplier = 1.0:"),
        ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0:"),
        ({"scale_emb": 10**400}, "scale_emb = 1000"),
        ({"attn_logit_softcapping": 50.0, "scale_emb": 12}, "scale_emb = 12, attn_logit_softcapping = 50.0:"),
        ({"no_rope_layers": [0, 1]}, "no_rope_layers = [0, 1]:"),
    ],
)
@pytest.mark.parametrize("write", [write_eagle3, write_eagle1, write_dflash])
def test_what_no_draft_of_an_engine_computes_is_told(tmp_path, write, changes, said):
    (warning,) = open_head(write(tmp_path / "head", **changes)).warnings
    assert warning.startswith(said)


TIED = eagle3_tensors(rows=None, embedding=True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"extra": {f"{ATTENTION}.kv_b_proj.weight": ones(4, 4)}}, UnsupportedHeadError, ["kv_b_proj.weight"]),
        ({"extra": {"layers.1.mlp.up_proj.weight": ones(4, 4)}}, UnsupportedHeadError, ["several layers"]),
        ({"extra": {"surprise": ones(3)}}, UnsupportedHeadError, ["surprise"]),
        ({"extra": {"lm_head.weight_scale": ones(1)}}, UnsupportedHeadError, ["weight_scale", "a quantised head"]),
        ({"extra": {"fc.bias": ones(HIDDEN)}}, UnsupportedHeadError, ["fc.bias"]),
        # Of bfloat16's two bytes the lower one is 0.
        ({"extra": {"fc.bias": 2 * ones(HIDDEN)}}, UnsupportedHeadError, ["fc.bias"]),
        ({"extra": {f"{ATTENTION}.q_norm.weight": ones(8)}}, CheckpointError, [f"{ATTENTION}.k_norm.weight"]),
        ({"extra": {"layers.0.hidden_norm.weight": ones(HIDDEN)}}, CheckpointError, ["midlayer.hidden_norm.weight"]),
        ({"vocab_size": VOCAB + 1}, MismatchError, ["vocab_size", "385"]),
        ({"draft_vocab_size": 199}, MismatchError, ["d2t"]),
        ({"intermediate_size": 47}, MismatchError, ["gate_proj", "47"]),
        ({"num_attention_heads": 2}, MismatchError, [f"{ATTENTION}.q_proj.weight", "[32, 64]"]),
        ({"vocab_size": True}, MismatchError, ["vocab_size", "True"]),
        ({"text_config": [1]}, MismatchError, ["text_config"]),
        ({"eagle_config": [1], "spelling": "speculators"}, MismatchError, ["eagle_config"]),
        ({"scalar": "fc.weight"}, MismatchError, ["fc.weight", "a scalar"]),
        ({"scalar": "lm_head.weight"}, MismatchError, ["lm_head.weight", "a scalar"]),
        ({"rope_scaling": "yarn"}, MismatchError, ["rope_scaling", "yarn"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, MismatchError, ["rope_scaling.factor", "0"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, MismatchError, ["low_freq_factor", "None"]),
        ({"rope_scaling": {"rope_type": "unheard"}}, MismatchError, ["rope_scaling.rope_type", "unheard"]),
        ({"partial_rotary_factor": 0.4}, MismatchError, ["partial_rotary_factor", "0.4"]),
        ({"partial_rotary_factor": 1.5}, MismatchError, ["partial_rotary_factor", "1.5"]),
        ({"rope_parameters": BY_KIND}, MismatchError, ["full_attention", "sliding_attention"]),
        ({"rope_parameters": {**BY_KIND, "rope_theta": 1e4}}, MismatchError, ["rope_parameters", "rope_theta"]),
        ({"rope_parameters": BY_KIND, "layer_types": ["chunked_attention"]}, MismatchError, ["layer_types"]),
        ({"rope_parameters": PLAIN_ROPE, "rope_scaling": LINEAR}, MismatchError, ["rope_scaling", "linear"]),
        ({"rope_theta": 10**400}, MismatchError, ["rope_theta"]),
        ({"hidden_act": 3}, MismatchError, ["hidden_act", "3"]),
        ({"norm_before_residual": "false"}, MismatchError, ["norm_before_residual", "'false'"]),
        ({"layer_types": True}, MismatchError, ["layer_types", "True"]),
        ({"layer_types": ["sliding_attention"]}, MismatchError, ["sliding_window"]),
        ({**WINDOWED, "use_sliding_window": False}, MismatchError, ["use_sliding_window"]),
        ({"max_position_embeddings": 2**31}, MismatchError, ["max_position_embeddings", "below 2^31"]),
        ({"fc_norm": True}, MismatchError, ["fc_norm", "true"]),
        (
            {"tensors": TAP_NORMS, "drop": "fc_norm.1.weight", "ids": None},
            MismatchError,
            ["expected fc_norm.0 to fc_norm.2"],
        ),
        ({"extra": Q_BIAS}, MismatchError, ["attention_bias", *Q_BIAS]),
        ({"extra": Q_BIAS, "attention_bias": None}, MismatchError, [*Q_BIAS]),
        ({"d2t": None}, MismatchError, ["d2t"]),
        ({"d2t": None, "t2d": False}, MismatchError, ["lm_head.weight"]),
        ({"ids": None, "tensors": eagle3_tensors(rows=448)}, MismatchError, ["448 rows", f"vocab_size is {VOCAB}"]),
        ({"tensors": TIED, "tie_word_embeddings": True}, MismatchError, ["without lm_head.weight"]),
        ({"num_aux_hidden_states": 4}, MismatchError, ["num_aux_hidden_states: expected 3", "found 4"]),
        ({"lm_head": False}, MismatchError, ["d2t"]),
        ({"lm_head": False, "d2t": None, "t2d": False}, MismatchError, ["lm_head.weight"]),
        ({"drop": "norm.weight"}, CheckpointError, ["norm.weight"]),
        ({"spelling": "layers.0", "drop": "midlayer.hidden_norm.weight"}, CheckpointError, ["hidden_norm.weight"]),
        ({"stored": torch.float8_e4m3fn}, UnsupportedHeadError, ["fc.weight", "float8_e4m3fn"]),
    ],
)
def test_refused(tmp_path, arguments, error, words):
    """`drop`: a tensor that is missing; `stored`: the dtype of one; `scalar`: one without a dimension."""
    arguments = {"ids": trained_ids(), **arguments}
    dropped, dtype, scalar = (arguments.pop(name, None) for name in ("drop", "stored", "scalar"))
    if dropped or dtype or scalar:
        tensors = dict(arguments.get("tensors", eagle3_tensors(rows=200)))
        tensors.pop(dropped, None)
        tensors |= {scalar: torch.zeros((), dtype=torch.bfloat16)} if scalar else {}
        arguments["tensors"] = tensors | ({"fc.weight": tensors["fc.weight"].to(dtype)} if dtype else {})
    folder = write_eagle3(tmp_path / "head", **arguments)
    with raises_with(error, *words):
        open_head(folder)


@pytest.mark.parametrize(
    ("tensors", "config", "found", "advice"),
    [
        ({"odd": ones(1)}, {"architectures": ["MedusaModel"]}, "a Medusa head", '"method": "medusa"'),
        ({"0.0.linear.weight": ones(4, 4)}, {}, "a Medusa head", '"method": "medusa"'),
        ({"odd": ones(1)}, {"model_type": "mlp_speculator"}, "an MLP speculator", "none of vLLM 0.32.0"),
        ({"speculator.emb.0.weight": ones(4, 4)}, {}, "an MLP speculator", "none of vLLM"),
        ({"odd": ones(1)}, {"speculators_model_type": "peagle"}, "a P-EAGLE head", '"parallel_drafting": true'),
        ({"mask_hidden": ones(1, 4)}, {"architectures": ["LlamaForCausalLM"]}, "a P-EAGLE head", "vLLM"),
        ({"odd": ones(1)}, {"architectures": ["DFlash2DraftModel"]}, "a DFlash draft", "knows its class"),
        ({"odd": ones(1)}, {"architectures": ["K3DSparkModel"]}, "a DSpark draft", "knows its class"),
        ({"odd": ones(1)}, {"architectures": ["DeepSeekMTPModel"]}, "a multi-token-prediction", '"method": "mtp"'),
        ({"model.layers.0.enorm.weight": ones(4)}, {}, "a multi-token-prediction", "or llama.cpp b11434"),
        ({"mtp.fc.weight": ones(4, 4)}, {}, "a multi-token-prediction", "with fewer rows in SGLang 0.5.23"),
        (WHOLE_MODEL, {"architectures": ["Qwen2ForCausalLM"]}, "a whole language model", '"method": "draft_model"'),
    ],
)
def test_other_drafts_are_named_in_one_line_with_what_to_do(tmp_path, tensors, config, found, advice):
    folder = write_eagle3(tmp_path / "draft", tensors=tensors, **config)
    with pytest.raises(UnsupportedHeadError) as refused:
        open_head(folder)
    text = str(refused.value)
    assert text.startswith(f"{folder}: this is {found}")
    assert advice in text
    assert "\n" not in text


def test_an_old_configuration_of_vllm_keeps_the_head_in_a_part(tmp_path):
    folder = write_eagle1(tmp_path / "head")
    flat = heads.config_of(folder)
    heads.write_json(folder / "config.json", {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": flat})
    assert open_head(folder).config == open_head(write_eagle1(tmp_path / "flat")).config


def test_hunyuans_dynamic_rotation_is_another_than_transformers(tmp_path):
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    head = open_head(write_eagle3(tmp_path / "head", rope_scaling=scaling))
    (found,) = [each for each in head_findings(HeadFacts.of(head), "safeailab") if "rope_scaling" in each.problem]
    assert "'dynamic with alpha'" in found.problem
    # Two of four frequencies by hand: the base is 10000 * 1000 ** (8 / 6) = 1e8, and 1e8 ** (-2 / 8) = 0.01.
    frequencies = rotary_embedding(head.config).inverse_frequencies
    assert frequencies.tolist() == pytest.approx([1.0, 0.01, 1e-4, 1e-6], rel=1e-5)
    with raises_with(MismatchError, "rope_scaling.alpha"):
        open_head(write_eagle3(tmp_path / "wrong", rope_scaling={**scaling, "alpha": "large"}))


def test_a_quantisation_of_nothing_is_none():
    for nothing in (
        {"quant_method": "modelopt", "quant_algo": None, "exclude_modules": ["lm_head"]},
        {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": None, "targets": ["Linear"]}}},
        {"quant_method": "x", "config_groups": {"g": {"weights": {"num_bits": 8}}}, "ignore": ["re:.*"]},
        {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quantization": {"quant_algo": "NO_QUANT"}, "producer": {"name": "modelopt"}},
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False, "bnb_4bit_quant_type": "fp4"},
        {"quant_method": "gptq", "bits": 16},
        {"modules_to_not_convert": ["lm_head"]},
    ):
        assert quantisation(nothing) is None


@pytest.mark.parametrize("place", ["", "text_config", "eagle_config", "speculators", "dflash-speculators"])
def test_a_quantisation_is_seen_wherever_it_stands(tmp_path, place):
    folder, nothing = tmp_path / "head", {"quant_method": "gptq", "bits": 16}
    if place.startswith("dflash"):
        heads.write_dflash(folder, "speculators")
    else:
        write_eagle3(folder, spelling="speculators" if place == "speculators" else "midlayer")
    key = "transformer_layer_config" if "speculators" in place else place
    config = heads.config_of(folder)
    part = config.setdefault(key, {}) if key else config
    part["quantization_config"] = nothing
    heads.write_json(folder / "config.json", config)
    head = open_head(folder)
    written = config_of(head, 100, "default") if head.kind == "dflash" else head.config
    assert "quantization_config" not in {**written, **written.get("transformer_layer_config", {})}
    part["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    heads.write_json(folder / "config.json", config)
    with raises_with(UnsupportedHeadError, "fp8"):
        open_head(folder)


def test_null_quantisation_file_is_no_quantisation(tmp_path):
    folder = write_eagle3(tmp_path / "head")
    heads.write_json(folder / "hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": None}})
    open_head(folder)
    heads.write_json(folder / "hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}})
    with raises_with(UnsupportedHeadError, "FP8"):
        open_head(folder)


def test_map_of_zeros_is_doubted_where_nothing_confirms_it(tmp_path):
    for t2d, form, doubted in ((False, "auto", True), (True, "auto", False), (False, "offset", False)):
        head = open_head(write_eagle3(tmp_path / "head", ids=np.arange(50), t2d=t2d), d2t_form=form)
        assert head.draft_ids_to_target.tolist() == list(range(50))
        assert any("whose map was never set" in warning for warning in head.warnings) == doubted
