"""Verification finds every fault by the check that is meant for it, even where the manifest was signed again."""

import json
import shutil

import pytest
import torch
from eagle_slim.convert import Artifact, ArtifactError, CheckpointError, open_head, verify_artifact
from eagle_slim.convert.rows.files import SafetensorsFile
from eagle_slim.convert.sources.builtin import EMBEDDED_HEAD_NAME
from safetensors.torch import load_file
from support.conversion import BY_ID, convert, convert_all
from support.heads import HIDDEN, VOCAB, write_eagle1, write_eagle3, write_freq, write_target, write_tensors
from support.tampering import change_config, change_manifest, change_tensors, flip_bit, sign_file

LM_HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    target = write_target(root / "target")
    head = write_eagle3(root / "head", lm_head=False, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=root / "slim")
    return root


@pytest.fixture
def slim(made, tmp_path):
    return shutil.copytree(made / "slim", tmp_path / "slim")


def verify(folder, made):
    return verify_artifact(folder, head=made / "head", target=made / "target")


def swap_rows(tensors):
    tensors["lm_head.weight"][[3, 9]] = tensors["lm_head.weight"][[9, 3]]


def by_frequency(tensors):
    """The order that ModelOpt writes: rows and map together, ids no longer ascending."""
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = ids[order] - torch.arange(len(ids))


def other_mask(tensors):
    first = int(tensors["t2d"].nonzero()[0])
    last = int((~tensors["t2d"]).nonzero()[-1])
    tensors["t2d"][first], tensors["t2d"][last] = False, True


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        (lambda t: t.pop("d2t"), {"tensor names", "d2t", "config values"}),
        (lambda t: t.pop("t2d"), {"tensor names", "t2d"}),
        (lambda t: t.pop("lm_head.weight"), {"tensor names", "lm_head rows", "config values"}),
        (lambda t: t.pop("norm.weight"), {"tensor names", "config values"}),
        (lambda t: t.update(frequencies=torch.ones(3)), {"tensor names"}),
        (lambda t: t.update({"fc.bias": torch.zeros(HIDDEN, dtype=torch.bfloat16)}), {"tensor names"}),
        (lambda t: t["d2t"].add_(torch.arange(320)), {"d2t"}),
        (lambda t: t["d2t"][10].copy_(t["d2t"][9] - 1), {"d2t"}),
        (by_frequency, {"d2t", "lm_head rows"}),
        (lambda t: t.update(d2t=t["d2t"].int()), {"d2t"}),
        (lambda t: t.update(d2t=t["d2t"].bfloat16(), t2d=t["t2d"].bfloat16()), {"d2t", "t2d", "config values"}),
        (other_mask, {"t2d"}),
        (swap_rows, {"lm_head rows", "lm_head rows of the source"}),
        (lambda t: t[LM_HEAD][7].fill_(float("nan")), {"finite values", "lm_head rows", "lm_head rows of the source"}),
        (lambda t: t.update({LM_HEAD: t[LM_HEAD][:-1]}), {"lm_head rows", "config values"}),
        (lambda t: t["midlayer.mlp.up_proj.weight"].add_(1), {"tensors of the source head"}),
        # The same bytes under another dtype.
        (lambda t: t.update({"norm.weight": t["norm.weight"].view(torch.float16)}), {"tensors of the source head"}),
    ],
)
def test_faults_of_tensors(slim, made, change, failing):
    change_tensors(slim, change)
    failed = {check.name for check in verify(slim, made).failed}
    assert failing <= failed
    assert not failed & {"file checksums", "tensor checksums"}


@pytest.mark.parametrize("cast", [None, torch.Tensor.float, lambda rows: rows.view(torch.float16)])
def test_rows_that_were_swapped_or_cast_and_signed_are_found_at_the_source(slim, made, cast):
    change = swap_rows if cast is None else lambda tensors: tensors.update({LM_HEAD: cast(tensors[LM_HEAD])})
    change_tensors(slim, change, sign_rows=True)
    (failed,) = verify(slim, made).failed
    told = "the first is row 3" if cast is None else "'BF16', (320, 32)"
    assert (failed.name, told in failed.detail) == ("lm_head rows of the source", True)


