"""GGUF files of DFlash and DSpark drafts: keys and tensors in each form, what is refused, and the audit."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from eagle_slim.convert import MismatchError, UnsupportedHeadError, verify_artifact
from safetensors.torch import load_file
from support.conversion import by_map, convert
from support.heads import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MIDDLE, TOKENS, VOCAB, random

from support.heads import write_dflash, write_target  # isort: skip
from support.raising import raises
from support.tampering import sign_file

# Markers and bytes, which every draft vocabulary keeps, and a few more.
IDS = [*range(259), 359, 300, 277]
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output"}
NAMES |= {f"layers.{n}.{ours}": f"blk.{n}.{theirs}" for n in range(2) for ours, theirs in LAYER.items()}
CONFIDENCE = {"confidence_head.proj.weight": random((1, HIDDEN + 4), 9)}


def slim(tmp_path: Path, form: str = "z-lab", *, extra: dict | None = None, target: Path | None = None, **changes):
    """The artifact, with a GGUF file in bf16, of a draft with changes in its config.json."""
    draft = write_dflash(tmp_path / "draft", form, extra=extra, **changes)
    vocabulary = by_map(tmp_path, IDS)
    target = target or write_target(tmp_path / "target")
    out = tmp_path / "slim"
    return convert(draft, draft_vocab=len(IDS), vocabulary=vocabulary, target=target, out=out, gguf=("bf16",)).folder


def read(folder: Path) -> tuple[dict, dict]:
    reader = gguf.GGUFReader(folder / "model-bf16.gguf")
    keys = {key: field.contents() for key, field in reader.fields.items()}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_every_tensor_and_key_of_both_forms(tmp_path: Path, form: str) -> None:
    folder = slim(tmp_path, form)
    keys, tensors = read(folder)
    stored = load_file(folder / "model.safetensors")
    assert set(tensors) == {*(f"{theirs}.weight" for theirs in NAMES.values()), "d2t"}
    for ours, theirs in NAMES.items():
        tensor, expected = tensors[f"{theirs}.weight"], stored[f"{ours}.weight"].float().numpy()
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), expected), ours
        assert tensor.tensor_type.name == ("BF16" if expected.ndim == 2 else "F32")
    assert (tensors["d2t"].tensor_type.name, tensors["d2t"].data.tolist()) == ("I64", sorted(IDS))
    assert {key: value for key, value in keys.items() if key.startswith("dflash.")} == {
        "dflash.vocab_size": VOCAB,
        "dflash.context_length": 2048,
        "dflash.embedding_length": HIDDEN,
        "dflash.block_count": 2,
        "dflash.feed_forward_length": MIDDLE,
        "dflash.attention.head_count": HEADS,
        "dflash.attention.head_count_kv": KV_HEADS,
        "dflash.attention.key_length": HEAD_DIM,
        "dflash.attention.value_length": HEAD_DIM,
        "dflash.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "dflash.rope.dimension_count": HEAD_DIM,
        "dflash.rope.freq_base": 10000.0,
        "dflash.block_size": 4,
        "dflash.target_layers": [2, 4, 6],
    }
    assert keys["general.architecture"] == "dflash"
    assert keys["tokenizer.ggml.mask_token_id"] == TOKENS - 1
    assert len(keys["tokenizer.ggml.tokens"]) == VOCAB


def test_rope_as_transformers_5_writes_it_and_a_causal_block(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}
    keys, tensors = read(slim(tmp_path, rope_theta=..., rope_parameters=rope, is_causal=True))
    assert keys["dflash.rope.freq_base"] == 5e5
    assert keys["dflash.rope.dimension_count"] == HEAD_DIM // 2
    assert keys["dflash.attention.causal"] is True
    # Of 4 frequencies the half rotates, of which the second turns less than once in 64 tokens.
    assert tensors["rope_freqs.weight"].data.tolist() == [1.0, 8.0, 1.0, 1.0]


@pytest.mark.parametrize(("changes", "from_anchor"), [({}, True), ({"sample_from_anchor": False}, False)])
def test_the_heads_of_dspark(tmp_path: Path, changes: dict, from_anchor: bool) -> None:
    folder = slim(tmp_path, "dspark", extra=CONFIDENCE, confidence_head_with_markov=True, **changes)
    keys, tensors = read(folder)
    stored = load_file(folder / "model.safetensors")
    shapes = {"markov_w1": (4, VOCAB), "markov_w2": (4, len(IDS)), "conf_proj": (HIDDEN + 4, 1)}
    for theirs, ours in zip(
        shapes, ("markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"), strict=True
    ):
        tensor = tensors[f"{theirs}.weight"]
        assert tuple(tensor.shape) == shapes[theirs]
        expected = stored[f"{ours}.weight"].float().numpy()
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), expected)
    assert tensors["conf_proj.bias"].data.tolist() == stored["confidence_head.proj.bias"].float().tolist()
    assert keys["dflash.sample_from_anchor"] is from_anchor
    assert keys["dflash.has_confidence_head"] is True
    assert verify_artifact(folder, offline=True, engines=["llama.cpp"], engine_version="b11434").ok


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("z-lab", {"extra": {"layers.1.self_attn.q_proj.bias": random((HEADS * HEAD_DIM,), 3)}}, "biases of attention"),
        ("z-lab", {"extra": {"layers.0.self_attn.attention_sink_bias": random((HEADS,), 3)}}, "attention sinks"),
        ("z-lab", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "windowed"),
        ("z-lab", {"hidden_act": "gelu"}, "'gelu' is not written"),
        ("z-lab", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not written"),
        ("z-lab", {"is_neox_style": False}, "interleaved rotation"),
        ("dspark", {}, "confidence head"),
    ],
)
def test_what_llama_cpp_cannot_serve_is_refused_with_the_reason(tmp_path: Path, form: str, changes, words: str) -> None:
    with raises(UnsupportedHeadError, option="--gguf") as caught:
        slim(tmp_path, form, **changes)
    assert words in str(caught.value)
    assert not (tmp_path / "slim").exists()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("rope_theta", {"rope_theta": ...}),
        ("block_size", {"block_size": 1}),
        ("mask_token_id", {"dflash_config": {"target_layer_ids": [1, 3, 5]}}),
        ("mask_token_id", {"dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": VOCAB}}),
        ("target_layer_ids", {"dflash_config": {"mask_token_id": 7}}),
    ],
)
def test_what_config_json_must_say(tmp_path: Path, key: str, changes: dict) -> None:
    with raises(MismatchError, key=key):
        slim(tmp_path, **changes)
    assert not (tmp_path / "slim").exists()


def test_an_embedding_that_the_target_scales_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "gemma")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    with raises(UnsupportedHeadError, option="--gguf", found="gemma3_text"):
        slim(tmp_path, target=target)


def test_verify_compares_the_mask_and_the_map(tmp_path: Path) -> None:
    folder = slim(tmp_path)
    path = folder / "model-bf16.gguf"
    reader = gguf.GGUFReader(path, "r+")
    reader.fields["tokenizer.ggml.mask_token_id"].parts[-1][0] = 3
    (d2t,) = [tensor for tensor in reader.tensors if tensor.name == "d2t"]
    d2t.data[:] = np.roll(d2t.data, 1)
    reader.data.flush()
    del reader
    sign_file(folder, path.name)
    check = verify_artifact(folder, offline=True)[path.name]
    assert check.status == "failed"
    assert "mask_token_id is 3" in check.detail
    assert "d2t differs" in check.detail
