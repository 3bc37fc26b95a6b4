"""Conversion: rows bit for bit, maps composed, configuration, repeatability, and every refusal."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert import Artifact, VocabRequest, open_head, pipeline, plan_conversion, verify_artifact
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.convert.errors import CheckpointError, MismatchError, OutputExistsError, SourceError
from eagle_slim.convert.options import ConvertOptions
from eagle_slim.convert.targets.model import open_tokenizer
from eagle_slim.vocab_tools import TokenCounts, TokenizerError, UsageError, load_tokenizer, rank_vocabulary
from eagle_slim.vocab_tools.sources import parse_source
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import heads
from support.conversion import BY_ID, by_map, convert, convert_all, written
from support.heads import (
    HIDDEN,
    TOKENS,
    VOCAB,
    config_of,
    eagle3_tensors,
    random,
    write_eagle1,
    write_eagle3,
    write_target,
)
from support.raising import raises, raises_with
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tampering import change_manifest
from support.token_counts import source as source_counts
from support.token_counts import token_counts

RANKED = [2, 0, 1, 300, 17, 44, 4, 359, 100, 9]
PADDED, UNFORCED = [*range(300), TOKENS + 3, VOCAB - 1], [0, 1, *range(100, 340)]


def target_ids(tensors) -> np.ndarray:
    return (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).numpy()


def audited(tmp_path, head, target=None):
    """The head cut to the first eight of RANKED, or with a target to 320 ids in their order, and audited."""
    request = {"draft_vocab": 8, "vocabulary": by_map(tmp_path, RANKED)}
    if target is not None:
        request = {"draft_vocab": 320, "vocabulary": BY_ID, "target": target}
    done = convert(head, **request, out=tmp_path / "out")
    assert verify_artifact(done.folder, head=head, target=target).ok
    return done


@pytest.mark.parametrize("container", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_own_full_head(tmp_path, container, dtype):
    head = write_eagle3(tmp_path / "head", container=container, dtype=dtype, spelling="layers.0")
    done = audited(tmp_path, head)
    tensors, source = written(done.folder), eagle3_tensors(rows=VOCAB, dtype=dtype)
    ids = sorted(RANKED[:8])
    assert target_ids(tensors).tolist() == ids
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == ids
    assert torch.equal(tensors["lm_head.weight"], source["lm_head.weight"][ids])
    assert set(tensors) == set(source) | {"d2t", "t2d"}
    for name in set(source) - {"lm_head.weight"}:
        assert torch.equal(tensors[name], source[name]), name
        assert tensors[name].dtype == dtype
    with safe_open(done.folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert Artifact.load(done.folder).manifest.rank_order_ids.tolist() == RANKED[:8]
    assert torch.load(done.folder / "freq_8.pt", weights_only=True) == RANKED[:8]
    assert (done.head.draft_vocab, done.manifest.draft_vocab) == (VOCAB, 8)
    assert done.bytes_before - done.bytes_after == (VOCAB - 8) * HIDDEN * dtype.itemsize


def test_config_has_what_engines_demand(tmp_path):
    kept = {"rope_theta": 5e5, "norm_output": True, "custom": [1, {"kept": True}]}
    odd = {"architectures": ["Eagle3LlamaForCausalLM"], "bias": False, "torch_dtype": "float32", "head_dim": None}
    odd |= {"target_hidden_size": HIDDEN, "tie_word_embeddings": True, "num_hidden_layers": 40}
    head = write_eagle3(tmp_path / "head", **kept, **odd, _name_or_path="/home/someone")
    done = convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "out")
    expected = heads.eagle3_config() | kept | {"draft_vocab_size": 8, "rope_scaling": None, "mlp_bias": False}
    assert config_of(done.folder) == expected
    other = convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "lm", flavour="lmdeploy")
    assert config_of(other.folder) == expected | {"architectures": ["LlamaForCausalLM"]}
    assert written(other.folder).keys() == written(done.folder).keys()
    assert verify_artifact(other.folder).ok


def test_map_composed_with_map(tmp_path):
    old = heads.trained_ids(120, ascending=False)
    head = write_eagle3(tmp_path / "head", ids=old, d2t_dtype=torch.int32)
    chosen = [int(token_id) for token_id in np.random.default_rng(0).permutation(old)[:64]]
    done = convert(head, draft_vocab=64, vocabulary=by_map(tmp_path, chosen), out=tmp_path / "out")
    tensors, rows = written(done.folder), [old.tolist().index(token) for token in sorted(chosen)]
    assert torch.equal(tensors["lm_head.weight"], eagle3_tensors(rows=120)["lm_head.weight"][rows])
    assert target_ids(tensors).tolist() == sorted(chosen)
    assert verify_artifact(done.folder, head=head).ok


def test_same_size_normalises_and_more_is_refused(tmp_path):
    old = heads.trained_ids(100, ascending=False)
    head = write_eagle3(tmp_path / "head", ids=old, t2d=False, spelling="layers.0")
    request = by_map(tmp_path, range(TOKENS))
    done = convert(head, draft_vocab=100, vocabulary=request, out=tmp_path / "out")
    tensors, source = written(done.folder), eagle3_tensors(rows=100)["lm_head.weight"]
    assert target_ids(tensors).tolist() == sorted(old.tolist())
    assert torch.equal(tensors["lm_head.weight"], source[np.argsort(old)])
    with pytest.raises(UsageError, match="has rows for 100 ids"):
        convert(head, draft_vocab=101, vocabulary=request, out=tmp_path / "more")
    with pytest.raises(MismatchError, match="100 of 384 ids"):
        convert(head, draft_vocab="full", out=tmp_path / "full")
    assert not (tmp_path / "more").exists()
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize(("old", "words"), [(PADDED, "belong to no token"), (UNFORCED, "never trained")])
def test_same_size_keeps_rows_of_padding_ids_and_adds_no_forced_ones(tmp_path, target, old, words):
    head = write_eagle3(tmp_path / "head", ids=np.array(old))
    done = convert(head, draft_vocab=len(old), vocabulary=BY_ID, target=target, out=tmp_path / "out")
    assert target_ids(written(done.folder)).tolist() == old
    assert any(words in warning for warning in done.manifest.warnings)
    assert (2 in done.manifest.vocabulary.get("forced_but_untrained", [])) == (2 not in old)
    assert verify_artifact(done.folder, head=head, target=target).ok


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_from_the_target(tmp_path, tied, shards, dtype):
    target = write_target(tmp_path / "target", tied=tied, shards=shards, dtype=getattr(torch, dtype))
    head = write_eagle3(tmp_path / "head", lm_head=False, draft_vocab_size=None)
    done = audited(tmp_path, head, target)
    tensors = written(done.folder)
    assert torch.equal(tensors["lm_head.weight"], heads.target_lm_head(target)[target_ids(tensors)].bfloat16())
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    found = {"from": "target", "tensor": name, "rows": VOCAB, "source_dtype": dtype}
    assert done.manifest.lm_head == found | {"dtype": "bfloat16", "rounded": dtype == "float32"}


@pytest.mark.parametrize("shards", [1, 2])
def test_an_lm_head_unlike_the_embedding_that_it_is_tied_to_is_told(tmp_path, shards):
    head = write_eagle3(tmp_path / "head", lm_head=False)
    for tied, own in ((True, True), (True, False), (False, True)):
        target = write_target(tmp_path / f"target-{tied}-{own}", shards=shards)
        if not own:
            tensors = load_file(target / "model.safetensors") if shards == 1 else {}
            for file in target.glob("*-of-*.safetensors"):
                tensors |= load_file(file)
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            heads.write_tensors(target, tensors, "safetensors" if shards == 1 else "sharded")
        heads.change_config(target, tie_word_embeddings=tied)
        done = convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "out", force=True)
        assert any("they differ" in warning for warning in done.manifest.warnings) == (tied and own)


def test_rows_too_large_for_the_heads_dtype(tmp_path):
    target = write_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"][5, 3] = tensors["model.embed_tokens.weight"][5, 3] = 70000.0
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    head = write_eagle3(tmp_path / "head", lm_head=False, dtype=torch.float16)
    with pytest.raises(MismatchError, match="token 5 holds a value too large"):
        convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    own = eagle3_tensors(rows=VOCAB, dtype=torch.float16, embedding=True)
    head = write_eagle3(tmp_path / "own", tensors=own, dtype=torch.float16)
    done = convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "kept")
    assert torch.equal(written(done.folder)["embed_tokens.weight"], own["embed_tokens.weight"])


def test_full_writes_no_map(tmp_path):
    head = write_eagle3(tmp_path / "head", ids=np.arange(VOCAB), spelling="layers.0")
    done = convert(head, draft_vocab="full", out=tmp_path / "out")
    said = []
    convert(head, draft_vocab="full", vocabulary=BY_ID, out=tmp_path / "other", say=said.append)
    assert said[0].startswith("--draft-vocab full keeps every row")
    tensors = written(done.folder)
    assert set(tensors) == set(eagle3_tensors(rows=VOCAB))
    assert config_of(done.folder)["draft_vocab_size"] == VOCAB
    assert Artifact.load(done.folder).manifest.rank_order_ids is None
    assert not list(done.folder.glob("freq*"))
    assert "normalised to the layout that engines share" in (done.folder / "README.md").read_text()
    assert verify_artifact(done.folder, head=head).ok


def test_bytes_of_a_step_are_those_of_the_rows_as_stored(tmp_path, target):
    single = {"lm_head.weight": random((VOCAB, HIDDEN), 7, torch.float32)}
    head = write_eagle3(tmp_path / "head", tensors=eagle3_tensors(rows=VOCAB) | single)
    done = convert(head, draft_vocab=300, vocabulary=BY_ID, target=target, out=tmp_path / "out")
    assert done.bytes_before - done.bytes_after == (VOCAB - 300) * HIDDEN * 4


ATTENTION = "midlayer.self_attn"
HEAD_NORMS = {f"{ATTENTION}.{name}_norm.weight": random((heads.HEAD_DIM,), 61) for name in "qk"}
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
SIZES = {"q": HIDDEN, "k": 16, "v": 16}
QKV_BIASES = {f"{ATTENTION}.{name}_proj.bias": random((size,), 70) for name, size in SIZES.items()}
ZERO_BIAS = {f"{ATTENTION}.o_proj.bias": torch.zeros(HIDDEN, dtype=torch.bfloat16)}
O_BIAS = {f"{ATTENTION}.o_proj.bias": random((HIDDEN,), 71)}
BIASED = {"attention_bias": True}


@pytest.mark.parametrize(
    ("extra", "changes", "added", "config", "words"),
    [
        (HEAD_NORMS, {"spelling": "speculators", "model_type": "qwen3"}, {}, QWEN3, "norms of q and k"),
        (HEAD_NORMS, {"architectures": QWEN3["architectures"]}, {}, QWEN3, "norms of q and k"),
        (HEAD_NORMS, {}, {}, QWEN3, "norms of q and k"),
        # One switch for all biases of the attention: what the file lacks would stay as it was allocated.
        (QKV_BIASES, {"attention_bias": ..., "qkv_bias": True}, ZERO_BIAS, BIASED, "biases"),
        (QKV_BIASES | O_BIAS, {"attention_bias": ..., "model_type": "qwen2"}, {}, BIASED, "biases"),
    ],
)
def test_options_of_a_head_are_carried_with_what_lets_engines_read_them(tmp_path, extra, changes, added, config, words):
    head = write_eagle3(tmp_path / "head", tensors=eagle3_tensors(rows=VOCAB) | extra, **changes)
    done = audited(tmp_path, head)
    found = written(done.folder)
    assert found.keys() - eagle3_tensors(rows=VOCAB).keys() == {*extra, *added, "d2t", "t2d"}
    assert all(torch.equal(found[name], tensor) for name, tensor in (extra | added).items())
    assert {key: config_of(done.folder)[key] for key in config} == config
    assert any("SGLang" in warning and words in warning for warning in done.manifest.warnings)
    card = (done.folder / "README.md").read_text()
    assert ("vllm serve" in card, "sglang.launch_server" in card) == (True, False)


def test_a_bias_of_nothing_is_left_out_of_an_eagle3_head(tmp_path):
    zeros = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    zeros[3] = -0.0
    done = audited(tmp_path, write_eagle3(tmp_path / "head", extra={"fc.bias": zeros}))
    assert "fc.bias" not in written(done.folder)
    assert "all zero" in done.manifest.dropped["fc.bias"]


def test_norms_over_the_taps_are_carried(tmp_path):
    tensors = eagle3_tensors(rows=VOCAB, fc_norms=True, input_norm=True)
    config = {"fc_norm": True, "norm_before_fc": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    head = write_eagle3(tmp_path / "head", tensors=tensors, spelling="legacy-norms", **config)
    done = convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "out", tap_layers=(2, 4, 5))
    found = written(done.folder)
    for name in ("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "input_norm.weight"):
        assert torch.equal(found[name], tensors[name])
    assert config_of(done.folder)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config_of(done.folder)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert Artifact.load(done.folder).head.tap_layers == (2, 4, 5)


def test_what_a_request_cannot_have_is_refused(tmp_path):
    for options, vocabulary, words in (
        ({"draft_vocab": 8.0}, {}, "--draft-vocab"),
        ({"draft_vocab": True}, {}, "--draft-vocab"),
        ({"flavour": "vllm"}, {}, "flavour"),
        ({"d2t_form": "relative"}, {}, "d2t_form"),
        ({}, {"token_map": None, "order": "rank"}, "order"),
        ({}, {"force_added": "some"}, "force_added"),
        ({"draft_vocab": 300}, {"token_map": None, "order": "ids"}, "--tokenizer"),
        ({}, {"force_added": "all"}, "--tokenizer"),
        ({}, {"weights": {"chat": 2.0}}, "--weights"),
        ({}, {"floors": {"chat": 0.9}}, "--floor"),
        ({}, {"token_map": None, "counts": ("a",), "order": "ids"}, "exclude each other"),
        ({}, {"counts": ("",)}, "file is empty"),
        ({}, {"token_map": ""}, "file is empty"),
        ({}, {}, "--target"),
        ({"d2t_form": "offset"}, {}, "--d2t-form"),
        ({"out": "", "force": True}, {}, "--out"),
    ):
        head, ranked = write_eagle3(tmp_path / "head", lm_head=words != "--target"), by_map(tmp_path, RANKED)
        plain = {"draft_vocab": 8, "out": tmp_path / "out"}
        with pytest.raises(UsageError) as caught:
            convert(head, **{**plain, "vocabulary": replace(ranked, **vocabulary), **options})
        assert words in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_full_vocabulary_in_another_order_is_a_full_vocabulary(tmp_path):
    ids = np.random.default_rng(0).permutation(VOCAB)
    head = write_eagle3(tmp_path / "head", ids=ids)
    row_of_id = np.argsort(ids)
    source = eagle3_tensors(rows=VOCAB)["lm_head.weight"]
    made = convert_all(head, draft_vocab=[8, "full"], vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "made")
    for done, size, kept in zip(made, (8, VOCAB), (sorted(RANKED[:8]), list(range(VOCAB))), strict=True):
        found = written(done.folder)
        assert torch.equal(found["lm_head.weight"], source[row_of_id[kept]])
        assert ("d2t" in found) == (size == 8)
        assert verify_artifact(done.folder, head=head).ok
    with pytest.raises(UsageError, match=r"384.*384"):
        convert(head, draft_vocab=VOCAB, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "out")


@pytest.mark.parametrize("target_hidden", [HIDDEN, 2 * HIDDEN])
def test_tied_head_gives_rows_of_its_own_embedding(tmp_path, target, target_hidden):
    tensors = eagle3_tensors(rows=None, target_hidden=target_hidden, embedding=True)
    config = {"tie_word_embeddings": True, "target_hidden_size": target_hidden, "draft_vocab_size": None}
    head = write_eagle3(tmp_path / "head", tensors=tensors, **config)
    assert target_hidden != HIDDEN or not torch.equal(heads.target_lm_head(target), tensors["embed_tokens.weight"])
    done = audited(tmp_path, head)
    found = written(done.folder)
    assert torch.equal(found["lm_head.weight"], tensors["embed_tokens.weight"][sorted(RANKED[:8])])
    assert torch.equal(found["embed_tokens.weight"], tensors["embed_tokens.weight"])
    assert config_of(done.folder).get("target_hidden_size", HIDDEN) == target_hidden
    assert config_of(done.folder)["tie_word_embeddings"] is False
    assert (done.manifest.lm_head["from"], done.manifest.lm_head["tensor"]) == ("head", "embed_tokens.weight")


@pytest.mark.parametrize("ids", [None, heads.trained_ids()])
def test_no_id_is_kept_that_the_target_has_not(tmp_path, target, ids):
    """The head pads the target's 300 ids to 384; the tokenizer has tokens beyond them."""
    heads.change_config(target, vocab_size=300)
    head = write_eagle3(tmp_path / "head", ids=ids)
    size = 290 if ids is None else int((ids < 300).sum())
    rising = token_counts(list(range(TOKENS)), None, load_tokenizer(target).tokenizer_hash)
    request = VocabRequest(counts=(rising,))
    done = convert(head, draft_vocab=size, vocabulary=request, target=target, out=tmp_path / "out")
    assert target_ids(written(done.folder)).max() < 300
    # An artifact that was made without the target may have such ids.
    falling = by_map(tmp_path, heads.trained_ids()[::-1])
    made = convert(head, draft_vocab=200, vocabulary=falling, out=tmp_path / "made")
    assert made.manifest.rank_order_ids.max() >= 300
    cut = convert(made.folder, draft_vocab=150, target=target, out=tmp_path / "cut")
    assert target_ids(written(cut.folder)).max() < 300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_embedding_is_left_out_only_where_it_is_a_copy_of_the_targets(tmp_path, dtype):
    target = write_target(tmp_path / "target", dtype=torch.float32, shards=2)
    copy, request = random((VOCAB, HIDDEN), 101, torch.float32).to(dtype), by_map(tmp_path, range(320))
    for name, own, given, said in (
        ("a", copy, target, ""),
        ("b", copy, None, "compared"),
        ("c", copy + 1, target, "copy"),
    ):
        tensors = eagle3_tensors(rows=VOCAB, dtype=dtype) | {"embed_tokens.weight": own}
        head = write_eagle3(tmp_path / name, tensors=tensors, dtype=dtype)
        done = convert(head, draft_vocab=320, vocabulary=request, target=given, out=tmp_path / f"{name}-slim")
        assert verify_artifact(done.folder, head=head, target=target).ok
        assert ("embed_tokens.weight" in written(done.folder)) == bool(said)
        assert any("embed_tokens" in warning and said in warning for warning in done.manifest.warnings) == bool(said)
    # As conversions left one out that was no copy, before they compared.
    (failed,) = verify_artifact(tmp_path / "a-slim", head=head, target=target).failed
    assert "embed_tokens.weight" in failed.detail


