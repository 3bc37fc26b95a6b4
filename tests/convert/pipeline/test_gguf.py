"""GGUF files for llama.cpp: keys, tokens, every tensor, and refusals."""

import contextlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from eagle_slim.convert import MismatchError, UnsupportedHeadError, VocabRequest, verify_artifact
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.convert.verify_cli import main as verify_command
from eagle_slim.vocab_tools.errors import UsageError
from support.conversion import BY_ID, by_map, convert, written
from support.heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKENS,
    VOCAB,
    eagle3_tensors,
    random,
    trained_ids,
    write_dflash,
    write_eagle1,
    write_eagle3,
    write_freq,
    write_target,
)
from support.raising import raises, raises_with
from support.small_tokenizers import byte_fallback_bpe, write_folder
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Markers and bytes, which every draft vocabulary keeps, and a few more.
IDS = [*range(259), 359, 300, 277]
ROWS = len(IDS)

_MLP_BIASES = {
    f"midlayer.mlp.{name}_proj.bias": random((size,), 1)
    for name, size in {"gate": 48, "up": 48, "down": HIDDEN}.items()
}


def slim(tmp_path: Path, target: Path, name: str = "slim", head: Path | None = None, **options) -> Path:
    options.setdefault("vocabulary", by_map(tmp_path, IDS))
    options.setdefault("gguf", ("bf16",))
    head = head or write_eagle3(tmp_path / f"head-{name}")
    return convert(head, **{"draft_vocab": ROWS, "target": target, "out": tmp_path / name, **options}).folder


