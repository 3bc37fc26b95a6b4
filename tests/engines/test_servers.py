"""`examples/same_text.py` with two real vLLM servers on a CPU, with a head and without."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import oracle
from engines.artifacts import OracleFiles, free_ports, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.engine("vllm")

# Three cycles whose drafts are all accepted, and one that the draft vocabulary lacks.
PROMPTS = [oracle.prompt(0), oracle.prompt(1, start=3), oracle.prompt(3, start=7, length=9), oracle.prompt(100)]
K, NUM_TOKENS = 3, 60
WORDS = [" ".join(f"w{token}" for token in ids) for ids in PROMPTS]


@pytest.fixture(scope="module")
def served(oracle_files: OracleFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    ports = free_ports(2)
    head = {"method": "eagle3", "model": str(oracle_files.artifact("full", 640)), "num_speculative_tokens": K}
    common = ["--model", str(oracle_files.target), "--chat-template", str(folder / "chat.jinja"), "--enforce-eager"]
    common += f"--max-model-len 128 --max-num-seqs 4 --dtype float32 --kv-cache-memory-bytes {2**28}".split()
    common += ["--host", "127.0.0.1", "--port"]
    asked = [
        [str(folder / "plain.log"), *common, str(ports[0])],
        [str(folder / "head.log"), *common, str(ports[1]), "--speculative-config", json.dumps(head)],
    ]
    line = [sys.executable, str(Path(__file__).with_name("vllm_servers.py")), json.dumps(asked)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        wait_for(*(f"{url}/health" for url in urls))
        yield {"plain": urls[0], "head": urls[1]}
        process.stdin.close()


def test_a_head_changes_no_text(served: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(WORDS))
    line = [sys.executable, EXAMPLES / "same_text.py", served["plain"], served["head"], "--prompts", prompts]
    done = subprocess.run([*line, "--max-tokens", str(NUM_TOKENS)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4 of 4 answers are equal\n"), done.stderr
    # The first token comes from the prompt; then drafts are accepted, all or none of them.
    passes = 3 * -(-(NUM_TOKENS - 1) // (K + 1)) + NUM_TOKENS - 1
    drafts, deadline = 0.0, time.monotonic() + 1800
    while drafts < passes - 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        with urllib.request.urlopen(f"{served['head']}/metrics") as page:
            found = re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)", page.read().decode(), re.MULTILINE)
        drafts = sum(map(float, found))
    assert drafts == pytest.approx(passes, abs=3)