def test_eagle1_is_repaired_and_otherwise_unchanged(tmp_path, target):
    changes = {"num_hidden_layers": 32, "tie_word_embeddings": True}
    head = write_eagle1(tmp_path / "head", container="bin", layer_types=["full_attention"] * 32, **changes)
    done = audited(tmp_path, head, target)
    source = torch.load(head / "pytorch_model.bin", weights_only=True)
    found = written(done.folder)
    assert torch.equal(found.pop("fc.bias"), torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert found.keys() == source.keys()
    assert all(torch.equal(found[name], source[name]) for name in source)
    config = config_of(head) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    assert config_of(done.folder) == {key: config[key] for key in config if key not in ("bias", "layer_types")}
    assert any("num_hidden_layers was 32" in warning for warning in done.manifest.warnings)
    freq = torch.load(done.folder / "freq_320.pt", weights_only=True)
    assert len(freq) == len(set(freq)) == 320
    assert 2 in freq
    assert "--speculative-token-map HEAD/freq_320.pt" in (done.folder / "README.md").read_text()


@pytest.mark.parametrize("said", [{"qkv_bias": True}, {"attention_bias": ...}])
def test_eagle1_keeps_its_biases_with_the_flags_of_every_engine(tmp_path, target, said):
    sizes = {"self_attn.q": HIDDEN, "self_attn.k": 16, "self_attn.v": 16, "mlp.gate": 48, "mlp.up": 48, "mlp.down": 32}
    own = {f"layers.0.{name}_proj.bias": random((size,), size) for name, size in sizes.items()}
    own["fc.bias"] = random((HIDDEN,), 77)
    head = write_eagle1(tmp_path / "head", extra=own, **said)
    done = audited(tmp_path, head, target)
    found, config = written(done.folder), config_of(done.folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    # vLLM and SGLang build one with those of q, k and v, and leave uninitialised what the file lacks.
    assert torch.equal(found["layers.0.self_attn.o_proj.bias"], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert all(config[flag] is True for flag in ("attention_bias", "qkv_bias", "mlp_bias"))
    for words in ("fc.bias is dropped", "MLP are not loaded"):
        assert any(words in warning for warning in done.manifest.warnings)
    with raises(UsageError, option="--for"):
        convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "b", flavour="lmdeploy")


@pytest.mark.parametrize(
    "named", [["Qwen2ForCausalLM"], ["MixtralForCausalLM"], None, ["LlamaForCausalLMEagle"]], ids=str
)
def test_eagle1_of_another_class_is_what_vllm_and_sglang_load(tmp_path, named):
    """vLLM puts Eagle before the name, has no EagleQwen2ForCausalLM, and stops at a norm before the first layer."""
    norm = {"layers.0.input_layernorm.weight": random((HIDDEN,), 5)}
    head = write_eagle1(tmp_path / "head", extra=norm, architectures=named, model_type="qwen2")
    options = {"draft_vocab": 8, "vocabulary": by_map(tmp_path, RANKED)}
    done = convert(head, **options, out=tmp_path / "out")
    is_sglangs = named == ["LlamaForCausalLMEagle"]
    expected = (named, "qwen2") if is_sglangs else (["LlamaForCausalLM"], "llama")
    config = config_of(done.folder)
    assert (config["architectures"], config["model_type"]) == expected
    assert [*norm] == [*done.manifest.dropped]
    assert not norm.keys() & written(done.folder).keys()
    assert any("does not exist there" in warning for warning in done.manifest.warnings) == is_sglangs
    assert verify_artifact(done.folder, head=head).ok
    config = config_of(convert(head, **options, flavour="sglang", out=tmp_path / "sglang").folder)
    name = "Qwen2ForCausalLMEagle" if named == ["Qwen2ForCausalLM"] else "LlamaForCausalLMEagle"
    assert (config["architectures"], config["model_type"]) == ([name], "qwen2")


def test_eagle1_keeps_its_norms(tmp_path):
    own = {f"layers.0.self_attn.{name}_norm.weight": random((heads.HEAD_DIM,), 90) for name in "qk"}
    done = audited(tmp_path, write_eagle1(tmp_path / "head", extra=own))
    assert all(torch.equal(written(done.folder)[name], tensor) for name, tensor in own.items())
    assert any("raise ValueError with an EAGLE-1/2 head" in warning for warning in done.manifest.warnings)


def test_counts_rank_and_coverage_is_measured(tmp_path, head, target):
    tokenizer = load_tokenizer(str(target))
    documents = [[300, 301, 302] * 20, [5, 290, 2]]
    counts = token_counts([token % 97 for token in range(TOKENS)], documents, tokenizer.tokenizer_hash)
    request = VocabRequest(counts=(counts,))
    done = convert_all(head, draft_vocab=[270, 320], vocabulary=request, target=target, out=tmp_path / "many")
    assert [conversion.folder.name for conversion in done] == ["head-v270", "head-v320"]
    small, large = (Artifact.load(one.folder) for one in done)
    assert small.manifest.rank_order_ids.tolist() == large.manifest.rank_order_ids[:270].tolist()
    assert large.tokenizer_hash == tokenizer.tokenizer_hash
    entry = done[0].to_json()["coverage"][0]
    held = np.concatenate(documents)
    assert entry["covered"] == pytest.approx(np.isin(held, small.manifest.rank_order_ids).mean(), abs=1e-6)
    card = (done[1].folder / "README.md").read_text()
    assert f"{entry['covered']:.2%}" in card
    assert verify_artifact(large.folder, head=head, target=target).ok

    found = convert(head, coverage=0.02, vocabulary=request, target=target, out=tmp_path / "found")
    assert found.manifest.draft_vocab == 320
    assert found.to_json()["coverage"][0]["covered"] >= 0.02


def test_counts_of_another_tokenizer_are_refused(tmp_path, head, target):
    other = token_counts([1] * TOKENS, tokenizer_hash="sha256:other")
    with pytest.raises(TokenizerError):
        convert(head, draft_vocab=300, vocabulary=VocabRequest(counts=(other,)), target=target, out=tmp_path / "o")
    # Gemma-3's own tokenizer has a token more than its LM head has rows.
    own = VocabRequest(counts=(token_counts([1] * (VOCAB + 9), tokenizer_hash=load_tokenizer(target).tokenizer_hash),))
    done = convert(head, draft_vocab=300, vocabulary=own, target=target, out=tmp_path / "o")
    assert any("beyond the target's vocabulary" in warning for warning in done.manifest.warnings)


def test_wrong_targets_and_tokenizers_are_refused(tmp_path, target):
    head = write_eagle3(tmp_path / "head", lm_head=False)
    wide = write_target(tmp_path / "wide", hidden=48)
    with pytest.raises(MismatchError, match="hidden_size"):
        convert(head, draft_vocab=300, vocabulary=BY_ID, target=wide, out=tmp_path / "o")
    heads.change_config(target, vocab_size=VOCAB + 64)
    with pytest.raises(MismatchError, match=r"vocab_size.*\n.* lacks the last 64 ids, be they padding or tokens"):
        convert(head, draft_vocab=300, vocabulary=BY_ID, target=target, out=tmp_path / "o")
    heads.change_config(target, vocab_size=VOCAB, num_hidden_layers=3)
    short = write_target(tmp_path / "short")
    heads.write_tensors(short, {"lm_head.weight": heads.random((300, heads.HIDDEN), 1)})
    for rows, advice in ((320, "Fetch the target's weights again"), ("full", "--draft-vocab")):
        with pytest.raises(MismatchError, match=rf"has 300 rows, none for id .*\n.*{advice}"):
            convert(head, draft_vocab=rows, vocabulary=BY_ID, target=short, out=tmp_path / "o")
    tapped = write_eagle3(tmp_path / "tapped", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    with raises(MismatchError, option="--tap-layers"):
        convert(tapped, draft_vocab=300, vocabulary=BY_ID, target=target, out=tmp_path / "o")
    heads.change_config(target, num_hidden_layers=heads.LAYERS)
    other = write_folder(tmp_path / "other", byte_level_bpe(340))
    with pytest.raises(MismatchError, match="not that of the target"):
        convert(tapped, draft_vocab=300, vocabulary=BY_ID, target=target, tokenizer=other, out=tmp_path / "o")
    large = write_folder(tmp_path / "large", byte_level_bpe(400, ["<a>", *(f"<{n}>" for n in range(200))]))
    with pytest.raises(MismatchError, match="up to 456"):
        convert(tapped, draft_vocab=300, vocabulary=BY_ID, tokenizer=large, out=tmp_path / "o")
    with pytest.raises(MismatchError, match="up to 339, the target's vocabulary has 2400"):
        open_tokenizer(other, None, 2400, offline=True)
    heads.change_config(short, vocab_size=None)
    heads.write_tensors(short, {"lm_head.weight": heads.random((2500, heads.HIDDEN), 1)})
    with pytest.raises(MismatchError, match=r"lm_head.weight is \[2500, 32\], .* needs \[384, 32\]"):
        convert(head, draft_vocab=300, vocabulary=BY_ID, target=short, out=tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("logical", "head_vocab"), [(TOKENS, TOKENS), (TOKENS, VOCAB), (TOKENS, 370), (VOCAB, 400)])
@pytest.mark.parametrize("own", [True, False])
def test_a_vocabulary_that_counts_padding_otherwise_is_no_other_target(tmp_path, target, logical, head_vocab, own):
    """The tokenizer has 360 tokens, the target's LM head 384 rows, and its config.json says one or the other."""
    flat = config_of(target) | {"vocab_size": logical}
    heads.write_json(target / "config.json", {"model_type": "qwen3_5", "text_config": flat} if own else flat)
    tensors = eagle3_tensors(rows=head_vocab if own else None)
    sizes = {"vocab_size": head_vocab, "draft_vocab_size": head_vocab if own else None}
    head = write_eagle3(tmp_path / "head", tensors=tensors, **sizes)
    done = convert(head, draft_vocab=350, vocabulary=BY_ID, target=target, out=tmp_path / "o")
    found = written(done.folder)
    ids = (found["d2t"] + torch.arange(350)).tolist()
    assert max(ids) < TOKENS
    rows = tensors["lm_head.weight"] if own else heads.target_lm_head(target)
    assert torch.equal(found["lm_head.weight"], rows[ids])
    assert len(found["t2d"]) == head_vocab
    assert verify_artifact(done.folder, head=head, target=target).ok
    with raises(UsageError):
        convert(head, draft_vocab=TOKENS + 1, vocabulary=BY_ID, target=target, out=tmp_path / "more")


def test_the_language_model_of_a_multimodal_target_is_compared_with_the_head(tmp_path, target):
    """Of InternVL, DeepSeek-VL2 and Qwen-Omni; where its sizes are under no key that is known, a warning says so."""
    head, flat = write_eagle3(tmp_path / "head", lm_head=False), config_of(target)
    options = {"draft_vocab": 300, "vocabulary": BY_ID, "target": target}
    tensors = {"thinker.lm_head.weight": heads.target_lm_head(target)}
    for path in target.glob("*.safetensors"):
        path.unlink()
    heads.write_tensors(target, tensors)
    omni = {"thinker_config": {"audio_config": {"hidden_size": 8}, "text_config": flat}}
    for place in ({"llm_config": flat}, {"language_config": flat}, omni):
        heads.write_json(target / "config.json", {"architectures": ["InternVLChatModel"], **place})
        done = convert(head, **options, out=tmp_path / "out", force=True)
        assert done.manifest.target["num_hidden_layers"] == heads.LAYERS
        assert "compared" not in str(done.manifest.warnings)
        found = written(done.folder)
        assert torch.equal(found["lm_head.weight"], tensors["thinker.lm_head.weight"][found["d2t"] + torch.arange(300)])
        heads.write_json(target / "config.json", json.loads(json.dumps(place).replace('size": 32', 'size": 48')))
        with pytest.raises(MismatchError, match=r"hidden_size.*48"):
            convert(head, **options, out=tmp_path / "other")
    heads.write_json(target / "config.json", {"own_config": flat})
    done = convert(head, **options, out=tmp_path / "out", force=True)
    assert any("no hidden_size and no num_hidden_layers" in warning for warning in done.manifest.warnings)
    assert verify_artifact(done.folder, head=head, target=target)["target"].status == "warning"


def test_nan_rows_and_tensors_are_refused(tmp_path):
    tensors = eagle3_tensors(rows=VOCAB)
    tensors["lm_head.weight"][300, 1] = float("nan")
    head = write_eagle3(tmp_path / "head", tensors=tensors)
    options = {"draft_vocab": 8, "vocabulary": by_map(tmp_path, RANKED), "out": tmp_path / "out"}
    with pytest.raises(CheckpointError, match="row of token 300"):
        convert(head, **options)
    with pytest.raises(CheckpointError, match="row of token 300"):
        plan_conversion(head, ConvertOptions(**options))[0].check()
    fine = convert(head, draft_vocab=3, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "fine")
    assert verify_artifact(fine.folder, head=head).ok
    tensors = eagle3_tensors(rows=VOCAB)
    tensors["midlayer.mlp.up_proj.weight"][2, 1] = float("inf")
    head = write_eagle3(tmp_path / "other", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: row 2"):
        convert(head, **options)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_sizes_that_do_not_fit(tmp_path, head, target):
    ascending = write_eagle3(tmp_path / "mapped", ids=np.arange(10, 340))
    source = parse_source(f"chat={tmp_path / 'chats.jsonl'}")
    for arguments, words in (
        ({"draft_vocab": 100, "vocabulary": BY_ID}, r"of 100 was asked for: expected at least \d+ "),
        ({"draft_vocab": 100}, r"100.*259"),
        # Of several sizes none is written where one does not fit.
        ({"draft_vocab": [300, TOKENS], "vocabulary": BY_ID}, r"360.*360"),
        ({"draft_vocab": 300, "vocabulary": VocabRequest(token_map=ascending)}, "does not tell which matter most"),
        ({"draft_vocab": 300, "coverage": 0.9}, "not both"),
        ({"draft_vocab": 300, "offline": True}, "--offline"),
        ({"coverage": 0.9, "vocabulary": BY_ID}, "--coverage"),
        *(({"coverage": share}, "is not a share of tokens") for share in (0, 1.5, float("nan"))),
        ({"draft_vocab": 300, "vocabulary": VocabRequest(corpus=(source,), weights={"nope": 3.0})}, "nope"),
        ({"draft_vocab": 300, "vocabulary": VocabRequest(corpus=(source,), floors={"nope": 0.9})}, "nope"),
        ({"draft_vocab": "full", "vocabulary": VocabRequest(corpus=(source,), floors={"chat": 0.9})}, "--floor"),
        ({"coverage": 0.9, "vocabulary": VocabRequest(corpus=(source,), floors={"chat": 0.9})}, "--floor"),
        ({"draft_vocab": 300, "vocabulary": VocabRequest(corpus=(source,), weights={"chat": 0.0})}, "weight 0"),
    ):
        with pytest.raises(UsageError, match=words):
            convert(head, target=target, out=tmp_path / "out", count=lambda *_: pytest.fail("counted"), **arguments)
    assert not (tmp_path / "out").exists()


def test_an_artifact_is_cut_again_by_its_own_ranks_without_a_tokenizer(tmp_path, head, target):
    first = convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "first")
    alone = convert(first.folder, draft_vocab=280, out=tmp_path / "alone")
    helped = convert(first.folder, draft_vocab=280, target=target, out=tmp_path / "helped")
    direct = convert(head, draft_vocab=280, vocabulary=BY_ID, target=target, out=tmp_path / "direct")
    for name in ("model.safetensors", "config.json", "freq_280.pt"):
        assert (alone.folder / name).read_bytes() == (direct.folder / name).read_bytes()
        assert (alone.folder / name).read_bytes() == (helped.folder / name).read_bytes()
    assert alone.manifest.num_forced == direct.manifest.num_forced > 0
    assert "ranking: order of the token ids" in (alone.folder / "README.md").read_text()
    assert alone.manifest.tokenizer["hash"] == direct.manifest.tokenizer["hash"]
    assert not any("tokenizer" in warning for warning in alone.manifest.warnings)
    assert pipeline.NOT_COMPARED not in alone.manifest.warnings
    apart = convert(head, draft_vocab=320, vocabulary=by_map(tmp_path, range(340)), out=tmp_path / "apart")
    again = convert(apart.folder, draft_vocab=280, out=tmp_path / "again")
    assert pipeline.NOT_COMPARED in apart.manifest.warnings
    assert pipeline.NOT_COMPARED in again.manifest.warnings
    assert verify_artifact(alone.folder, head=first.folder, target=target).ok
    with pytest.raises(UsageError, match=r"200.*259"):
        convert(first.folder, draft_vocab=200, out=tmp_path / "less")
    for kind, option in (("weights", "--weights"), ("floors", "--floor")):
        with raises(UsageError, option=option):
            convert(first.folder, draft_vocab=280, vocabulary=VocabRequest(**{kind: {"a": 0.9}}), out=tmp_path / "no")
    other = shutil.copytree(target, tmp_path / "other")
    write_folder(other, byte_level_bpe(TOKENS - 9))
    for vocabulary in (VocabRequest(), BY_ID, VocabRequest(counts=(token_counts([3] * 300),))):
        with pytest.raises(MismatchError, match="chosen for another tokenizer"):
            convert(first.folder, draft_vocab=280, vocabulary=vocabulary, target=other, out=tmp_path / "no")
    ranks = VocabRequest(token_map=first.folder)
    with pytest.raises(TokenizerError):
        convert(head, draft_vocab=280, vocabulary=ranks, target=other, out=tmp_path / "no")


@pytest.mark.parametrize("is_ours", [True, False])
def test_ascending_ids_are_doubted_where_another_tool_listed_them(tmp_path, head, target, is_ours):
    vocabulary = BY_ID if is_ours else by_map(tmp_path, range(340))
    warned = []
    for size in (320, 300, 280):
        head = convert(head, draft_vocab=size, vocabulary=vocabulary, target=target, out=tmp_path / f"of-{size}").folder
        warned.append("as in a map that was sorted" in str(Artifact.load(head).manifest.warnings))
        vocabulary = VocabRequest(token_map=head)
    assert warned == [not is_ours] * 3


def test_ranks_of_an_artifact_need_no_target_that_its_manifest_names(tmp_path, head, target):
    first = convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "first")
    named = {"repo_id": "org/nowhere", "revision": "0123abc", "vocab_size": VOCAB}
    change_manifest(first.folder, lambda manifest: manifest.update(target=named))
    again = convert(first.folder, draft_vocab=280, out=tmp_path / "again")
    assert again.manifest.target == named
    assert again.manifest.tokenizer == first.manifest.tokenizer
    assert again.manifest.rank_order_ids.tolist() == first.manifest.rank_order_ids[:280].tolist()
    assert not any("not at hand" in warning for warning in again.manifest.warnings)
    # What is forced besides is looked for without the target, too; added tokens are not.
    last = int(first.manifest.rank_order_ids[-1])
    more = VocabRequest(force_ids=(last,))
    forced = convert(first.folder, draft_vocab=280, vocabulary=more, out=tmp_path / "forced")
    assert last in forced.manifest.rank_order_ids
    assert forced.manifest.num_forced == first.manifest.num_forced + 1
    with pytest.raises(UsageError, match=r"259.*260"):
        convert(first.folder, draft_vocab=259, vocabulary=more, out=tmp_path / "less")
    with pytest.raises(SourceError, match="org/nowhere"):
        convert(first.folder, draft_vocab=280, vocabulary=VocabRequest(force_added="all"), out=tmp_path / "all")


def test_no_file_tells_where_on_this_machine_the_inputs_were(tmp_path):
    home = tmp_path / "a-home"
    target = write_target(home / "target", tied=True)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    (target / "chat_template.jinja").unlink(missing_ok=True)
    head = write_eagle3(home / "head", lm_head=False)
    done = convert(head, draft_vocab=300, vocabulary=BY_ID, target=target, out=tmp_path / "out")
    assert any("target has no chat template" in warning for warning in done.manifest.warnings)
    # A folder that the head names itself, and that is not opened.
    named = write_eagle3(home / "named", spelling="speculators")
    config = config_of(named)
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    heads.write_json(named / "config.json", config)
    other = convert(named, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "other")
    assert other.manifest.target["name"] == "target"
    for path in (*done.folder.iterdir(), *other.folder.iterdir()):
        assert b"a-home" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("dtype", "of_target", "asked"),
    [
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "torch.bfloat16", "bfloat16"),
        ("float32", "float16", None),
        ("bfloat16", "float32", "float16"),
        ("bfloat16", "bfloat16", None),
        ("float16", None, None),
    ],
)
def test_sglang_is_told_of_a_head_in_another_type_than_its_target(tmp_path, target, dtype, of_target, asked):
    head = write_eagle3(tmp_path / "head", dtype=getattr(torch, dtype))
    heads.change_config(target, torch_dtype=of_target)
    done = convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "out")
    told = [warning for warning in done.manifest.warnings if "multiplies no two types" in warning]
    assert len(told) == (asked is not None)
    assert all(warning.startswith("SGLang: ") and f"--dtype {asked}" in warning for warning in told)
    verified = verify_artifact(done.folder, head=head, target=target, engines=["sglang", "vllm"])
    assert ("--dtype" in verified["engine sglang"].detail) == (asked is not None)
    assert verified.ok
    assert "--dtype" not in verified["engine vllm"].detail


