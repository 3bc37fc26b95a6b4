"""One tensor of a target from the Hub: only its bytes travel, over broken connections and killed processes."""

import itertools
import json
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from eagle_slim.convert.errors import CheckpointError, SourceError
from eagle_slim.convert.rows import hub_tensor
from eagle_slim.convert.sources.source import target_files
from eagle_slim.convert.targets.matrix import open_target_lm_head
from safetensors.torch import load_file, save, save_file
from support.heads import random
from support.hub_server import Fault, HubServer, connected
from support.raising import raises_hub_error, raises_with
from support.tampering import flip_bit

ROWS, HIDDEN = 4000, 64
# Of 512,000 bytes.
PIECE = 50_000
SHARD = "model-00002-of-00002.safetensors"
LM_HEAD = random((ROWS, HIDDEN), 1)
EMBEDDING = random((ROWS, HIDDEN), 2)
OTHERS = {f"model.layers.{i}.weight": random((3000, HIDDEN), i) for i in range(3)}


def sharded():
    first = {"model.embed_tokens.weight": EMBEDDING}
    second = {"lm_head.weight": LM_HEAD, **OTHERS}
    index = dict.fromkeys(first, "model-00001-of-00002.safetensors") | dict.fromkeys(second, SHARD)
    return {
        "config.json": '{"model_type": "llama"}',
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": index}),
        "model-00001-of-00002.safetensors": save(first),
        SHARD: save(second),
        "pytorch_model.bin": b"never fetched",
    }


def open_lm_head(name, revision=None, offline=False):
    return open_target_lm_head(target_files(name, revision, offline), offline)


def values(lm_head):
    return lm_head.checkpoint.tensor(lm_head.name)


@pytest.fixture
def hub():
    with HubServer() as hub:
        hub.add_model("org/target", sharded())
        yield hub


@pytest.fixture
def home(hub, tmp_path, monkeypatch):
    # The library waits before it asks again.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hub_tensor, "_FIRST_BYTES", 1000)
    monkeypatch.setattr(hub_tensor, "PIECE_BYTES", PIECE)
    with connected(hub, tmp_path / "home"):
        yield tmp_path / "home"


def test_only_the_tensor_travels_and_only_once(hub, home):
    head = open_lm_head("org/target")
    assert torch.equal(values(head), LM_HEAD)
    assert torch.equal(head.checkpoint.rows(head.name, [7, 3999, 0]), LM_HEAD[[7, 3999, 0]])
    assert head.name == "lm_head.weight"
    (record,) = head.checkpoint.files
    assert home / "assets" in record.path.parents
    assert torch.equal(load_file(record.path)["lm_head.weight"], LM_HEAD), "a file that others read"
    assert LM_HEAD.nbytes <= hub.bytes_sent() <= 1.05 * LM_HEAD.nbytes
    hub.requests.clear()
    assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)
    assert hub.bytes_sent(".safetensors") == 0
    hub.requests.clear()
    assert torch.equal(values(open_lm_head("org/target", offline=True)), LM_HEAD)
    assert hub.requests == []


def test_each_commit_has_its_own_tensor(hub, home):
    old = hub.repos["model", "org/target"].branches["main"]
    open_lm_head("org/target")
    other = random((ROWS, HIDDEN), 9)
    hub.add_model("org/target", sharded() | {SHARD: save({"lm_head.weight": other, **OTHERS})})
    assert torch.equal(values(open_lm_head("org/target")), other)
    assert torch.equal(values(open_lm_head("org/target", revision=old, offline=True)), LM_HEAD)


def test_target_that_is_whole_in_the_cache(hub, home):
    from huggingface_hub import hf_hub_download

    for name in ("config.json", "model.safetensors.index.json", SHARD):
        hf_hub_download("org/target", name)
    hub.requests.clear()
    head = open_lm_head("org/target")
    assert torch.equal(values(head), LM_HEAD)
    assert hub.bytes_sent(".safetensors") == 0
    assert "snapshots" in str(head.checkpoint.files[0].path)


def test_target_of_pickles_comes_whole_with_a_notice(hub, home, tmp_path, caplog):
    torch.save({"lm_head.weight": LM_HEAD}, tmp_path / "x.bin")
    hub.add_model("org/old", {"config.json": "{}", "pytorch_model.bin": tmp_path / "x.bin"})
    assert torch.equal(values(open_lm_head("org/old")), LM_HEAD)
    assert "fetching pytorch_model.bin whole" in caplog.text


