"""`eagle-servers` against servers on loopback that show what vLLM, SGLang and llama-server show, and have faults."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from eagle_slim.runtime.compare import server as server_module
from eagle_slim.runtime.compare.cli import main_servers

WORDS = [f" w{place}" for place in range(21)]
PASSES, ACCEPTED = 8, 12  # 20 tokens after the first one
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:generation_tokens_total{{engine="0",model_name="/a {{b}}"}} {tokens}.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {passes}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
"""
SGLANG = """\
sglang:spec_accept_length{{engine_type="unified",model_name="m",tp_rank="0"}} 9.99
sglang:generation_tokens_total{{is_streaming="true",model_name="m"}} {tokens}.0
sglang:spec_verify_calls_total{{model_name="m"}} {passes}.0
"""


class Stub:
    """A served model that answers every prompt with `WORDS`; ``faults``: what happens to which prompt.

    ``metrics``: a template of its metrics page. ``changed``: word that its answers have at a place. ``per_chunk``:
    tokens of a chunk. ``late``: how many looks at the metrics miss the last answer. ``forgets``: answers with
    log-probabilities are not ``changed``.
    """

    def __init__(self, metrics: str | None = None, **options: Any) -> None:
        self.metrics = metrics
        self.faults: dict[str, str] = options.get("faults", {})
        self.changed: dict[int, str] = options.get("changed", {})
        self.per_chunk, self.has_usage = options.get("per_chunk", 1), options.get("has_usage", True)
        self.timings: dict[str, int] = options.get("timings", {})
        self.forgets, self.names = options.get("forgets", False), options.get("names", ["content"])
        # What it did before anyone measured must not count.
        self.late = self.looks = options.get("late", 0)
        self.passes = [PASSES] * 100
        self.asked, self.keys = list[dict[str, Any]](), set[str | None]()
        self.passed_s = 0.0
        self.tries, self.lock, self.is_over = Counter[str](), threading.Lock(), threading.Event()
        # From this request on they must come in fours, else this breaks, and so do the answers.
        self.first_of_four, self.four = 100, threading.Barrier(4, timeout=1800)

    def page(self) -> str:
        assert self.metrics is not None
        self.looks += 1
        counted = self.passes[: len(self.passes) - (self.looks <= self.late)]
        return self.metrics.format(tokens=len(counted) * 21, passes=sum(counted), accepted=len(counted) * ACCEPTED)

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        changed = {} if self.forgets and body.get("logprobs") else self.changed
        words = [changed.get(place, word) for place, word in enumerate(WORDS)]
        for first in range(0, len(words), self.per_chunk):
            own = words[first : first + self.per_chunk]
            delta = dict.fromkeys(self.names, "".join(own))
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            if body.get("logprobs"):
                likely = [{"token": " w5", "logprob": -0.5}, {"token": " x", "logprob": -0.75}]
                content = [{"token": word, "logprob": -0.5, "bytes": list(word.encode())} for word in own]
                choice["logprobs"] = {"content": [{**each, "top_logprobs": likely} for each in content]}
            yield {"choices": [choice]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "timings": self.timings}
        if self.has_usage:
            # As some servers end: others give an empty list of choices, too.
            yield {"usage": {"completion_tokens": len(words)}}


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, text: str, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply(json.dumps({"data": [{"id": "served-target"}]}))
            elif stub.metrics is not None:
                self.reply(stub.page())
            else:
                self.reply("Not Found", 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"].split("\n")[-1]
            with stub.lock:
                stub.asked.append(body)
                stub.keys.add(self.headers["Authorization"])
                stub.tries[prompt] += 1
                number = len(stub.asked)
            if number >= stub.first_of_four:
                stub.four.wait()
            fault = stub.faults.get(prompt, "")
            if fault.startswith("429") and stub.tries[prompt] < 3:
                seconds = fault.removeprefix("429")
                self.reply("too many", 429, **({"Retry_After": seconds} if seconds else {}))
            elif fault == "silent":
                stub.is_over.wait()
            elif fault == "pings":
                stub.passed_s = 30.0
                self.reply(": ping\n\n")
                while not stub.is_over.wait(0.05):
                    self.wfile.write(b": ping\n\n")
            elif fault == "moved":
                self.reply("", 302, Location="/v1/models")
            elif fault.startswith("{"):
                self.reply(f"data: {fault}\n\n")
            elif fault == "refused":
                self.reply('{"error": "no such\\nmodel"}', 400)
            else:
                self.reply(": ping\n\n")
                for event in islice(stub.events(body), 7 if fault == "dies" else None):
                    said = json.dumps(event).replace('"length"', f'"{fault}"' if fault == "abort" else '"length"')
                    self.wfile.write(f"data: {said}\n\n".encode())
                if fault != "dies":
                    stub.passes.append(20 if body.get("logprobs") else PASSES)
                    stub.looks = 0
                    self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            stub.is_over.set()
            http.shutdown()


Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(server_module.time, "sleep", slept.append)
    return slept


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`eagle-servers --json` over six prompts; gives what it prints, and what it says on stderr."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {number}\n" for number in range(6)))

    def run(*arguments: str, expect: int = 0) -> tuple[dict[str, Any], str]:
        with pytest.raises(SystemExit) as stop:
            main_servers([*arguments, "--prompts", str(prompts), "--json"])
        found, told = capsys.readouterr()
        assert stop.value.code == expect, told
        return json.loads(found or "{}"), told

    return run