def test_a_folder_that_is_named_by_a_dot_changes_no_warning(tmp_path, target, monkeypatch):
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    head = write_eagle3(tmp_path / "head", **taps)
    options = {"draft_vocab": 300, "vocabulary": BY_ID, "out": tmp_path / "out", "force": True}
    expected = convert(head, target=target, **options).manifest.warnings
    assert any("config.json names the tap layers" in warning for warning in expected)
    for place, names in ((head, (".", target)), (target, (head, ".")), (tmp_path, ("head", target))):
        monkeypatch.chdir(place)
        assert convert(names[0], target=names[1], **options).manifest.warnings == expected


def test_defaults_are_named(tmp_path, head, target, monkeypatch):
    said = []
    monkeypatch.setattr("eagle_slim.convert.targets.model.known_target", lambda head: str(target))
    counts = token_counts([3] * TOKENS, None, load_tokenizer(str(target)).tokenizer_hash)
    asked = []

    def count(sources, tokenizer):
        asked.extend(sources)
        return counts

    done = convert(head, draft_vocab=300, out=tmp_path / "out", count=count, say=said.append)
    assert any("from the table of public heads" in line for line in said)
    assert any("ultrachat_200k (MIT" in line for line in said)
    assert (asked[0].location, asked[0].split) == ("HuggingFaceH4/ultrachat_200k", "train_sft")
    assert (asked[0].roles, asked[0].max_tokens) == ("assistant", 10_000_000)
    assert done.manifest.coverage is None


