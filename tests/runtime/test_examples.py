import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from eagle_slim.runtime.compare import load_prompts
from support.programs import skip_or_fail
from support.upstream_models import NEEDS_UPSTREAM, UPSTREAM

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *args: str, folder: Path) -> str:
    command, env = [sys.executable, EXAMPLES / script, *args], {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script of one process in this one, which has imported what takes long."""

    def call(script: str, *args: str, code: int = 0) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *args])
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as stop:
            if stop.code != code:
                raise
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_generate(run_here: Callable[..., str]) -> None:
    out = run_here("generate.py", "What is the capital of France?", "--max-new-tokens", "10")
    assert "Paris" in out
    assert "drafted over 8192 tokens" in out
    assert "plain greedy decoding: True" in out


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    args = ("--out", "here", "--max-new-tokens", "6")
    slim = tmp_path / "here" / "smollm2-135m-instruct-eagle3-v4096"
    out = run("demo.py", *args, folder=tmp_path)
    assert re.search(r"rows of the LM head +49,152 → 4,096", out)
    assert re.search(r"coverage of self-chat +9\d\.\d\d% of [\d,]+ held-out tokens", out)
    assert "ok, 0 warning, 0 failed" in out
    assert str(slim.relative_to(tmp_path)) in out
    *_, read, length, token = out.splitlines()
    assert re.fullmatch(r"bytes per draft step +66\.8 MB → 14\.9 MB \(22%\)", read)
    assert re.fullmatch(r"accepted length +\d\.\d\d tokens per pass of the target", length)
    assert re.fullmatch(r"a token +[\d.]+ ms.*, [\d.]+ without drafts: [\d.]+ times as fast with them", token)


@pytest.mark.slow
def test_accuracy_vs_speed(run_here: Callable[..., str], tmp_path: Path) -> None:
    out = run_here("accuracy_vs_speed.py", "--sizes", "1024", "--num-prompts", "1", "--max-new-tokens", "6")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["plain", "full", "1,024"]
    assert all(float(row[row.index("all") + 1]) >= 1.0 for row in rows)
    assert "plain decoding" in out
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "<!DOCTYPE html>" in page


@pytest.mark.slow
def test_long_prompts(run_here: Callable[..., str], tmp_path: Path) -> None:
    out = run_here("long_prompts.py", "--lengths", "70", "400", "--num-prompts", "2")
    assert out == "4 prompts are in long.jsonl.\n"
    short, long, *others = load_prompts(tmp_path / "long.jsonl")
    assert [short.category, long.category] == [each.category for each in others] == ["70 tokens", "400 tokens"]
    (turn,), (longer,) = short.turns, long.turns
    assert turn.splitlines()[-1] == longer.splitlines()[-1]
    assert 3 * len(turn) < len(longer)


class ChatServer(BaseHTTPRequestHandler):
    """A served model that answers with the prompt's words, backwards; the last word is ``changed``, if that is set."""

    asked: list[dict[str, Any]]
    keys: set[str | None]
    changed = ""

    def do_GET(self) -> None:
        self.send({"object": "list", "data": [{"id": "served", "object": "model", "created": 0, "owned_by": "us"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.keys.add(self.headers["Authorization"])
        words = body["messages"][0]["content"].split()[::-1]
        message = {"role": "assistant", "content": " ".join([*words[:-1], self.changed or words[-1]])}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self.send({"id": "1", "object": "chat.completion", "created": 0, "model": "served", "choices": [choice]})

    def send(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def chat_server(**attributes: Any) -> Iterator[tuple[str, type[ChatServer]]]:
    handler = type("Handler", (ChatServer,), {"asked": [], "keys": set(), **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", handler
        http.shutdown()


def test_same_text(run_here: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("openai") is None:
        skip_or_fail("needs openai: pip install openai")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one two", "later"]}\n{"prompt": "three four five"}\n{"prompt": "never"}\n')
    monkeypatch.setenv("EAGLE_KEY_2", "secret")
    args = ("--prompts", str(prompts), "--limit", "2", "--max-tokens", "7")
    with chat_server() as (url, plain), chat_server() as (same_url, same), chat_server(changed="zero") as (other, _):
        assert run_here("same_text.py", url, f"{same_url}/v1/", *args) == "2 of 2 answers are equal\n"
        assert same.asked == plain.asked
        assert [body["messages"] for body in same.asked] == [
            [{"role": "user", "content": prompt}] for prompt in ("one two", "three four five")
        ]
        assert {(body["model"], body["temperature"], body["max_tokens"]) for body in same.asked} == {("served", 0, 7)}
        assert (plain.keys, same.keys) == ({"Bearer none"}, {"Bearer secret"})
        assert run_here("same_text.py", url, other, *args, code=1).splitlines() == [
            "0 of 2 answers are equal",
            "the first that differs: prompt 0, from character 4 on",
            f"  {url}: 'one'",
            f"  {other}: 'zero'",
        ]
    with pytest.raises(SystemExit, match=f"{url}: APIConnectionError.*is one running there"):
        run_here("same_text.py", url, other, *args)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SystemExit, match="pip install openai"):
        run_here("same_text.py", url, other)


@NEEDS_UPSTREAM
def test_safeailab_dropin(tmp_path: Path) -> None:
    out = run("safeailab_dropin.py", "--upstream", str(UPSTREAM), "--max-new-tokens", "4", folder=tmp_path)
    assert "equal to upstream: True, fully patched: True" in out