VALUES = {"tie_word_embeddings": True, "bias": True, "draft_vocab_size": 319, "vocab_size": VOCAB + 1}
VALUES |= {"architectures": ["LlamaForCausalLM"], "target_hidden_size": HIDDEN, "norm_before_fc": True}
FAULTS = [({key: value}, "config values") for key, value in VALUES.items()]
FAULTS += [({"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}, "tap layers in config")]
# What only the source tells.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
FAULTS += [(changes, "config of the source head") for changes in ({"rope_theta": 500000.0}, HEADS, {"surprise": 1})]


@pytest.mark.parametrize(("changes", "failing"), FAULTS)
def test_faults_of_the_configuration(slim, made, changes, failing):
    change_config(slim, lambda config: config.update(changes))
    result = verify(slim, made)
    assert failing in {check.name for check in result.failed}
    assert result["file checksums"].status == "ok"


def test_tampered_bytes_are_found_by_checksum(slim, made):
    path = slim / "model.safetensors"
    flip_bit(path, -1)
    # As long as it was.
    (slim / "config.json").write_text((slim / "config.json").read_text().removesuffix("\n") + " ")
    # The model card may be edited.
    (slim / "README.md").write_text("another")
    result = verify(slim, made)
    assert result["tensor checksums"].status == "failed"
    assert result["file checksums"].detail == "config.json is not as it was written"
    flip_bit(path, 20)
    assert not verify(slim, made).ok


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "hf_quant_config.json"],
)
def test_weights_that_an_engine_may_read_instead(slim, made, name):
    (slim / "notes.txt").write_bytes(b"x")
    assert verify(slim, made).ok
    (slim / name).write_bytes(b"x")
    found = verify(slim, made)["stray files"]
    assert (found.status, name in found.detail) == ("failed", True)


def swap_last_rank(manifest):
    """Put an id into the ranks that is not in the map, in the place of the last."""
    ranks = manifest["rank_order_ids"]
    ranks[-1] = next(token_id for token_id in range(VOCAB) if token_id not in ranks)


def test_manifest_faults(slim, made):
    whole = (slim / "eagle_slim.json").read_bytes()
    for change, failing in (
        (lambda manifest: manifest["rank_order_ids"].reverse(), ["ranks", "freq_N.pt"]),
        (swap_last_rank, ["ranks", "freq_N.pt"]),
        (lambda manifest: manifest.update(rank_order_ids=None), ["manifest"]),
        (lambda manifest: manifest["target"].update(num_hidden_layers=9), ["target"]),
        (lambda manifest: manifest["files"].pop("config.json"), ["file checksums"]),
        (lambda manifest: manifest["files"]["model.safetensors"].update(size_bytes=1), ["tensor checksums"]),
        (lambda manifest: manifest["files"].pop("freq_320.pt"), ["file checksums"]),
    ):
        change_manifest(slim, change)
        assert [check.name for check in verify(slim, made).failed] == failing
        (slim / "eagle_slim.json").write_bytes(whole)
    (slim / "eagle_slim.json").write_text("{")
    result = verify(slim, made)
    assert [check.name for check in result.failed] == ["manifest"]
    assert result["d2t"].status == "skipped"


def test_token_map_faults(slim, made):
    ids = torch.load(slim / "freq_320.pt", weights_only=True)
    write_freq(slim / "freq_320.pt", ids[::-1])
    sign_file(slim, "freq_320.pt")
    assert [check.name for check in verify(slim, made).failed] == ["freq_N.pt"]
    content = (slim / "freq_320.pt").read_bytes()
    # One flipped bit makes torch raise an IndexError.
    for damaged in (b"not a pickle", b"", bytes([content[0] ^ 1]) + content[1:]):
        (slim / "freq_320.pt").write_bytes(damaged)
        sign_file(slim, "freq_320.pt")
        found = verify(slim, made)["freq_N.pt"]
        assert (found.status, "freq_320.pt: " in found.detail) == ("failed", True)


@pytest.mark.parametrize(("positions", "is_short"), [(1024, True), (1025, False)])
def test_positions_far_below_the_targets(tmp_path, positions, is_short):
    target, head = write_target(tmp_path / "target"), write_eagle3(tmp_path / "head")
    for folder, size in ((target, 4096), (head, positions)):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": size}))
    done = convert(head, draft_vocab=320, vocabulary=BY_ID, target=target, out=tmp_path / "slim")
    found = verify_artifact(done.folder, target=target)["target"]
    assert found.status == ("warning" if is_short else "ok")
    for words in ([found.detail], done.manifest.warnings):
        told = " ".join(words)
        assert ("is 1024, the target's 4096" in told) == is_short
        assert ("--speculative-draft-window-size 1024" in told) == is_short


def test_target_and_tokenizer_that_do_not_fit(slim, made, tmp_path):
    from support.small_tokenizers import byte_level_bpe, write_folder

    wide = write_target(tmp_path / "wide", hidden=48)
    assert verify_artifact(slim, target=wide)["target"].status == "failed"
    other = write_folder(tmp_path / "other", byte_level_bpe(350))
    assert verify_artifact(slim, tokenizer=other)["tokenizer"].status == "failed"
    own = verify_artifact(slim, tokenizer=made / "target")
    assert own.ok
    assert own["lm_head rows of the source"].status == "skipped"


def test_what_is_not_at_hand_is_skipped_with_the_reason(slim):
    result = verify_artifact(slim)
    assert result.ok
    skipped = {check.name: check.detail for check in result.checks if check.status == "skipped"}
    of_the_source = {"tensors of the source head", "config of the source head", "lm_head rows of the source"}
    assert set(skipped) == {*of_the_source, "target", "tokenizer"}
    assert all("--" in reason for reason in skipped.values())


def test_what_was_named_and_is_not_there_fails_offline_too(slim, tmp_path):
    of_the_head = ["tensors of the source head", "config of the source head"]
    for named, checks in (("head", of_the_head), ("target", ["target"]), ("tokenizer", ["tokenizer"])):
        result = verify_artifact(slim, offline=True, **{named: tmp_path / "nope"})
        assert [found.name for found in result.failed] == checks


def test_faults_of_an_eagle1_artifact(made, tmp_path):
    head = write_eagle1(tmp_path / "head")
    slim = convert(head, draft_vocab=300, vocabulary=BY_ID, target=made / "target", out=tmp_path / "slim").folder
    for vocab, failing in ((VOCAB + 1, ["config values"]), (VOCAB, [])):
        change_manifest(slim, lambda manifest, vocab=vocab: manifest.update(target_vocab=vocab))
        assert [check.name for check in verify_artifact(slim).failed] == failing
    change_tensors(slim, lambda tensors: tensors.pop("fc.bias"))
    change_config(slim, lambda config: config.update(bias=True))
    assert [check.name for check in verify_artifact(slim).failed] == ["tensor names", "config values"]


def test_a_source_head_without_an_lm_head_is_not_where_rows_came_from(made, tmp_path):
    full = write_eagle3(tmp_path / "full", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    done = convert_all(full, draft_vocab=320, vocabulary=BY_ID, target=made / "target", out=tmp_path / "out")
    result = verify_artifact(done[0].folder, head=made / "head", target=made / "target")
    assert [check.name for check in result.checks if check.status == "failed"] == ["lm_head rows of the source"]


@pytest.mark.parametrize("damaged", ["a row", "a layer", "the header", "config.json"])
def test_what_reads_an_artifact_checks_the_bytes_that_it_takes(slim, made, tmp_path, damaged):
    weights = SafetensorsFile(slim / "model.safetensors")
    names = {"a row": "lm_head.weight", "a layer": "midlayer.mlp.up_proj.weight"}
    if damaged == "config.json":
        change = (slim / "config.json").read_text().replace("10000.0", "20000.0")
        (slim / "config.json").write_text(change)
    else:
        flip_bit(weights.path, weights.offset(names[damaged]) if damaged in names else weights.data_offset - 1)
    with pytest.raises(CheckpointError, match=r"(manifest beside it records|not a sound safetensors file)"):
        convert(slim, draft_vocab=300, out=tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(CheckpointError):
        open_head(slim).tensors.get(names.get(damaged, "lm_head.weight"))


def test_an_artifact_that_was_cut_into_shards_is_none(slim, tmp_path):
    tensors = load_file(slim / "model.safetensors")
    (slim / "model.safetensors").unlink()
    write_tensors(slim, tensors, "sharded")
    with pytest.raises(CheckpointError, match="manifest beside it records"):
        open_head(slim)


def load_fails(slim, match):
    with pytest.raises(ArtifactError, match=match):
        Artifact.load(slim)


def test_what_cannot_be_loaded(slim, made, tmp_path):
    load_fails(made / "head", r"no eagle_slim\.json")
    path = slim / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    load_fails(slim, "expected 50624 bytes, found 50623")
    with pytest.raises(ArtifactError, match="no such folder"):
        verify_artifact(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", "other", "format"),
        ("format_version", 2, "format_version 2"),
        ("draft_vocab", "320", "draft_vocab: .* found str"),
        ("draft_vocab", 319, "rank_order_ids: .* found 320"),
        ("target_vocab", 2**40, "target_vocab of 1099511627776"),
        ("rank_order_ids", [1.5] * 320, "rank_order_ids"),
        ("rank_order_ids", [2**70] * 320, "rank_order_ids"),
        ("row_checksums", "AAAA", "row_checksums"),
        ("num_forced", 321, "num_forced"),
        ("kind", "medusa", "kind"),
        ("files/README.md", None, "files: README.md"),
        ("files/model.safetensors/tensors", 5, "tensors"),
        ("vocabulary/forced", {"one": ""}, "forced"),
        ("vocabulary/sources", [7], "vocabulary.*sources"),
        ("vocabulary/counted_ids", "many", "vocabulary.*counted_ids"),
        ("head/repo_id", 7, "head.*repo_id"),
        ("head/subfolder", {}, "head.*subfolder"),
        ("target/repo_id", 7, "target.*repo_id"),
        ("target/wheel", [1], "target.*wheel"),
        ("tokenizer/hash", 1.5, "tokenizer.*hash"),
        ("tap_layers", ["2"], "tap_layers"),
        ("warnings", [7], "warnings"),
    ],
)
def test_manifests_that_cannot_be_loaded(slim, path, value, named):
    *outer, last = path.split("/")

    def damage(manifest):
        for key in outer:
            manifest = manifest[key]
        manifest[last] = value

    change_manifest(slim, damage)
    load_fails(slim, named)
    assert [check.name for check in verify_artifact(slim, offline=True).failed] == ["manifest"]


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("target_vocab", VOCAB + 1, "vocab_size is 384, the manifest says 385"),
        ("rank_order_ids", [*range(64, 384)], "name different ids"),
        ("rank_order_ids", [*range(319), 0], "holds an id twice"),
    ],
)
def test_manifests_that_do_not_fit_the_files(slim, name, value, named):
    change_manifest(slim, lambda manifest: manifest.update({name: value}))
    load_fails(slim, named)


def test_a_folder_of_the_built_in_heads_name_is_not_taken_for_it(made, tmp_path):
    head = shutil.copytree(made / "head", tmp_path / EMBEDDED_HEAD_NAME)
    done = convert(head, draft_vocab=320, vocabulary=BY_ID, target=made / "target", out=tmp_path / "own")
    assert verify_artifact(done.folder)["tensors of the source head"].status == "skipped"