def test_target_named_by_the_head(tmp_path, target):
    from eagle_slim.convert.targets.model import choose_target

    # A folder may well be the repository that the head names.
    head = write_eagle3(tmp_path / "named", spelling="speculators")
    done = convert(head, draft_vocab=300, vocabulary=BY_ID, target=target, out=tmp_path / "out")
    assert not any("was given" in warning for warning in done.manifest.warnings)
    opened = open_head(write_eagle3(tmp_path / "head", spelling="speculators"))
    choice = choose_target(opened)
    assert (choice.name, choice.reason) == ("org/target", "named in the head's config.json")
    plain = open_head(write_eagle3(tmp_path / "plain"))
    assert choose_target(plain) is None
    (tmp_path / "plain" / "README.md").write_text("---\nbase_model: base/model\n---\n")
    plain = open_head(tmp_path / "plain")
    assert choose_target(plain).name == "base/model"
    # A path of the machine that trained the head means nothing here; one that is there does.
    trained_elsewhere = replace(plain, target_name="/home/them/models/target")
    assert choose_target(trained_elsewhere).name == "base/model"
    assert choose_target(replace(opened, target_name=str(tmp_path))).name == str(tmp_path)


def test_default_names():
    assert ConvertOptions(32000).name_of(None, 32000) == "smollm2-135m-instruct-eagle3-v32000"
    assert ConvertOptions("full", flavour="lmdeploy").name_of("hub/EAGLE3-X", "full") == "EAGLE3-X-full-lmdeploy"
    assert ConvertOptions(coverage=0.99, subfolder="a/b").name_of("org/head", None) == "head-a-b-coverage0.99"