def before_piece(monkeypatch, number, act):
    """Let something happen before a request for so many bytes, counted from 1."""
    asked, real = itertools.count(1), hub_tensor.HubFile.read

    def read(self, start, end):
        if next(asked) == number:
            act()
        return real(self, start, end)

    monkeypatch.setattr(hub_tensor.HubFile, "read", read)


def test_a_connection_that_stays_broken_ends_and_the_next_run_goes_on(hub, home, monkeypatch):
    before_piece(monkeypatch, 5, lambda: hub.inject(SHARD, Fault(break_after=10)))
    with raises_hub_error("unreachable"):
        open_lm_head("org/target")
    hub.faults.clear()
    hub.requests.clear()
    assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)
    assert hub.bytes_sent(SHARD) <= LM_HEAD.nbytes - 150_000 + 2000


@pytest.mark.parametrize("fault", [Fault(ignore_range=True), Fault(extra_bytes=10)])
def test_servers_that_do_not_serve_ranges(hub, home, fault):
    hub.inject(SHARD, fault)
    with pytest.raises(SourceError, match="hf download"):
        open_lm_head("org/target")
    assert list(home.glob("assets/**/*.safetensors")) == []


@pytest.mark.parametrize("times", [1, None], ids=["once", "for good"])
@pytest.mark.parametrize(
    "fault", [Fault(etag="other"), Fault(commit="0" * 40), Fault(shift=128), Fault(as_whole=True), Fault(total=10**9)]
)
def test_bytes_of_another_content_are_asked_for_once_more(hub, home, monkeypatch, fault, times):
    before_piece(monkeypatch, 5, lambda: hub.inject(SHARD, replace(fault, times=times)))
    with nullcontext() if times else pytest.raises(SourceError, match="hf download"):
        assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)
    hub.faults.clear()
    assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)


def test_what_came_of_another_content_is_not_gone_on_with(hub, home, monkeypatch):
    """A first run's bytes all come under another ETag, until the connection breaks."""
    real = hub_tensor._etag
    with monkeypatch.context() as first, raises_hub_error("unreachable"):
        first.setattr(hub_tensor, "_etag", lambda answer, name: real(answer, name) + name.removeprefix("X-Linked-ETag"))
        before_piece(first, 5, lambda: hub.inject(SHARD, Fault(break_after=10)))
        open_lm_head("org/target")
    hub.faults.clear()
    hub.requests.clear()
    assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)
    assert hub.bytes_sent(SHARD) >= LM_HEAD.nbytes


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])
    path.with_suffix(".partial").write_bytes(b"of another content")


DAMAGES = {f"bit {at}": partial(flip_bit, position=at) for at in (-1, -LM_HEAD.nbytes, -LM_HEAD.nbytes - 100)}
# An older version kept no checksum, and maybe bytes of several contents.
DAMAGES |= {"truncated": truncate, "of an older version": partial(save_file, {"lm_head.weight": EMBEDDING})}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_in_the_cache_is_fetched_again(hub, home, damage):
    damage(open_lm_head("org/target").checkpoint.files[0].path)
    with raises_hub_error("offline"):
        open_lm_head("org/target", offline=True)
    assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)


def test_a_server_without_an_etag_is_named(hub, home, monkeypatch):
    found = SimpleNamespace(size=9, etag=None, commit_hash=None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: found)
    with raises_with(SourceError, f"{SHARD} names no ETag"):
        open_lm_head("org/target")


def test_a_shard_without_the_tensor_that_its_index_names(hub, home):
    hub.add_model("org/target", sharded() | {SHARD: save({"else": LM_HEAD})})
    with raises_with(CheckpointError, "lm_head.weight", "model-00002-of-00002.safetensors"):
        open_lm_head("org/target")


def test_the_token_stays_with_the_hub(hub, tmp_path):
    hub.add_model("org/target", sharded(), gated=True)
    with connected(hub, tmp_path / "home", token="hf_good"):
        assert torch.equal(values(open_lm_head("org/target")), LM_HEAD)
    assert any(request.token == "hf_good" for request in hub.requests)
    assert hub.leaked_tokens == []