def read(path: Path) -> tuple[dict, dict]:
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def floats(tensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def test_every_tensor_and_key(tmp_path, target):
    folder = slim(tmp_path, target)
    keys, tensors = read(folder / "model-bf16.gguf")
    stored = written(folder)
    plain = {
        "fc.weight": "fc.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
        "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
        "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }
    assert set(tensors) == {*plain.values(), "blk.0.attn_q.weight", "blk.0.attn_k.weight", "d2t"}
    for ours, theirs in plain.items():
        assert np.array_equal(floats(tensors[theirs]), stored[ours].float().numpy()), ours
        assert tensors[theirs].tensor_type.name == ("BF16" if stored[ours].ndim == 2 else "F32")
    # Of each head of 8 rows, 0 to 3 rotate with 4 to 7: llama.cpp has each pair together.
    for ours, theirs, heads in (("q", "blk.0.attn_q.weight", HEADS), ("k", "blk.0.attn_k.weight", KV_HEADS)):
        rows = stored[f"midlayer.self_attn.{ours}_proj.weight"].float().view(heads, HEAD_DIM, -1)
        expected = rows[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(heads * HEAD_DIM, -1)
        assert np.array_equal(floats(tensors[theirs]), expected.numpy())
    assert (tensors["d2t"].tensor_type.name, tensors["d2t"].data.tolist()) == ("I64", sorted(IDS))
    assert {key: value for key, value in keys.items() if key.startswith("eagle3.")} == {
        "eagle3.vocab_size": VOCAB,
        "eagle3.context_length": 2048,
        "eagle3.embedding_length": HIDDEN,
        "eagle3.block_count": 1,
        "eagle3.feed_forward_length": 48,
        "eagle3.attention.head_count": HEADS,
        "eagle3.attention.head_count_kv": KV_HEADS,
        "eagle3.attention.key_length": HEAD_DIM,
        "eagle3.attention.value_length": HEAD_DIM,
        "eagle3.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "eagle3.rope.dimension_count": HEAD_DIM,
        "eagle3.rope.freq_base": 10000.0,
        "eagle3.target_hidden_size": HIDDEN,
        "eagle3.norm_before_residual": False,
        "eagle3.norm_before_fc": False,
        "eagle3.target_layers": [2, LAYERS // 2, LAYERS - 3],
    }
    assert (keys["general.architecture"], keys["general.file_type"]) == ("eagle3", 32)


def test_tokens_are_the_targets(tmp_path, target):
    keys, _ = read(slim(tmp_path, target) / "model-bf16.gguf")
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
    vocab = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    tokens = keys["tokenizer.ggml.tokens"]
    assert tokens[:TOKENS] == sorted(vocab, key=vocab.__getitem__)
    assert tokens[TOKENS:] == [f"[PAD{index}]" for index in range(TOKENS, VOCAB)]
    assert keys["tokenizer.ggml.token_type"] == [3] * 3 + [1] * (TOKENS - 3) + [5] * (VOCAB - TOKENS)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.merges"]) == ("gpt2", merges)
    assert keys["tokenizer.ggml.eos_token_id"] == 2


def test_tokens_of_a_byte_fallback_tokenizer(tmp_path, target):
    other = write_folder(tmp_path / "other", byte_fallback_bpe(), unk_token="<unk>")
    config = json.loads((target / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 272}))
    head = write_eagle3(tmp_path / "head", tensors=eagle3_tensors(rows=272), vocab_size=272, draft_vocab_size=272)
    keys, tensors = read(slim(tmp_path, other, head=head, draft_vocab="full", vocabulary=BY_ID) / "model-bf16.gguf")
    assert "d2t" not in tensors
    assert tuple(tensors["output.weight"].shape) == (HIDDEN, 272)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 6]
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.scores"]) == 272


def test_what_a_head_may_have_besides(tmp_path, target):
    """A map of its own, other taps, a norm before fc, a residual after the norm, an embedding of its own width."""
    wide = write_target(tmp_path / "wide", hidden=64)
    tensors = eagle3_tensors(rows=200, target_hidden=64, input_norm=True, embedding=True)
    head = write_eagle3(
        tmp_path / "head",
        ids=trained_ids(),
        tensors=tensors,
        target_hidden_size=64,
        norm_before_residual=True,
        norm_before_fc=True,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    folder = slim(tmp_path, wide, head=head, draft_vocab=150, vocabulary=BY_ID, tap_layers=(1, 3, 8))
    keys, found = read(folder / "model-bf16.gguf")
    assert keys["eagle3.target_layers"] == [1, 3, 8]
    assert keys["eagle3.target_hidden_size"] == 64
    assert keys["eagle3.norm_before_residual"] is keys["eagle3.norm_before_fc"] is True
    assert (keys["eagle3.rope.scaling.type"], keys["eagle3.rope.scaling.factor"]) == ("linear", 4.0)
    assert np.array_equal(floats(found["enc.output_norm.weight"]), tensors["input_norm.weight"].float().numpy())
    assert np.array_equal(floats(found["token_embd.weight"]), tensors["embed_tokens.weight"].float().numpy())
    assert set(found["d2t"].data.tolist()) <= set(trained_ids().tolist())
    assert verify_artifact(folder, offline=True).ok


def test_llama3_scaling_is_that_of_transformers(tmp_path, target):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    head = write_eagle3(tmp_path / "head", rope_scaling=scaling)
    keys, tensors = read(slim(tmp_path, target, head=head) / "model-bf16.gguf")
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = tensors["rope_freqs.weight"].data
    assert np.allclose(plain / factors, scaled.numpy(), rtol=1e-5)
    assert 1.0 < factors[1] < factors[-1] == 8.0
    assert "eagle3.rope.scaling.type" not in keys


def wide(folder: Path, value: float = 1.0) -> Path:
    """A head whose rows are whole blocks of q8_0, with one value in its LM head."""
    tensors = eagle3_tensors(rows=VOCAB)
    for name in ("gate", "up", "down"):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = random((64, HIDDEN) if name != "down" else (HIDDEN, 64), 7)
    tensors["lm_head.weight"][IDS[5], 3] = value
    return write_eagle3(folder, tensors=tensors, intermediate_size=64)


@pytest.mark.parametrize(("kind", "error"), [("f16", 2e-3), ("f32", 0.0), ("q8_0", 0.03)])
def test_types_of_matrices(tmp_path, target, kind, error):
    folder = slim(tmp_path, target, head=wide(tmp_path / "head"), gguf=(kind,))
    keys, found = read(folder / f"model-{kind}.gguf")
    stored = written(folder)["lm_head.weight"].float().numpy()
    assert found["output.weight"].tensor_type.name == kind.upper()
    assert found["output_norm.weight"].tensor_type.name == "F32"
    assert np.abs(floats(found["output.weight"]) - stored).max() <= error
    assert keys["general.file_type"] == {"f16": 1, "f32": 0, "q8_0": 7}[kind]
    assert verify_artifact(folder, offline=True).ok


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensors": eagle3_tensors(rows=VOCAB, taps=4), "num_aux_hidden_states": 4}, "exactly 3"),
        ({"tensors": eagle3_tensors(rows=VOCAB, fc_norms=True), "fc_norm": True}, "fc_norm"),
        ({"extra": _MLP_BIASES}, "biases of the MLP"),
        ({"hidden_act": "gelu"}, "'gelu' is not read"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not written"),
        ({"norm_output": True}, "norm_output"),
    ],
)
def test_what_llama_cpp_cannot_serve_is_refused_with_the_reason(tmp_path, target, changes, words):
    head = write_eagle3(tmp_path / "head", **changes)
    taps = {"tap_layers": (1, 2, 3, 4)} if "num_aux_hidden_states" in changes else {}
    with raises(UnsupportedHeadError, option="--gguf") as caught:
        slim(tmp_path, target, head=head, **taps)
    assert words in str(caught.value)
    assert not (tmp_path / "slim").exists()


def test_refusals_of_other_kinds(tmp_path, target):
    with raises(UnsupportedHeadError, option="--gguf"):
        slim(tmp_path, target, head=write_eagle1(tmp_path / "eagle1"))
    with raises_with(UnsupportedHeadError, "docs/serving/dflash.md"):
        slim(tmp_path, target, head=write_dflash(tmp_path / "dflash", "z-lab"))
    with raises_with(MismatchError, "midlayer.mlp.down_proj.weight", "q8_0", "48"):
        slim(tmp_path, target, gguf=("q8_0",))
    with raises(UsageError, option="--gguf"):
        convert(
            write_eagle3(tmp_path / "alone"),
            draft_vocab=ROWS,
            gguf=("bf16",),
            out=tmp_path / "none",
            vocabulary=VocabRequest(token_map=tmp_path / "freq.pt"),
        )


@pytest.mark.parametrize(
    ("kind", "value", "is_refused"),
    # The largest float16 is 65504; a block of q8_0 stores 1/127 of its largest value as one.
    [("f16", 65280.0, False), ("f16", 65536.0, True), ("q8_0", 8290304.0, False), ("q8_0", 8323072.0, True)],
)
def test_a_value_too_large_for_the_type_is_refused(tmp_path, target, kind, value, is_refused):
    with raises_with(MismatchError, f"too large for {kind}") if is_refused else contextlib.nullcontext():
        slim(tmp_path, target, head=wide(tmp_path / "head", value), gguf=(kind,))
    assert (tmp_path / "slim").exists() != is_refused
    if not is_refused:
        _, found = read(tmp_path / "slim" / f"model-{kind}.gguf")
        assert np.isfinite(floats(found["output.weight"])).all()


def test_an_artifact_is_converted_at_its_own_size_into_a_new_folder(run, tmp_path, target):
    write_eagle3(tmp_path / "head")
    write_freq(tmp_path / "freq.pt", IDS)
    made = (convert_command, "head", "--draft-vocab", str(ROWS), "--token-map", "freq.pt", "--target", "target")
    code, out, _ = run(*made, "--out", "slim", "--gguf")
    assert code == 0
    assert "for llama.cpp         model-bf16.gguf" in out
    assert run(*made, "--out", "plain")[0] == 0
    code, out, _ = run(verify_command, "plain", "--for", "llama.cpp", "--offline")
    assert code == 1
    assert "--gguf" in out
    before = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert run(convert_command, "plain", "--gguf", "bf16", "--target", "target", "--out", "again")[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()} == before
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == before["model.safetensors"]
    (_, found), (_, expected) = (read(tmp_path / name / "model-bf16.gguf") for name in ("again", "slim"))
    assert {name: tensor.data.tolist() for name, tensor in found.items()} == {
        name: tensor.data.tolist() for name, tensor in expected.items()
    }
    assert run(verify_command, "again", "--for", "llama.cpp", "--offline")[0] == 0
    for arguments in (("plain", "--gguf", "f8"), ("--gguf", "./plain")):
        assert run(convert_command, *arguments)[0] == 2
