"""Heads and targets from folders and from a Hub, through the real huggingface_hub; every failure says what to do."""

import json
import time

import huggingface_hub
import pytest
import torch
from eagle_slim.convert import CheckpointError, SourceError, UnsupportedHeadError, open_checkpoint, open_head
from eagle_slim.convert.sources.source import open_head_source, target_files
from eagle_slim.vocab_tools.errors import UsageError
from huggingface_hub import constants
from safetensors.torch import save
from support.heads import eagle3_config, eagle3_tensors
from support.hub_server import Fault, HubServer, connected
from support.raising import raises, raises_hub_error, raises_with
from support.tampering import flip_bit

WEIGHTS = {"fc.weight": torch.arange(12.0).reshape(3, 4)}
API = "/api/models/org/head"
FAULTS = {
    "silent": (API, Fault(silent=True), "unreachable"),
    "dropped": (API, Fault(unanswered=True), "unreachable"),
    "quota": (API, Fault(status=402), "refused"),
    "login page": (API, Fault(answer=b"<!DOCTYPE html><html><title>Log in</title></html>"), "unreachable"),
    "no commit": (API, Fault(answer={"id": "org/head", "siblings": []}), "unreachable"),
    "a file that breaks off": ("config.json", Fault(break_after=1), "unreachable"),
    "a file of another size": ("model.safetensors", Fault(extra_bytes=7), "disk"),
}


@pytest.fixture
def hub():
    with HubServer() as hub:
        files = {
            "config.json": '{"draft_vocab_size": 3}',
            "README.md": "---\nlicense: apache-2.0\n---\n",
            "model.safetensors": save(WEIGHTS),
            "pytorch_model.bin": b"never fetched",
            "optimizer.pt": b"large and useless" * 1000,
            "training/log.txt": "long",
        }
        hub.add_model("org/head", files, branch="v1")
        hub.add_model("org/head", files)
        hub.add_model("org/gated", files, gated=True)
        yield hub


@pytest.fixture
def home(hub, tmp_path):
    with connected(hub, tmp_path / "home"):
        yield tmp_path / "home"


def test_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(save(WEIGHTS))
    found = open_head_source(tmp_path)
    assert (found.folder, found.repo_id, found.commit) == (tmp_path, None, None)
    assert found.files == ("config.json", "model.safetensors")
    assert found.label == str(tmp_path)
    for opened in (open_head_source, target_files):
        with pytest.raises(SourceError, match="is a folder and has no revision 'main'"):
            opened(tmp_path, revision="main")


def test_paths_and_names_that_are_not_there():
    for name in ("./nothing", "/no/such/folder", "~no-such-user/x", "a/b/c", "", "two words", "x" * 200, __file__):
        with raises_with(SourceError, name):
            open_head_source(name)


def test_a_sub_folder_of_a_folder(tmp_path):
    for name in ("heads/a", "heads/b", ".git"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "heads" / "a" / "config.json").touch()
    found = open_head_source(tmp_path, subfolder="heads/a/")
    assert (found.folder, found.root, found.subfolder) == (tmp_path / "heads" / "a", tmp_path, "heads/a")
    assert found.files == ("config.json",)
    assert open_head_source(tmp_path / "heads", subfolder="") == open_head_source(tmp_path / "heads")
    with raises_with(SourceError, "c", "heads"):
        open_head_source(tmp_path, subfolder="c")


@pytest.mark.parametrize("name", ["..", "a/../../b", "/etc"])
def test_sub_folders_that_lead_out(hub, home, tmp_path, name):
    for head in (tmp_path, "org/head"):
        with raises(UsageError, option="--subfolder"):
            open_head_source(head, subfolder=name)
    assert hub.requests == []


