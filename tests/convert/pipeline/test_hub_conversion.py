"""Heads and targets from a Hub, through the real `huggingface_hub`, to an artifact and back to the Hub."""

import json

import pytest
import torch
from eagle_slim.convert import Artifact, verify_artifact
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.convert.rows import hub_tensor
from safetensors.torch import load_file
from support.conversion import BY_ID, convert
from support.heads import HIDDEN, VOCAB, random, target_lm_head, write_eagle3, write_target, write_tensors
from support.hub_server import HubServer, connected


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path):
    """A Hub with a head as SafeAILab publishes it (`.bin`, no LM head) and a target of which one tensor is needed."""
    target = write_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors |= {f"model.layers.{n}.mlp.up_proj.weight": random((4096, HIDDEN), n) for n in range(8)}
    (target / "model.safetensors").unlink()
    write_tensors(target, tensors, "sharded")
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    (target / "chat_template.jinja").unlink(missing_ok=True)
    head = write_eagle3(tmp_path / "head", lm_head=False, container="bin")
    (head / "README.md").write_text("---\nlicense: mit\nbase_model: org/target\n---\nA head.\n")
    with HubServer() as server:
        server.commits = {
            "org/head": server.add_model("org/head", files(head)),
            "org/target": server.add_model("org/target", files(target)),
        }
        yield server


def test_only_the_needed_bytes_are_fetched(hub, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(hub_tensor, "_FIRST_BYTES", 1000)
    with connected(hub, tmp_path / "home"):
        done = convert("org/head", draft_vocab=320, vocabulary=BY_ID, out=tmp_path / "slim", say=said.append)
        needed = VOCAB * HIDDEN * 2
        sent = hub.bytes_sent("of-00002.safetensors")
        assert needed <= sent < needed + 20_000
        assert "target: org/target (named in the head's model card)" in said
        assert done.manifest.head["revision"] == hub.commits["org/head"]
        assert done.manifest.target["repo_id"] == "org/target"
        assert done.manifest.target["revision"] == hub.commits["org/target"]
        assert any("org/target has no chat template" in warning for warning in done.manifest.warnings)
        assert not any("snapshots" in warning or str(tmp_path) in warning for warning in done.manifest.warnings)
        front = (done.folder / "README.md").read_text().split("---")[1]
        assert "base_model: org/target" in front
        assert "license: mit" in front
        tensors = load_file(done.folder / "model.safetensors")
        ids = tensors["d2t"] + torch.arange(320)
        assert torch.equal(tensors["lm_head.weight"], target_lm_head(tmp_path / "target")[ids])

        # Verification asks for no weights again: it finds everything in the cache.
        hub.reset_counts()
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
        with pytest.raises(SystemExit) as stop:
            convert_command(["org/heads", *order])
        assert stop.value.code == 0, capsys.readouterr().err
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
