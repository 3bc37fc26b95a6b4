"""examples/engine_speed.py against loopback servers that show what vLLM and SGLang show."""

import json
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "engine_speed.py"
TOKENS_PER_ANSWER, PASSES_PER_ANSWER = 21, 8

VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="/models/a {{b}}"}} {passes}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {half}.5
vllm:spec_decode_num_accepted_tokens_total{{engine="1",model_name="m"}} {half}.5
"""
SGLANG_METRICS = """\
sglang:spec_accept_length{{engine_type="unified",model_name="m",tp_rank="0"}} 9.99
sglang:generation_tokens_total{{model_name="m"}} {tokens}.0
sglang:spec_verify_calls_total{{model_name="m"}} {passes}.0
"""
OLD_SGLANG_METRICS = 'sglang:spec_accept_length{{model_name="m"}} 2.25\nsglang:generation_tokens_total {tokens}.0\n'


class Server:
    """A served model; ``metrics`` is a template of its metrics page, None for none."""

    def __init__(self, metrics: str | None, passes: int = PASSES_PER_ANSWER) -> None:
        self.metrics, self.passes = metrics, passes
        # What the server did before anyone measured must not count.
        self.answers, self.asked = 100, list[dict[str, object]]()

    def page(self) -> str:
        assert self.metrics is not None
        accepted = self.answers * (TOKENS_PER_ANSWER - 1 - self.passes)
        counts = {"tokens": self.answers * TOKENS_PER_ANSWER, "passes": self.answers * self.passes}
        return self.metrics.format(**counts, half=accepted // 2)

    def chat(self, body: dict[str, object]) -> dict[str, object]:
        self.answers += 1
        self.asked.append(body)
        return {"choices": [{"message": {"content": "…"}}], "usage": {"completion_tokens": TOKENS_PER_ANSWER}}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, text: str, status: int = 200) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply(json.dumps({"data": [{"id": "served-target"}]}))
            elif server.metrics is not None:
                self.reply(server.page())
            else:
                self.reply("Not Found", 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(json.dumps(server.chat(body)))

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()


Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["engine_speed.py", *arguments])
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return stop.value.code, *capsys.readouterr()

    return run


# 20 tokens of an answer come from 8 passes, the first from the prompt's.
@pytest.mark.parametrize(
    ("metrics", "expected"),
    [(VLLM_METRICS, 20 / 8), (SGLANG_METRICS, 20 / 8), (OLD_SGLANG_METRICS, 2.25)],
    ids=["vllm", "sglang", "sglang without counts"],
)
def test_speed_and_accepted_length(run: Run, tmp_path: Path, metrics: str, expected: float) -> None:
    server, figures = Server(metrics), tmp_path / "figures.json"
    with serving(server) as url:
        code, out, _ = run("--server", f"slim={url}/", "--limit", "4", "--json", str(figures))
    assert code == 0
    (found,) = json.loads(figures.read_text())
    assert found["accepted_length"] == pytest.approx(expected, abs=0.01)
    assert (found["label"], found["model"], found["answers"]) == ("slim", "served-target", 4)
    assert found["tokens"] == 4 * TOKENS_PER_ANSWER
    assert found["tokens_per_s"] > 0
    assert out.splitlines()[1].split()[::2] == ["slim", f"{expected:.2f}"]
    assert len(server.asked) == 5, "four questions and one that warms up"
    assert {body["temperature"] for body in server.asked} == {0}


def test_several_heads_one_that_accepts_nothing_and_one_that_is_down(run: Run) -> None:
    healthy, broken = Server(VLLM_METRICS), Server(VLLM_METRICS, passes=TOKENS_PER_ANSWER - 1)
    with socket.socket() as unused, serving(healthy) as one, serving(broken) as other:
        unused.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{unused.getsockname()[1]}"
        given = [("down", down), ("good", one), ("bad", other)]
        code, out, err = run(*(word for name, url in given for word in ("--server", f"{name}={url}")), "--limit", "2")
    assert [line.split()[::2] for line in out.splitlines()[1:]] == [["good", "2.50"], ["bad", "1.00"]]
    assert code == 1
    assert "bad: almost nothing is accepted" in err
    assert f"down: {down}/v1/models does not answer" in err
    assert "good" not in err


@pytest.mark.parametrize(
    ("server", "reason"),
    [(Server(None), "only with --enable-metrics"), (Server(VLLM_METRICS, passes=0), "drafted nothing"),
     (Server("vllm:request_success_total 3.0\n"), "started without a head"),
     (Server("python_gc_objects_collected_total 3.0\n"), "neither vLLM's nor SGLang's")],
    ids=["no metrics", "no drafts", "no head", "another server"],
)  # fmt: skip
def test_without_an_accepted_length_there_is_still_a_speed(run: Run, server: Server, reason: str) -> None:
    with serving(server) as url:
        code, out, err = run("--server", f"head={url}", "--limit", "1")
    assert code == 0
    assert out.splitlines()[1].endswith("unknown")
    assert reason in err