LLAMA = {"predicted_n": 21, "draft_n": 24, "draft_n_accepted": ACCEPTED}


@pytest.mark.parametrize(
    "stub",
    [Stub(VLLM), Stub(SGLANG, per_chunk=2), Stub(timings=LLAMA), Stub(VLLM, late=2)],
    ids=["vllm", "sglang, two tokens a chunk", "llama-server", "metrics that come late"],
)
def test_the_figures_are_the_servers_own(run: Run, stub: Stub) -> None:
    with serving(stub) as url:
        stub.first_of_four = 1 + 12 + 1
        found, _ = run(f"slim={url}/v1/", "--concurrency", "1,4", "--rounds", "2", "--max-new-tokens", "21")
    for row, at_once in zip(found["rows"], (1, 4), strict=True):
        # 20 tokens of each answer come from 8 passes, the first from the prompt's.
        assert (row["candidate"], row["batch"], row["mean_accepted_length"]) == ("slim", at_once, 20 / 8)
        # Of groups of four, the last is filled up.
        num_answers = {1: 12, 4: 16}[at_once]
        assert row["num_prompts"] == {1: 6, 4: 2}[at_once], "a second round makes no more prompts"
        assert (row["num_answers"], row["num_identical"], row["num_new_tokens"]) == (
            num_answers,
            num_answers,
            num_answers * 21,
        )
        assert row["tokens_per_s"] > 0
        assert (row["first_s"] > 0, row["missed_rate"]) == (True, None)
    assert (found["findings"], found["is_complete"]) == ([], True)
    assert len(stub.asked) == 12 + 16 + 1, "and one that warms up"
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in stub.asked[1:]} == {
        (0, 21, "served-target")
    }
    openings = Counter(body["messages"][0]["content"].split("\n")[0] for body in stub.asked)
    assert set(openings.values()) == {1}, "no prefix is sent twice"


