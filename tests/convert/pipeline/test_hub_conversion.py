"""Heads and targets from a Hub, through the real `huggingface_hub`, to an artifact and back to the Hub."""

import pytest
import torch
from eagle_slim.convert import Artifact, verify_artifact
from eagle_slim.convert.cli import main as convert_command
from safetensors.torch import load_file
from support.conversion import BY_ID, convert
from support.heads import target_lm_head, write_eagle3, write_target
from support.hub_server import HubServer, connected
from support.raising import exit_code


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path):
    """A Hub with a head as SafeAILab publishes it (`.bin`, no LM head) and a target of which one tensor is needed."""
    target = write_target(tmp_path / "target", shards=2)
    head = write_eagle3(tmp_path / "head", lm_head=False, container="bin")
    (head / "README.md").write_text("---\nlicense: mit\nbase_model: org/target\n---\nA head.\n")
    with HubServer() as server:
        server.commits = {
            "org/head": server.add_model("org/head", files(head)),
            "org/target": server.add_model("org/target", files(target)),
        }
        yield server


def test_head_and_target_by_their_names(hub, tmp_path):
    said = []
    with connected(hub, tmp_path / "home"):
        done = convert("org/head", draft_vocab=320, vocabulary=BY_ID, out=tmp_path / "slim", say=said.append)
        assert "target: org/target (named in the head's model card)" in said
        assert done.manifest.head["revision"] == hub.commits["org/head"]
        assert done.manifest.target["repo_id"] == "org/target"
        assert done.manifest.target["revision"] == hub.commits["org/target"]
        front = (done.folder / "README.md").read_text().split("---")[1]
        assert "base_model: org/target" in front
        assert "license: mit" in front
        tensors = load_file(done.folder / "model.safetensors")
        ids = tensors["d2t"] + torch.arange(320)
        assert torch.equal(tensors["lm_head.weight"], target_lm_head(tmp_path / "target")[ids])

        hub.add_model("org/other", files(tmp_path / "target"))
        other = convert("org/head", draft_vocab=320, vocabulary=BY_ID, target="org/other", out=tmp_path / "other")
        assert [("org/target" in text) for text in (*done.manifest.warnings, *other.manifest.warnings)].count(True) == 1

        # Verification asks for no weights again: it finds everything in the cache.
        hub.requests.clear()
        result = verify_artifact(tmp_path / "slim")
        assert result.ok
        assert not [check for check in result.checks if check.status == "skipped"]
        assert hub.bytes_sent(".safetensors") == hub.bytes_sent(".bin") == 0


def test_a_head_in_a_sub_folder(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = {f"heads/eagle3/{name}": data for name, data in files(tmp_path / "head").items() if name != "README.md"}
    commit = hub.add_model("org/heads", head | {"README.md": (tmp_path / "head" / "README.md").read_bytes()})
    order = ["--subfolder", "heads/eagle3", "--draft-vocab", "320", "--order", "ids"]
    with connected(hub, tmp_path / "home"):
        assert exit_code(convert_command, ["org/heads", *order]) == 0, capsys.readouterr().err
        made = tmp_path / "heads-heads-eagle3-v320"
        manifest = Artifact.load(made).manifest
        assert manifest.head["repo_id"] == manifest.head["name"] == "org/heads"
        assert (manifest.head["subfolder"], manifest.head["revision"]) == ("heads/eagle3", commit)
        assert manifest.target["repo_id"] == "org/target"
        card = (made / "README.md").read_text()
        assert "license: mit" in card
        assert f"- head: org/heads/heads/eagle3, revision {commit}\n" in card
        for named in (None, "org/heads"):
            assert verify_artifact(made, head=named)["tensors of the source head"].status == "ok"

        # A manifest from elsewhere leads nowhere else.
        path = made / "eagle_slim.json"
        path.write_text(path.read_text().replace('"subfolder": "heads/eagle3"', '"subfolder": "../../.."'))
        check = verify_artifact(made)["tensors of the source head"]
        assert (check.status, "expected the name of a folder" in check.detail) == ("failed", True)
