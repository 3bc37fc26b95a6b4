"""DFlash drafts in both published forms: rows, map and configuration, cut again, audited, and refused by name."""

import numpy as np
import pytest
import torch
from eagle_slim.convert import Artifact, open_head, verify_artifact
from eagle_slim.convert.errors import CheckpointError, MismatchError, UnsupportedHeadError
from eagle_slim.convert.heads.dflash import QWEN3_DEFAULTS
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.vocab_tools.errors import UsageError
from safetensors.torch import load_file, save_file
from support.conversion import BY_ID, by_map, convert, convert_all
from support.heads import VOCAB, config_of, random, target_lm_head, trained_ids, write_dflash, write_json
from support.raising import raises_with
from support.tampering import change_config, change_tensors

FORMS = ("z-lab", "speculators", "dspark")
MARKOV = "markov_head.markov_w2.weight"
# Of 360 tokens 259 are forced: markers and bytes.
IDS = np.sort(np.concatenate([np.arange(259), 259 + np.random.default_rng(7).permutation(101)[:41]]))
OWN = trained_ids(340)


def read(folder):
    return config_of(folder), load_file(folder / "model.safetensors")


def failed(folder, **named):
    return [check.name for check in verify_artifact(folder, offline=True, **named).failed]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_the_target_and_a_map_are_all_that_is_added(tmp_path, target, form):
    draft = write_dflash(tmp_path / "draft", form)
    wanted = np.random.default_rng(1).permutation(IDS)
    done = convert(draft, draft_vocab=300, target=target, out=tmp_path / "slim", vocabulary=by_map(tmp_path, wanted))
    (before, old), (after, new) = read(draft), read(done.folder)
    ids = torch.from_numpy(new["d2t"].numpy() + np.arange(300))
    assert sorted(ids.tolist()) == ids.tolist() == IDS.tolist()
    assert new["lm_head.weight"].equal(target_lm_head(target)[ids])
    assert new["t2d"].nonzero().flatten().equal(ids)
    cut = {MARKOV: old[MARKOV][ids]} if form == "dspark" else {}
    expected = old | cut
    assert set(new) == set(expected) | {"lm_head.weight", "d2t", "t2d"}
    assert all(new[name].equal(tensor) for name, tensor in expected.items())
    assert after == {key: value for key, value in before.items() if key != "auto_map"} | {"draft_vocab_size": 300}
    manifest = Artifact.load(done.folder).manifest
    assert (manifest.kind, manifest.tap_layers, manifest.target_vocab) == ("dflash", (2, 4, 6), VOCAB)
    assert manifest.rank_order_ids is not None
    assert np.sort(manifest.rank_order_ids).tolist() == IDS.tolist()
    assert done.bytes_before - done.bytes_after == (VOCAB - 300) * (64 + (8 if form == "dspark" else 0))
    assert failed(done.folder, head=draft, target=target) == []
    assert 'serve TARGET --speculative-config \'{"method": "dflash"' in (done.folder / "README.md").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_with_a_map_is_cut_again_and_sizes_nest(tmp_path, target, form):
    draft = write_dflash(tmp_path / "draft", form, ids=OWN)
    large, small = convert_all(draft, draft_vocab=[320, 300], target=target, out=tmp_path / "both", vocabulary=BY_ID)
    again = convert(large.folder, draft_vocab=300, target=target, out=tmp_path / "again")
    (_, old), (_, first), (_, second) = read(draft), read(small.folder), read(again.folder)
    assert all(second[name].equal(tensor) for name, tensor in first.items())
    rows = np.searchsorted(OWN, first["d2t"].numpy() + np.arange(300))
    assert first["lm_head.weight"].equal(old["lm_head.weight"][rows])
    assert failed(small.folder, head=draft, target=target) == failed(again.folder, head=large.folder) == []


def test_dspark_in_speculators_form_is_cut_too(tmp_path, target):
    markov = {"markov_head.markov_w1.weight": random((VOCAB, 4), 1), MARKOV: random((VOCAB, 4), 2)}
    draft = write_dflash(tmp_path / "draft", "speculators", extra=markov, speculators_model_type="dspark")
    slim = convert(draft, draft_vocab=300, target=target, out=tmp_path / "slim", vocabulary=BY_ID).folder
    config, tensors = read(slim)
    assert tensors[MARKOV].equal(markov[MARKOV][tensors["t2d"]])
    assert config["speculators_model_type"] == "dspark"
    assert failed(slim, head=draft, target=target) == []