def test_servers_get_the_same_prompts_and_their_texts_are_compared(run: Run, tmp_path: Path) -> None:
    first, other = Stub(SGLANG, late=2), Stub(changed={5: " x"})
    with serving(first) as one, serving(other) as two:
        found, _ = run(f"plain={one}", f"slim={two}", "--out", str(tmp_path / "out"))
    timed = [[body["messages"] for body in stub.asked if "logprobs" not in body] for stub in (first, other)]
    assert timed[0] == timed[1]
    plain, slim = found["rows"]
    assert (plain["num_identical"], slim["num_identical"], slim["num_answers"]) == (6, 0, 6)
    assert (slim["mean_accepted_length"], plain["speedup"]) == (None, 1.0)
    assert plain["mean_accepted_length"] == 20 / 8, "without the answers that are asked for again"
    assert len(found["findings"]) == 6
    difference = found["findings"][2]
    # Five words of three characters and a space, by -0.5 against -0.75.
    assert {name: difference[name] for name in ("server", "prompt", "character", "token", "margin")} == {
        "server": "slim",
        "prompt": 2,
        "character": 16,
        "token": 5,
        "margin": 0.25,
    }
    assert "token 5 is ' x', not ' w5', by 0.250" in difference["message"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.json", "compare.html"}
    (advice,) = found["recommendations"]
    assert re.search(r"slim|plain", advice["headline"])


def test_an_answer_that_is_not_repeated_has_no_token(run: Run) -> None:
    with serving(Stub()) as one, serving(Stub(changed={5: " x"}, forgets=True)) as two:
        found, _ = run(f"plain={one}", f"slim={two}", "--limit", "1")
    (difference,) = found["findings"]
    assert (difference["character"], difference["token"], difference["margin"]) == (16, None, None)


@pytest.mark.parametrize(
    ("fault", "message", "is_answered"),
    [
        ("dies", "broke off after 21 characters", False),
        ('{"choices": [}', "garbage", False),
        ('{"usage": {"completion_tokens": Infinity}}', "garbage", False),
        ("silent", "silent for", False),
        ("pings", "silent for", False),
        ("moved", "redirects to /v1/models", False),
        ("abort", "'abort'", False),
        ("refused", "400", False),
        ("429", "wait of 3 s", True),
        ("4295", "wait of 10 s", True),
        ("42999", "429", False),
    ],
)
def test_a_fault_is_told_and_other_prompts_are_measured(
    run: Run, slept: list[float], monkeypatch: pytest.MonkeyPatch, fault: str, message: str, is_answered: bool
) -> None:
    # A thought under two names is one text.
    stub = Stub(VLLM, faults={"prompt 2": fault}, names=["reasoning", "reasoning_content"])
    clock, opened = time.perf_counter, server_module._OPENER.open

    def open_briefly(request: urllib.request.Request, timeout: float) -> Any:
        is_silent = request.full_url.startswith(two) and b"prompt 2" in (request.data or b"") and fault == "silent"
        return opened(request, timeout=0.01 if is_silent else timeout)

    # Only what never comes is given up soon: a busy machine may be late with anything else.
    monkeypatch.setattr(server_module._OPENER, "open", open_briefly)
    monkeypatch.setattr(server_module.time, "perf_counter", lambda: clock() + stub.passed_s)
    with serving(Stub(VLLM)) as one, serving(stub) as two:
        found, told = run(f"plain={one}", f"slim={two}", "--timeout", "20")
    (finding,) = found["findings"]
    assert (finding["server"], finding["prompt"]) == ("slim", 2)
    assert message in finding["message"]
    assert finding["text"] in told.splitlines()
    plain, slim = found["rows"]
    assert (plain["num_answers"], slim["num_answers"]) == (6, 6 if is_answered else 5)
    assert slim["num_identical"] == slim["num_answers"]
    assert slim["num_new_tokens"] == 21 * slim["num_answers"]
    assert (slim["mean_accepted_length"], slim["tokens_per_s"] > 0) == (2.5, True)
    if is_answered:
        assert sum(wait_s for wait_s in slept if wait_s >= 1) == (10 if fault == "4295" else 3)


def test_without_usage_there_is_no_speed_but_texts_are_compared(run: Run) -> None:
    with serving(Stub()) as one, serving(Stub(has_usage=False)) as two:
        found, _ = run(f"plain={one}", f"slim={two}")
    plain, slim = found["rows"]
    assert (plain["tokens_per_s"] > 0, slim["tokens_per_s"], slim["num_identical"]) == (True, None, 6)
    assert [each["prompt"] for each in found["findings"]] == list(range(6))


def test_a_server_that_is_down_is_left_out(run: Run) -> None:
    with serving(Stub()) as gone:
        pass
    with serving(Stub()) as one:
        found, _ = run(f"plain={one}", f"slim={gone}", f"third={one}")
    assert [row["num_answers"] for row in found["rows"]] == [6, 0, 6]
    assert [each["prompt"] for each in found["findings"]] == [0, 1, 2, None]
    assert "No server answers" in run(f"slim={gone}", expect=1)[1]
    assert "Invalid IPv6 URL" in run("slim=http://[::1", expect=1)[1]


def test_keys_are_read_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_KEY_SLIM", "secret")
    plain, slim = Stub(), Stub()
    with serving(plain) as one, serving(slim) as two:
        found, told = run(f"plain={one}", f"slim={two}", "--limit", "1")
    assert (plain.keys, slim.keys) == ({None}, {"Bearer secret"})
    assert "secret" not in json.dumps(found) + told
    monkeypatch.setenv("EAGLE_KEY_SLIM", "secret\n")
    told = run(f"slim={two}", expect=2)[1]
    assert "EAGLE_KEY_SLIM" in told
    assert "secret" not in told


def test_ctrl_c_writes_what_there_is(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(VLLM)

    def interrupt(before: Any, after: Any, replies: Any) -> Any:
        if stub.tries["prompt 3"]:
            raise KeyboardInterrupt
        return counted(before, after, replies)

    counted = server_module.count_passes
    monkeypatch.setattr("eagle_slim.runtime.compare.servers.count_passes", interrupt)
    with serving(stub) as url:
        run(f"slim={url}", "--out", str(tmp_path / "out"), expect=130)
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (written["is_complete"], written["rows"][0]["num_answers"]) == (False, 3)


@pytest.mark.parametrize(
    "given",
    [
        ("localhost:8000",),
        ("a=ftp://x",),
        ("a=http://x", "a=http://y"),
        ("a b=http://x",),
        ("a=http://x", "--concurrency", "0"),
        ("a=http://x", "--timeout", "1e12"),
    ],
)
def test_what_cannot_be_asked_is_refused(run: Run, given: tuple[str, ...]) -> None:
    assert re.search("http://localhost:8000|NAME=URL|'--(concurrency|timeout)'", run(*given, expect=2)[1])