def test_weights_of_the_target_are_looked_at_before_text_is_counted(tmp_path, target):
    def never(*_):
        pytest.fail("counted, although the conversion cannot be finished")

    head = write_eagle3(tmp_path / "head", lm_head=False)
    weights = target / "model.safetensors"
    for damage in (lambda: weights.write_bytes(weights.read_bytes()[:-8]), weights.unlink):
        damage()
        with pytest.raises(CheckpointError):
            convert(head, draft_vocab=300, target=target, out=tmp_path / "out", count=never)
    save_file({"lm_head.weight": random((VOCAB, 8), 0)}, weights)
    with pytest.raises(MismatchError, match=r"lm_head\.weight is \[384, 8\]"):
        convert(head, draft_vocab=300, target=target, out=tmp_path / "out", count=never)


def test_force_replaces_an_artifact_and_nothing_else(tmp_path, head, target):
    options = {"draft_vocab": 300, "vocabulary": BY_ID, "target": target, "out": tmp_path / "slim", "force": True}
    convert(head, **options)
    convert(head, **options)
    shutil.copytree(head, tmp_path / "slim" / "inside")
    with raises_with(OutputExistsError, "inside"):
        convert(tmp_path / "slim" / "inside", **options)
    assert (tmp_path / "slim" / "inside" / "model.safetensors").is_file()


