"""`eagle-servers` with two real vLLM servers on a CPU, with a head and without, and one that differs at one token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from eagle_slim.runtime.compare.server import Server
from engines import oracle
from engines.artifacts import OracleFiles, command, free_ports, wait_for

pytestmark = pytest.mark.engine("vllm")

# Three cycles whose drafts are all accepted, and one that the draft vocabulary lacks.
PROMPTS = [oracle.prompt(0), oracle.prompt(1, start=3), oracle.prompt(3, start=7, length=9), oracle.prompt(100)]
K, NUM_TOKENS, CHANGED_PROMPT, PLACE = 3, 60, 1, 5
WORDS = [" ".join(f"w{token}" for token in ids) for ids in PROMPTS]


class Changing(BaseHTTPRequestHandler):
    """Passes on what another server answers, but for a token of the answer to `CHANGED_PROMPT`."""

    url, found = "", ""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)) or None
        is_changed = body is not None and WORDS[CHANGED_PROMPT].encode() in body
        with urllib.request.urlopen(urllib.request.Request(self.url + self.path, body, dict(self.headers))) as response:
            self.send_response(200)
            self.end_headers()
            lines = [line for line in response if line.strip()]
        if is_changed:
            texts = [number for number, line in enumerate(lines) if re.search(rb'"content":"[^"]', line)]
            event = json.loads(lines[texts[PLACE]][6:])
            event["choices"][0]["delta"]["content"] = f" {self.found}"
            for each in (event["choices"][0]["logprobs"] or {}).get("content", ()):
                each |= {"token": self.found, "bytes": list(self.found.encode())}
            lines[texts[PLACE]] = f"data: {json.dumps(event)}\n".encode()
        self.wfile.writelines(lines)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(oracle_files: OracleFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of a server that decodes plainly and of one with a head, and the head's log."""
    folder = tmp_path_factory.mktemp("servers")
    (folder / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    ports = free_ports(2)
    head = {"method": "eagle3", "model": str(oracle_files.artifact("full", 640)), "num_speculative_tokens": K}
    common = [
        "--model",
        str(oracle_files.target),
        "--enforce-eager",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "4",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        str(2**28),
        "--chat-template",
        str(folder / "chat.jinja"),
        "--host",
        "127.0.0.1",
        "--port",
    ]
    asked = [
        [str(folder / "plain.log"), *common, str(ports[0])],
        [str(folder / "head.log"), *common, str(ports[1]), "--speculative-config", json.dumps(head)],
    ]
    line = [sys.executable, str(Path(__file__).with_name("vllm_servers.py")), json.dumps(asked)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        wait_for(*(f"{url}/health" for url in urls))
        yield {"plain": urls[0], "head": urls[1], "log": str(folder / "head.log")}
        assert process.stdin is not None
        process.stdin.close()


def test_two_servers_and_one_that_differs_at_one_token(served: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(WORDS))
    own, likely = Server("plain", served["plain"]).ask(WORDS[CHANGED_PROMPT], PLACE + 1, True).choices[PLACE]
    other = sorted(likely, key=likely.__getitem__)[-2]
    Changing.url, Changing.found = served["plain"], other.decode().strip()
    with ThreadingHTTPServer(("127.0.0.1", 0), Changing) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        changed = f"http://127.0.0.1:{http.server_port}"
        arguments = [f"plain={served['plain']}", f"head={served['head']}", f"changed={changed}", "--concurrency", "1,4"]
        arguments += ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", str(NUM_TOKENS), "--json"]
        found = json.loads(command("eagle-servers", *arguments).stdout)
        http.shutdown()
    for plain, head, differing in (found["rows"][:3], found["rows"][3:]):
        assert [row["num_answers"] for row in (plain, head, differing)] == [4, 4, 4]
        assert [row["num_identical"] for row in (plain, head, differing)] == [4, 4, 3]
        assert [row["num_new_tokens"] for row in (plain, head, differing)] == [4 * NUM_TOKENS] * 3
        assert plain["mean_accepted_length"] is None
        # The first token comes from the prompt; then drafts are accepted, all or none of them.
        passes = 3 * -(-(NUM_TOKENS - 1) // (K + 1)) + NUM_TOKENS - 1
        assert head["num_passes"] == pytest.approx(passes, abs=3)
    assert [(each["server"], each["batch"], each["prompt"], each["token"]) for each in found["findings"]] == [
        ("changed", 1, CHANGED_PROMPT, PLACE),
        ("changed", 4, CHANGED_PROMPT, PLACE),
    ]
    for each in found["findings"]:
        assert each["margin"] == pytest.approx(likely[own] - likely[other], abs=1e-3)
    # Of all answers, and of the few tokens that warmed the server up.
    drafts = accepted = 0
    deadline = time.monotonic() + 1800
    while drafts < 2 * passes * K and time.monotonic() < deadline:
        logged = re.findall(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens", Path(served["log"]).read_text())
        accepted, drafts = (sum(int(numbers[place]) for numbers in logged) for place in (0, 1))
        time.sleep(0.2)
    length = 1 + accepted / (drafts / K)
    assert [row["mean_accepted_length"] for row in found["rows"][1::3]] == pytest.approx([length] * 2, rel=0.03)