def test_only_needed_files_of_a_head(hub, home):
    found = open_head_source("org/head")
    commit = hub.repos["model", "org/head"].branches["main"]
    assert (found.repo_id, found.commit, found.label) == ("org/head", commit, f"org/head@{commit[:12]}")
    assert sorted(path.name for path in found.folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert "optimizer.pt" in found.files
    assert torch.equal(open_checkpoint(found.folder).tensor("fc.weight"), WEIGHTS["fc.weight"])
    assert found.folder.is_relative_to(home / "hub")
    assert hub.bytes_sent(".safetensors") == len(save(WEIGHTS))
    assert hub.bytes_sent(".bin") == hub.bytes_sent(".pt") == 0
    hub.requests.clear()
    open_head_source("org/head")
    assert hub.bytes_sent(".safetensors") == 0


def test_a_flipped_bit_in_the_cache_of_the_hub_is_found_by_the_name_of_the_file(hub, home):
    whole = {"config.json": json.dumps(eagle3_config()), "model.safetensors": save(eagle3_tensors(rows=384))}
    hub.add_model("org/whole", whole)
    assert open_head("org/whole").kind == "eagle3"
    path = (open_head_source("org/whole").folder / "model.safetensors").resolve()
    flip_bit(path, -1)
    with raises_with(CheckpointError, "model.safetensors", "SHA-256"):
        open_head("org/whole")


def test_a_whole_model_is_refused_before_its_shards_are_fetched(hub, home):
    shards = {"model.embed_tokens.weight": "model-1-of-2.safetensors", "lm_head.weight": "model-2-of-2.safetensors"}
    files = {"config.json": "{}", "model.safetensors.index.json": json.dumps({"weight_map": shards})}
    files |= {shard: save({name: torch.zeros(4)}) for name, shard in shards.items()}
    hub.add_model("org/model", files)
    with pytest.raises(UnsupportedHeadError, match="neither an EAGLE-3 head"):
        open_head_source("org/model")
    assert hub.bytes_sent("of-2.safetensors") == 0


def test_sharded_head(hub, home):
    tensors = eagle3_tensors(rows=None)
    last = tensors.popitem()
    index = {"weight_map": dict.fromkeys(tensors, "model-1-of-2.safetensors") | {last[0]: "model-2-of-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1-of-2.safetensors": save(tensors),
        "model-2-of-2.safetensors": save(dict([last])),
        "consolidated.safetensors": b"not wanted",
    }
    hub.add_model("org/sharded", {f"eagle3/{name}": content for name, content in files.items()})
    found = open_head_source("org/sharded", subfolder="eagle3")
    assert torch.equal(open_checkpoint(found.folder).tensor(last[0]), last[1])
    assert hub.bytes_sent("consolidated.safetensors") == 0
    hub.add_model("org/sharded", {name: content for name, content in files.items() if "2-of-2" not in name})
    with raises_hub_error("missing"):
        open_head_source("org/sharded")


def test_only_the_sub_folder_of_a_head(hub, home):
    head = {"config.json": "{}", "model.safetensors": save(WEIGHTS)}
    files = {f"heads/{name}/{file}": content for name in "ab" for file, content in head.items()}
    commit = hub.add_model("org/heads", files | {"README.md": "all of them", "heads/a/more/x.bin": b"x"})
    found = open_head_source("org/heads", subfolder="heads/a")
    assert (found.label, found.commit) == (f"org/heads@{commit[:12]}/heads/a", commit)
    assert found.files == ("config.json", "model.safetensors", "more/x.bin")
    # With the card of the repository, as the folder has none.
    names = {path.relative_to(found.root).as_posix() for path in found.root.rglob("*") if path.is_file()}
    assert names == {"README.md", "heads/a/config.json", "heads/a/model.safetensors"}
    hub.requests.clear()
    assert open_head_source("org/heads", offline=True, subfolder="heads/a").folder == found.folder
    with raises_hub_error("offline"):
        open_head_source("org/heads", offline=True, subfolder="heads/b")
    assert hub.requests == []


def test_a_sub_folder_that_is_not_there(hub, home):
    hub.add_model("org/heads", {"config.json": "{}", "a/model.safetensors": b"", "b/c/model.safetensors": b""})
    for name in ("d", "b"):
        with raises_with(SourceError, name, "a", "b/c"):
            open_head_source("org/heads", subfolder=name)
    with raises_with(CheckpointError, "Found config.json, a/, b/c/.", "--subfolder"):
        open_head_source("org/heads")
    folders = ["best-of-n", *"abcdefghi"]
    hub.add_model("org/many", {"config.json": "{}", **{f"{name}/model.safetensors": b"" for name in folders}})
    with raises_with(CheckpointError, "Found config.json, a/, b/, best-of-n/, c/", "--subfolder"):
        open_head_source("org/many")


def test_revisions(hub, home):
    first = hub.repos["model", "org/head"].branches["v1"]
    newer = hub.add_model("org/head", {"config.json": "{}", "model.safetensors": save({"x": torch.ones(1)})})
    assert open_head_source("org/head").commit == newer
    for revision, offline in (("v1", False), ("v1", True), (first, True)):
        assert open_head_source("org/head", revision=revision, offline=offline).commit == first


def test_without_access(hub, tmp_path):
    for token, name, words in (
        ("hf_other", "org/gated", ("a gated repository", "Ask for access at ", "/org/gated", "HF_TOKEN")),
        (None, "org/nothing", ("no such folder here, and no such repository at", "Check the spelling")),
        ("hf_expired", "org/head", ("hf auth login",)),
    ):
        with connected(hub, tmp_path / name, token=token), raises_with(SourceError, *words):
            open_head_source(name)
    with connected(hub, tmp_path, token="hf_good"):
        assert open_head_source("org/gated").repo_id == "org/gated"


def test_no_network(tmp_path, capsys):
    hub = HubServer()
    hub.add_model("org/head", {"config.json": "{}", "model.safetensors": save(WEIGHTS)})
    with hub, connected(hub, tmp_path):
        commit = open_head_source("org/head").commit
    # The server has gone; its port refuses.
    with connected(hub, tmp_path):
        assert open_head_source("org/head").commit == commit
        with raises_with(SourceError, "org/other", f"{hub.endpoint} cannot be reached", "Check the connection"):
            open_head_source("org/other")
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    assert "using the copy in the cache" in said


def test_offline_never_asks(hub, tmp_path):
    with connected(hub, tmp_path):
        with raises_hub_error("offline"):
            open_head_source("org/head", offline=True)
        assert hub.requests == []
        target_files("org/head")
        hub.requests.clear()
        # Configuration only is not enough for a head.
        with raises_hub_error("offline"):
            open_head_source("org/head", offline=True)
        assert target_files("org/head", offline=True).repo_id == "org/head"
    with connected(hub, tmp_path, offline=True), raises_hub_error("offline"):
        open_head_source("org/gated")
    assert hub.requests == []


@pytest.mark.parametrize(("path", "fault", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_hub_is_named_and_leaves_nothing(hub, home, monkeypatch, path, fault, reason):
    # The library waits before it asks again.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.inject(path, fault)
    with monkeypatch.context() as patch, raises_hub_error(reason) as caught:
        if fault.silent:
            patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
        open_head_source("org/head")
    headline, advice = str(caught.value).split("\n")
    assert advice
    if fault.status is not None:
        assert "as asked for" in headline, "the Hub's own reason"
    hub.faults.clear()
    if fault.extra_bytes and huggingface_hub.__version__.startswith("1."):
        pytest.skip("before 2.0 huggingface_hub keeps a download that came too long")
    assert (open_head_source("org/head").folder / "model.safetensors").read_bytes() == save(WEIGHTS)
