"""Requests to the Hub that fail once or for good, through the real huggingface_hub against a server on loopback."""

import pytest
from eagle_slim.vocab_tools import TokenizerError, forced_ids, load_tokenizer, read_target
from eagle_slim.vocab_tools.hub import BUILT_IN_TARGET, HubError, find_snapshot, plain
from huggingface_hub import constants
from support.hub_server import Fault, HubServer, connected
from support.raising import raises_hub_error
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tokenizers import smollm2

REPO, API = "org/model", "/api/models/org/model"
FILES = {"config.json": b"{}", "model.safetensors": b"never fetched"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with HubServer() as hub:
        hub.add_model(REPO, FILES)
        with connected(hub, tmp_path / "home"):
            yield hub


def snapshot(revision=None):
    found = find_snapshot(REPO, revision, False, lambda names, _: ["config.json"])
    return (found.folder / "config.json").read_bytes()


@pytest.mark.parametrize("path", [API, "config.json"], ids=["listing", "file"])
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"unanswered": True}], ids=str)
def test_a_fault_that_passes_does_not_end_a_command(hub, path, times, fault):
    hub.inject(path, Fault(**fault, times=times))
    assert snapshot() == b"{}"


def test_there_are_five_tries(hub):
    hub.inject(API, Fault(status=503, times=5))
    with raises_hub_error("busy"):
        snapshot()
    hub.inject(API, Fault(status=404, times=1))
    with raises_hub_error("refused"):
        snapshot()


def test_each_error_says_what_is_wrong(hub, monkeypatch):
    with raises_hub_error("missing", "no revision 'no-such-branch'"):
        snapshot("no-such-branch")
    hub.inject("config.json", Fault(without=("ETag",)))
    with raises_hub_error("unreachable", "without the ETag"):
        snapshot()
    hub.faults.clear()
    hub.inject("config.json", Fault(without=("X-Repo-Commit",)))
    with raises_hub_error("unreachable", "commit of a file"):
        snapshot()
    hub.faults.clear()
    for token in ("hf_gehäim", "hf_geheim\nx"):
        monkeypatch.setenv("HF_TOKEN", token)
        with raises_hub_error("access") as caught:
            snapshot()
        assert "the token" in str(caught.value)
        assert "geh" not in str(caught.value)


@pytest.mark.parametrize(
    "answer", [[], None, "text", {"sha": 7}, {"siblings": [{"rfilename": 1}], "sha": "a"}, b"[" * 100_000], ids=repr
)
def test_an_answer_of_another_form_is_not_the_hubs(hub, answer):
    hub.inject(API, Fault(answer=b"null" if answer is None else answer))
    with raises_hub_error("unreachable"):
        snapshot()


def test_no_secret_of_an_address_is_told(hub, monkeypatch):
    address = hub.endpoint.replace("http://", "http://me:pass%40word@")
    for endpoint in (address, f"{address}/?token=password", "http://me:password@127.0.0.1:9"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        hub.inject("/org/model", Fault(status=402))
        with pytest.raises(HubError) as caught:
            find_snapshot(REPO, None, False, lambda names, _: ["config.json"])
        assert "word" not in str(caught.value)
        assert "127.0.0.1" in str(caught.value)
    assert plain("at 'https://a:b@c/d?e=f' and hf://datasets/g@h.") == "at 'https://c/d' and hf://datasets/g@h"


def test_the_built_in_target_is_known_by_its_name(tmp_path, monkeypatch, capsys):
    expected = smollm2()
    with HubServer() as empty, connected(empty, tmp_path / "home", offline=True):
        assert load_tokenizer(BUILT_IN_TARGET).tokenizer_hash == expected.tokenizer_hash
        assert load_tokenizer(BUILT_IN_TARGET, offline=True).chat_template_hash == expected.chat_template_hash
        assert read_target(BUILT_IN_TARGET).vocab_size == 49152
        assert "using the built-in copy" in capsys.readouterr().err
        for other in (("org/other", None), (BUILT_IN_TARGET, "v2")):
            with pytest.raises(TokenizerError, match="not in the cache"):
                load_tokenizer(*other)
    with HubServer() as broken, connected(broken, tmp_path / "home"):
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        broken.inject("135M-Instruct", Fault(status=503))
        assert load_tokenizer(BUILT_IN_TARGET).tokenizer_hash == expected.tokenizer_hash
        # A Hub that answers has the last word.
        broken.faults.clear()
        with pytest.raises(TokenizerError, match="no such repository"):
            load_tokenizer(BUILT_IN_TARGET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TokenizerError, match="eagle-generate --offline"):
        load_tokenizer(BUILT_IN_TARGET, offline=True)


def test_small_files_of_a_tokenizer_only_and_afterwards_offline(hub, tmp_path):
    folder = write_folder(tmp_path / "t", byte_level_bpe(300), generation_config={"eos_token_id": [2, 0]})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("<|im_start|>{{ tools }}")
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    hub.add_model("org/chat", {**files, "model.safetensors": b"never fetched"})
    local, remote = load_tokenizer(folder), load_tokenizer("org/chat")
    assert remote.tokenizer_hash == local.tokenizer_hash
    assert remote.chat_template_hash == local.chat_template_hash
    assert forced_ids(remote).reasons == forced_ids(local).reasons
    assert remote.revision == hub.repos["model", "org/chat"].branches["main"]
    assert hub.bytes_sent("model.safetensors") == 0
    hub.requests.clear()
    assert load_tokenizer("org/chat", offline=True).tokenizer_hash == local.tokenizer_hash
    with connected(hub, tmp_path / "home", offline=True):
        assert load_tokenizer("org/chat").chat_template_hash == local.chat_template_hash
    assert hub.requests == []
