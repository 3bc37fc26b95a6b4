"""Head and target by repository id, from a local stand-in for the Hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.conversion import BY_ID, convert
from support.hub_server import HubServer
from support.tiny_models import write_pair


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_artifact_and_target_by_repository(tmp_path: Path) -> None:
    target, head = write_pair(tmp_path)
    convert(head, draft_vocab=340, target=target, out=tmp_path / "slim", vocabulary=BY_ID)
    with HubServer() as hub:
        hub.add_model("someone/target", files(target))
        hub.add_model("someone/slim", files(tmp_path / "slim"))
        options = "--draft-vocab 300 --prompt hello --max-new-tokens 4 --total-tokens 20 --json"
        program = [sys.executable, "-m", "eagle_slim.runtime.generate_cli"]
        command = [*program, "someone/slim", "--target", "someone/target", *options.split()]
        env = {**hub.env(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        online = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
        assert online.returncode == 0, online.stderr
    value = json.loads(online.stdout)
    assert value["draft_vocab"] == 300
    assert len(value["token_ids"]) <= 4
    # The server is gone: what was fetched is enough.
    offline = subprocess.run([*command, "--offline"], env=env, capture_output=True, text=True, timeout=1800)
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout)["token_ids"] == value["token_ids"]
