"""eagle-push: an artifact is audited first, and nothing of its folder travels but what belongs to it."""

import json

import pytest
from eagle_slim.convert import ArtifactError, push_folder
from eagle_slim.convert.push import upload_files
from eagle_slim.convert.push_cli import main as push_command
from eagle_slim.vocab_tools import hub as our_hub
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory
from support.conversion import BY_ID, convert
from support.heads import write_eagle3
from support.hub_server import Fault, HubServer, connected
from support.raising import raises_hub_error
from support.tampering import change_manifest

# huggingface_hub uploads with an argument that its HTTP library calls old.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def slim(tmp_path, target):
    head = write_eagle3(tmp_path / "head")
    return convert(head, draft_vocab=270, target=target, vocabulary=BY_ID, out=tmp_path / "slim").folder


@pytest.fixture
def hub(tmp_path):
    with HubServer() as server, connected(server, tmp_path / "home", token="hf_good"):
        yield server


def test_only_what_the_manifest_names_is_uploaded(run, hub, slim):
    own = {path.name: path.read_bytes() for path in slim.iterdir()}
    for name in (".env", "secret.txt", "pytorch_model.bin"):
        (slim / name).write_text("HF_TOKEN=hf_secret")
    code, out, err = run(push_command, "slim", "tester/slim", "--dry-run", "--json")
    assert (code, hub.requests) == (0, []), err
    told = json.loads(out)
    assert (told["uploads"], told["left"]) == (sorted(own), [".env", "pytorch_model.bin", "secret.txt"])
    code, out, err = run(push_command, "slim", "tester/slim", "--private")
    assert code == 0, err
    assert "uploaded to" in out
    assert hub.repo("tester/slim").private
    assert "secret.txt is not uploaded" in err
    assert hub.repo("tester/slim").files == own


def test_what_is_no_repository_is_refused_by_a_dry_run_too(run, slim):
    code, _, err = run(push_command, "slim", "me/slim/eagle3", "--dry-run")
    assert (code, "me/slim/eagle3" in err) == (1, True)


def test_a_damaged_artifact_is_not_uploaded(run, hub, slim):
    content = bytearray((slim / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (slim / "model.safetensors").write_bytes(content)
    for more in ((), ("--dry-run",)):
        code, _, err = run(push_command, "slim", "tester/slim", *more)
        assert (code, "the audit fails" in err) == (1, True)
    with pytest.raises(ArtifactError):
        push_folder(slim, "tester/slim")
    assert (hub.repos, hub.requests) == ({}, [])


def test_what_another_artifact_left_in_a_repository_goes_and_other_weights_stay(run, hub, slim, tmp_path, target):
    head = tmp_path / "head"
    convert(head, draft_vocab=300, target=target, vocabulary=BY_ID, gguf=["bf16"], out=tmp_path / "before")
    for folder in ("before", "slim"):
        code, _, err = run(push_command, folder, "tester/slim")
        assert code == 0, err
    own = {path.name: path.read_bytes() for path in slim.iterdir()}
    assert hub.repo("tester/slim").files == own
    hub.repo("tester/slim").commit(own | {"pytorch_model.bin": b"", "onnx/model.bin": b"", "notes.txt": b""})
    for path in slim.glob("*.md"):
        path.write_text("another card")
    code, _, err = run(push_command, "slim", "tester/slim")
    assert (code, "pytorch_model.bin" in err, "onnx" in err) == (1, True, False)
    assert hub.repo("tester/slim").files["README.md"] == own["README.md"]


@pytest.mark.parametrize("name", ["secret.txt", "../secret", "freq_9.pt"])
def test_a_manifest_that_names_other_files_does_not_carry_them_along(run, hub, slim, name):
    (slim / name).write_text("hf_secret")
    change_manifest(slim, lambda manifest: manifest["files"].update({name: {"size_bytes": 9}}))
    code, _, err = run(push_command, "slim", "tester/slim")
    assert (code, hub.requests, name in err) == (1, [], True)


def test_a_card_that_is_a_link_is_not_uploaded(run, hub, slim, tmp_path):
    (tmp_path / "token").write_text("hf_secret")
    (slim / "README.md").unlink()
    (slim / "README.md").symlink_to(tmp_path / "token")
    code, _, err = run(push_command, "slim", "tester/slim")
    assert (code, hub.requests) == (1, [])
    assert "README.md" in err


def test_a_command_gives_up_what_the_library_would_wait_for_for_ever(hub, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(our_hub, "SILENCE_S", 0.3)
    hub.inject("/api/repos/create", Fault(silent=True))
    try:
        our_hub.limit_silence()
        our_hub.keep_limit()
        with raises_hub_error("unreachable"):
            upload_files(tmp_path, ["config.json"], "tester/slim")
        hub.clear_faults()
        upload_files(tmp_path, ["config.json"], "tester/slim")
    finally:
        set_client_factory(default_client_factory)


@pytest.mark.parametrize(("token", "name"), [(None, "tester/x"), ("hf_good", "other/x"), ("hf_expired", "tester/x")])
def test_a_repository_that_may_not_be_written(run, slim, tmp_path, token, name):
    with HubServer() as hub, connected(hub, tmp_path / "home", token=token):
        code, _, err = run(push_command, "slim", name)
    assert (code, name in err) == (1, True)
    assert not hub.repos