def test_a_dry_run_warns_of_what_the_real_run_warns(run, tmp_path):
    head = write_eagle1(tmp_path / "old", extra={"fc.bias": random((HIDDEN,), 1)})
    ranking = ("--token-map", heads.write_freq(tmp_path / "freq.pt", range(330)))
    arguments = (convert_command, head, *ranking, "--draft-vocab", "310,320", "--out", "o")
    kinds = (["--dry-run"], ["--dry-run", "--json"], [])
    (_, _, dry), (_, out, _), (code, _, real) = (run(*arguments, *more) for more in kinds)
    assert code == 0, real
    said, planned = ([line for line in err.splitlines() if line.startswith("warning: ")] for err in (real, dry))
    for words in ("fc.bias is dropped", "no tokenizer was at hand", "multiple of 64"):
        assert words in real
    assert said == planned
    assert set(said) == {f"warning: {warning}" for plan in json.loads(out) for warning in plan["warnings"]}


NO_TORCH = """
import sys
from eagle_slim.convert import cli, removed_cli, verify_cli
at_import = {"transformers"} & set(sys.modules)
cli.convert.main(sys.argv[1:], standalone_mode=False)
print(*sorted(at_import | {"torch", "datasets", "matplotlib"} & set(sys.modules)))
"""


def test_safetensors_to_safetensors_needs_no_torch(tmp_path, target):
    head = write_eagle3(tmp_path / "head", lm_head=False)
    arguments = [head, "--draft-vocab", "300", "--target", target, "--order", "ids", "--out", tmp_path / "o"]
    command = [sys.executable, "-X", "utf8", "-c", NO_TORCH, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert len(torch.load(tmp_path / "o" / "freq_300.pt", weights_only=True)) == 300


def test_ids_that_no_text_holds_are_told_of_everywhere(run, tmp_path, head, target):
    counts = [9 if token in range(300, 304) else 0 for token in range(TOKENS)]
    token_counts(counts, None, load_tokenizer(str(target)).tokenizer_hash).save(tmp_path / "few.safetensors")
    arguments = (head, "--draft-vocab", "320", "--target", target, "--counts", "few.safetensors", "--out", "o")
    code, out, err = run(convert_command, *arguments)
    assert code == 0, err
    missing = 320 - 259 - 4
    assert f"never counted         {missing}" in out
    for told in (err, (tmp_path / "o" / "README.md").read_text()):
        assert f"{missing} of the 320 ids never occur in the counted text" in told
    assert Artifact.load(tmp_path / "o").manifest.num_uncounted == missing
    check = verify_artifact(tmp_path / "o")["ranks"]
    assert (check.status, f"{missing} never counted" in check.detail) == ("warning", True)


def test_what_a_ranking_lost_is_told_where_it_comes_as_a_token_map(run, tmp_path, target):
    """300 to 303 counted, 310 forced at first and 300 later: 3 of the 320 others are counted."""
    counts = source_counts([9 if token in range(300, 304) else 0 for token in range(TOKENS)], name="en")
    tokenizer = load_tokenizer(str(target))
    counted = TokenCounts((counts,), tokenizer.tokenizer_hash)
    vocab = rank_vocabulary(counted, 330, tokenizer=tokenizer, floors={"en": 1.0})
    assert vocab.num_uncounted == 330 - 259 - 4
    vocab.save(tmp_path / "vocab.json")
    arguments = (write_eagle3(tmp_path / "head"), "--target", target, "--token-map", "vocab.json", "--out", "o")
    code, out, err = run(convert_command, *arguments, "--draft-vocab", "320", "--force-id", "300")
    assert code == 0, err
    missing = 320 - 260 - 3
    assert f"never counted         {missing}" in out
    assert f"{missing} of the 320 ids never occur" in err
    assert "the floors hold with 330 ids, and 320 are taken" in err


def test_floors_are_held_at_each_size(run, tmp_path, target):
    """The commonest ids of one source, and too few of another's: its floor takes some in."""
    made_by = load_tokenizer(str(target)).tokenizer_hash
    many = source_counts([9 if t < 330 else 0 for t in range(TOKENS)], [[*range(330)]], name="en", weight=9)
    few = source_counts([1 if t >= 340 else 0 for t in range(TOKENS)], [[*range(340, 360)]], name="zh")
    TokenCounts((many, few), made_by).save(tmp_path / "two.safetensors")
    arguments = (write_eagle3(tmp_path / "head"), "--target", target, "--counts", "two.safetensors", "--out", "o")
    floors = ("--floor", "zh=0.5", "--floor", "en=0.6")
    code, _, err = run(convert_command, *arguments, "--draft-vocab", "280,290", *floors)
    assert code == 0, err
    for folder in sorted((tmp_path / "o").iterdir()):
        manifest = Artifact.load(folder).manifest
        assert sum(token >= 340 for token in manifest.rank_order_ids) >= 10
        assert [entry["source"] for entry in manifest.vocabulary["floors"]["held"]] == ["zh", "en"]
        assert {entry["source"]: entry["covered"] for entry in manifest.coverage_summary}["zh"] >= 0.5
    code, _, err = run(convert_command, *arguments[:-1], "no", "--draft-vocab", "262", "--floor", "zh=0.9")
    assert (code, "would do" in err) == (2, True)


def test_what_several_engines_make_of_a_head_is_said_once(tmp_path):
    head = write_eagle1(tmp_path / "head")
    done = convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "out")
    assert len([warning for warning in done.manifest.warnings if "full LM head" in warning]) == 1
    # A head written for one engine warns of that one alone.
    one = convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "one", flavour="sglang")
    assert not any("LLM" in warning or "LMDeploy" in warning for warning in one.manifest.warnings)


def test_contributing_lists_the_files_that_a_row_passes(run, tmp_path, target):
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text().split("### A row's way")[1].split("\n## ")[0]
    folders = dict(re.findall(r"^\* `([a-z.]+)`: (.*?)(?=^\* |\n\n)", page, re.DOTALL | re.MULTILINE))
    listed = {f"{folder}/{name}" for folder, names in folders.items() for name in re.findall(r"`(\w+\.py)`", names)}
    assert len(listed) <= 20
    head, passed = write_eagle3(tmp_path / "head", lm_head=False), set()
    sys.setprofile(lambda frame, event, arg: passed.add(frame.f_code.co_filename))
    try:
        code, _, err = run(convert_command, head, "--target", target, "--draft-vocab", "320", "--order", "ids")
    finally:
        sys.setprofile(None)
    assert code == 0, err
    missing = {name for name in listed if str(Path(pipeline.__file__).parent / name) not in passed}
    # Nothing of a target in a folder is fetched.
    assert missing == {"rows/hub_tensor.py"}
