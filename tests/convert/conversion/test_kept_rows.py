"""Rows kept beyond the draft vocabulary: what is written, what may join later, and every refusal."""

import fnmatch
import json
import shutil

import numpy as np
import pytest
import torch
from eagle_slim.convert import (
    Artifact,
    ArtifactError,
    CheckpointError,
    ConvertOptions,
    Manifest,
    open_head,
    prepare_conversion,
    push_folder,
    verify_artifact,
)
from eagle_slim.convert.head.kept_rows import KEPT_ROWS_NAME, with_kept_rows
from eagle_slim.vocab_tools.errors import UsageError
from safetensors.torch import load, load_file, save
from support.conversion import BY_ID, by_map, convert
from support.heads import (
    HIDDEN,
    VOCAB,
    eagle3_tensors,
    target_lm_head,
    trained_ids,
    write_eagle1,
    write_eagle3,
    write_target,
)
from support.hub_server import HubServer, connected
from support.raising import raises
from support.tampering import change_manifest

RANKED = [2, 0, 1, 300, 17, 44, 4, 359, 100, 9, 250, 61]
# What vLLM and SGLang (`_prepare_weights`), TensorRT-LLM (`HfWeightLoader`), LMDeploy, transformers, llama.cpp and
# SafeAILab load or fetch weights, configurations and tokenizers by.
ENGINE_PATTERNS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json", "*.model", "*.py", "*.txt", "consolidated*",
    "model*", "pytorch_model*", "*.index.json", "tokenizer*",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A full head, slimmed to 5 rows with 10 at hand."""
    root = tmp_path_factory.mktemp("kept")
    head = write_eagle3(root / "head")
    done = convert(head, draft_vocab=5, keep_rows=10, vocabulary=by_map(root, RANKED), out=root / "slim")
    assert (done.num_kept, done.kept_bytes) == (5, (root / "slim" / KEPT_ROWS_NAME).stat().st_size)
    return root


@pytest.fixture
def slim(made, tmp_path):
    return shutil.copytree(made / "slim", tmp_path / "slim")


def test_rows_and_ids_are_written_in_rank_order_and_engines_see_what_they_saw(made, tmp_path):
    kept = load((made / "slim" / KEPT_ROWS_NAME).read_bytes())
    assert kept["target_ids"].tolist() == RANKED[5:10]
    assert torch.equal(kept["lm_head.weight"], eagle3_tensors(rows=VOCAB)["lm_head.weight"][RANKED[5:10]])
    manifest = Manifest.load(made / "slim")
    assert manifest.ranks.target_ids.tolist() == RANKED[:5]
    assert manifest.ranks_with_kept.target_ids.tolist() == RANKED[:10]
    # All that an engine reads is what it is without kept rows.
    convert(made / "head", draft_vocab=5, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "alone")
    for name in ("model.safetensors", "config.json", "freq_5.pt"):
        assert (made / "slim" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert "kept_rows" not in json.loads((tmp_path / "alone" / "eagle_slim.json").read_text())
    assert Artifact.load(made / "slim").head.draft_vocab == 5
    assert f"`{KEPT_ROWS_NAME}`" in (card := (made / "slim" / "README.md").read_text())
    assert "the next 5 tokens by rank" in card


def test_no_engine_looks_for_a_file_of_that_name():
    for name in (KEPT_ROWS_NAME, f"folder/{KEPT_ROWS_NAME}"):
        assert [pattern for pattern in ENGINE_PATTERNS if fnmatch.fnmatch(name, pattern)] == []


def test_a_plan_says_what_they_add(made, tmp_path):
    common = {"vocabulary": by_map(tmp_path, RANKED), "out": tmp_path / "out"}
    plan, other = prepare_conversion(made / "head", ConvertOptions([5, 8], keep_rows=10, **common)).plans
    assert (plan.num_kept, plan.kept_bytes) == (5, 5 * (2 * HIDDEN + 8))
    assert (other.num_kept, other.kept_bytes) == (2, 2 * (2 * HIDDEN + 8))
    (whole,) = prepare_conversion(made / "head", ConvertOptions(5, keep_rows="full", **common)).plans
    ranked = convert(made / "head", draft_vocab=5, keep_rows="full", **common)
    assert (whole.num_kept, whole.kept_bytes) == (ranked.num_kept, ranked.num_kept * (2 * HIDDEN + 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_target_are_rounded_as_the_others_are(tmp_path, dtype):
    target = write_target(tmp_path / "target", dtype=dtype)
    head = write_eagle3(tmp_path / "head", lm_head=False)
    done = convert(head, draft_vocab=320, keep_rows="full", target=target, out=tmp_path / "slim", vocabulary=BY_ID)
    kept = load((done.folder / KEPT_ROWS_NAME).read_bytes())
    ids = kept["target_ids"]
    assert len(ids) == 360 - 320
    assert torch.equal(kept["lm_head.weight"], target_lm_head(target)[ids].to(torch.bfloat16))
    result = verify_artifact(done.folder, head=head, target=target)
    assert result.ok
    assert result["kept rows of the source"].status == "ok"


@pytest.mark.parametrize("ascending", [True, False])
def test_a_mapped_head_keeps_all_that_it_was_trained_on_and_no_more(tmp_path, ascending):
    ids = trained_ids(ascending=ascending)
    head = write_eagle3(tmp_path / "head", ids=ids)
    request = by_map(tmp_path, [2, 0, 1, *[i for i in range(3, 360) if i in ids]])
    done = convert(head, draft_vocab=20, keep_rows=200, vocabulary=request, out=tmp_path / "slim")
    assert sorted(done.manifest.ranks_with_kept.target_ids.tolist()) == sorted(ids.tolist())
    assert verify_artifact(done.folder, head=head)["kept rows of the source"].status == "ok"
    with raises(UsageError, option="--keep-rows", most=200):
        convert(head, draft_vocab=20, keep_rows=201, vocabulary=request, out=tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_slimming_again_uses_kept_rows_up_to_what_is_there(made, tmp_path):
    direct = by_map(tmp_path, RANKED)
    said = []
    for size in (3, 5, 8, 10):
        again = convert(made / "slim", draft_vocab=size, out=tmp_path / f"again{size}", say=said.append)
        convert(made / "head", draft_vocab=size, vocabulary=direct, out=tmp_path / f"direct{size}")
        both = [load_file(tmp_path / f"{how}{size}" / "model.safetensors") for how in ("again", "direct")]
        assert all(torch.equal(both[0][name], both[1][name]) for name in both[1])
        assert again.manifest.rank_order_ids.tolist() == RANKED[:size]
        assert (again.rows_before, again.num_kept) == (5, 0)
        assert verify_artifact(again.folder, head=made / "slim").ok
    assert any("not kept again without --keep-rows" in message for message in said)
    assert "grown from 5 to 8" in (tmp_path / "again8" / "README.md").read_text()
    for size, kept, wanted in ((11, None, 11), (4, 12, 12), ("full", None, VOCAB)):
        with raises(UsageError, size=wanted, rows=10) as caught:
            convert(made / "slim", draft_vocab=size, keep_rows=kept, out=tmp_path / "more")
        assert "Convert head, which it was made from" in str(caught.value)
        assert "trained" not in str(caught.value)
    passed_on = convert(made / "slim", draft_vocab=4, keep_rows=10, out=tmp_path / "passed")
    assert passed_on.manifest.kept_rows.rank_order_ids.tolist() == RANKED[4:10]
    # Another ranking chooses among all rows that are there.
    other = by_map(tmp_path, [9, 359, 2, 0, 1])
    ranked = convert(made / "slim", draft_vocab=2, vocabulary=other, out=tmp_path / "other")
    assert ranked.manifest.rank_order_ids.tolist() == [9, 359]
    # What it leaves out keeps the order that it had.
    all_kept = convert(made / "slim", draft_vocab=2, keep_rows=9, vocabulary=other, out=tmp_path / "kept")
    assert all_kept.manifest.kept_rows.rank_order_ids.tolist() == [2, 0, 1, 300, 17, 44, 4]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"draft_vocab": 5, "keep_rows": 5}, {"least": 6}),
        ({"draft_vocab": [3, 8], "keep_rows": 6}, {"least": 9}),
        ({"draft_vocab": 5, "keep_rows": VOCAB + 1}, {"most": VOCAB}),
        ({"draft_vocab": 5, "keep_rows": 13}, {"most": 12}),
        ({"draft_vocab": 5, "keep_rows": 0}, {"found": 0}),
        ({"draft_vocab": "full", "keep_rows": 10}, {}),
    ],
)
def test_numbers_that_cannot_be(made, tmp_path, arguments, facts):
    with raises(UsageError, option="--keep-rows", **facts):
        convert(made / "head", vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_an_eagle_1_head_needs_none(tmp_path):
    head = write_eagle1(tmp_path / "eagle1")
    with raises(UsageError, option="--keep-rows"):
        convert(head, draft_vocab=5, keep_rows=10, vocabulary=by_map(tmp_path, RANKED), out=tmp_path / "out")


def rewritten(folder, change):
    path = folder / KEPT_ROWS_NAME
    tensors = load(path.read_bytes())
    change(tensors)
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}))


def swap(tensors):
    tensors["lm_head.weight"][[0, 1]] = tensors["lm_head.weight"][[1, 0]]


def nan(tensors):
    tensors["lm_head.weight"][2, 3] = float("nan")


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        (swap, {"kept rows: checksums", "kept rows of the source"}),
        (nan, {"kept rows: checksums", "kept rows of the source"}),
        (lambda t: t["target_ids"].copy_(t["target_ids"].flip(0)), {"kept rows"}),
        (lambda t: t.update(more=torch.ones(2)), {"kept rows"}),
        (lambda t: t.pop("target_ids"), {"kept rows"}),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:4]}), {"kept rows"}),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()}), {"kept rows"}),
    ],
)
def test_tampered_rows_are_found(made, slim, change, failing):
    rewritten(slim, change)
    failed = {check.name for check in verify_artifact(slim, head=made / "head").failed}
    assert failing <= failed
    assert all(name.startswith("kept rows") for name in failed)


def test_tampered_bytes_that_were_signed_again_are_found_at_the_source(made, slim):
    rewritten(slim, swap)

    def sign(manifest):
        import hashlib

        from eagle_slim.convert.artifact.checksums import encode_checksums, row_checksums

        data = (slim / KEPT_ROWS_NAME).read_bytes()
        rows = load(data)["lm_head.weight"]
        manifest["files"][KEPT_ROWS_NAME]["tensors"]["lm_head.weight"] = hashlib.sha256(
            rows.view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        raw = rows.view(torch.uint8).numpy().reshape(len(rows), -1)
        manifest["kept_rows"]["row_checksums"] = encode_checksums(row_checksums(raw))

    change_manifest(slim, sign)
    result = verify_artifact(slim, head=made / "head")
    assert [check.name for check in result.failed] == ["kept rows of the source"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m["kept_rows"]["rank_order_ids"].__setitem__(0, RANKED[0]), "an id is ranked and kept"),
        (lambda m: m["kept_rows"]["rank_order_ids"].__setitem__(0, VOCAB), "outside the vocabulary"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_not_loaded(slim, change, problem):
    change_manifest(slim, change)
    with pytest.raises(ArtifactError) as refused:
        Artifact.load(slim)
    assert problem in refused.value.facts["problem"]
    assert "kept rows" in {check.name for check in verify_artifact(slim).failed}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(kept_rows=[1]),
        lambda m: m["kept_rows"].update(rank_order_ids=[1.5]),
        lambda m: m["kept_rows"].update(rank_order_ids=[2**70]),
        lambda m: m["kept_rows"].update(rank_order_ids=[]),
        lambda m: m["kept_rows"].update(row_checksums="AAAA"),
        lambda m: m["kept_rows"].pop("row_checksums"),
    ],
)
def test_a_damaged_part_of_the_manifest(slim, change):
    change_manifest(slim, change)
    with raises(ArtifactError, path=str(slim / "eagle_slim.json")):
        Manifest.load(slim)


def test_a_file_that_is_missing_or_damaged_or_of_another_head(made, slim):
    head = open_head(slim)
    joined = with_kept_rows(head)
    assert joined.draft_vocab == 10
    rows = joined.tensors.rows("lm_head.weight", np.array([7, 0, 9]))
    source = eagle3_tensors(rows=VOCAB)["lm_head.weight"]
    assert torch.equal(rows, source[joined.draft_ids_to_target[[7, 0, 9]]])
    assert torch.equal(joined.tensors.get("lm_head.weight"), source[joined.draft_ids_to_target])
    (slim / KEPT_ROWS_NAME).write_bytes(b"\0" * 40)
    with raises(CheckpointError):
        with_kept_rows(head)
    (slim / KEPT_ROWS_NAME).unlink()
    with raises(ArtifactError, file=KEPT_ROWS_NAME):
        with_kept_rows(head)
    assert verify_artifact(slim)["kept rows"].status == "failed"
    # What drafts without them still loads.
    assert Artifact.load(slim).head.draft_vocab == 5
    assert with_kept_rows(open_head(made / "head")).draft_vocab == VOCAB


# huggingface_hub uploads with an argument that its HTTP library calls old.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_from_the_hub_they_are_fetched_when_they_are_wanted(made, tmp_path):
    with HubServer() as hub, connected(hub, tmp_path / "home", token="hf_good"):
        push_folder(made / "slim", "tester/slim")
        assert hub.repo("tester/slim").files[KEPT_ROWS_NAME] == (made / "slim" / KEPT_ROWS_NAME).read_bytes()
        hub.reset_counts()
        convert("tester/slim", draft_vocab=4, out=tmp_path / "four")
        assert hub.bytes_sent(KEPT_ROWS_NAME) == 0
        done = convert("tester/slim", draft_vocab=8, out=tmp_path / "eight")
        assert hub.bytes_sent(KEPT_ROWS_NAME) > 0
        assert done.manifest.rank_order_ids.tolist() == RANKED[:8]