def test_the_audit_sees_what_was_changed(tmp_path, target):
    draft = write_dflash(tmp_path / "draft", "dspark")
    slim = convert(draft, draft_vocab=300, target=target, out=tmp_path / "slim", vocabulary=BY_ID).folder
    change_config(slim, lambda config: config.update(target_layer_ids=[1, 3, 4]))
    assert "tap layers in config" in failed(slim, head=draft, target=target)
    change_tensors(slim, lambda tensors: tensors.update({MARKOV: tensors[MARKOV].roll(1, 0)}))
    assert "tensors of the source head" in failed(slim, head=draft, target=target)


def test_what_is_no_plain_draft_is_refused_by_name(tmp_path, target):
    def refuses(error, *words, form="z-lab", **changes):
        with raises_with(error, *words):
            open_head(write_dflash(tmp_path / "draft", form, **changes))

    refuses(UnsupportedHeadError, "another form", architectures=["DFlash2DraftModel"])
    refuses(UnsupportedHeadError, "another form", form="speculators", speculators_model_type="dflash2")
    refuses(UnsupportedHeadError, "no place in a DFlash draft", "conv", extra={"layers.0.conv.weight": random((2,), 1)})
    refuses(UnsupportedHeadError, "gate_proj", form="dspark", extra={"markov_head.gate_proj.weight": random((4, 4), 1)})
    refuses(UnsupportedHeadError, "quantised", quantization_config={"quant_method": "fp8"})
    refuses(MismatchError, "num_hidden_layers is 3", num_hidden_layers=3)
    for key in ("num_hidden_layers", "intermediate_size", "hidden_size"):
        for value in (None, "2"):
            refuses(MismatchError, f"{key}: expected a positive integer", **{key: value})
    for flag in ({"projector_type": "domino"}, {"conv_kernel_size": 4}, {"selector_rank": 8}):
        config = {"target_layer_ids": [1, 3, 5], **flag}
        refuses(UnsupportedHeadError, f"dflash_config.{next(iter(flag))} is", dflash_config=config)
    refuses(MismatchError, "fc.weight", dflash_config={"target_layer_ids": [1, 2]})
    refuses(MismatchError, "target_layer_ids", dflash_config={"target_layer_ids": "all"})
    refuses(MismatchError, "q_proj", num_attention_heads=8)
    refuses(MismatchError, "target_layer_ids", form="dspark", target_layer_ids=...)
    for mask in (VOCAB, -1, "mask"):
        refuses(MismatchError, "mask_token_id", dflash_config={"mask_token_id": mask, "target_layer_ids": [1, 3, 5]})
        for form in ("speculators", "dspark"):
            refuses(MismatchError, "mask_token_id", form=form, mask_token_id=mask)
    folder = write_dflash(tmp_path / "draft")
    with raises_with(MismatchError, "--tap-layers"):
        open_head(folder, tap_layers=(1, 2, 3))
    with raises_with(UsageError, "borrows the target's whole LM head", "--draft-vocab"):
        convert(folder, draft_vocab="full", target=target, out=tmp_path / "full")
    with raises_with(UsageError, "--for"):
        convert(folder, draft_vocab=300, target=target, flavour="lmdeploy", out=tmp_path / "flavour", vocabulary=BY_ID)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with raises_with(UnsupportedHeadError, "mask_embedding.pt"):
        open_head(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "mask_embedding.pt").unlink()
    with raises_with(CheckpointError, "a DFlash draft needs", "layers.1.self_attn.k_norm.weight"):
        open_head(folder)


def test_speculators_leaves_out_the_defaults_of_qwen3(tmp_path):
    from transformers import Qwen3Config

    defaults = Qwen3Config().to_dict()
    assert {key: defaults[key] for key in QWEN3_DEFAULTS} == QWEN3_DEFAULTS
    folder = write_dflash(tmp_path / "draft", "speculators")
    config, _ = read(folder)
    del config["transformer_layer_config"]["head_dim"]
    write_json(folder / "config.json", config)
    with raises_with(MismatchError, "q_proj", "[512, 32]"):
        open_head(folder)


def test_our_runtime_refuses_to_draft_before_it_loads_anything(tmp_path):
    folder = write_dflash(tmp_path / "draft")
    with raises_with(UnsupportedHeadError, "DFlash draft", "method dflash"):
        # A target that is not there: nothing of it is looked at.
        SpeculativeModel.from_pretrained(head=folder, target=tmp_path / "none")
