"""DFlash drafts in vLLM, llama.cpp and speculators: every draft of the oracle is accepted over the gathered rows."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from eagle_slim.convert import verify_artifact
from engines import oracle
from engines.artifacts import OracleFiles, break_map, target_ids
from engines.protocol import Json, ask

from benchmarks.shared.llama_cpp import Answer, generate

TOKENS = 24
CYCLES = (0, 1, 5)
CASES = {
    "z-lab's form": ("dflash", 320),
    "speculators' form": ("dflash_speculators", 320),
    "speculators' form with a map, cut again": ("dflash_mapped", 320),
    "100 rows": ("dflash", 112),
}


def prompts() -> list[list[int]]:
    return [oracle.prompt(cycle, cycle, 6 + cycle) for cycle in CYCLES]


@pytest.fixture(scope="module")
def served(oracle_files: OracleFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    folders = {name: oracle_files.artifact(head, size) for name, (head, size) in CASES.items()}
    folders["unconverted"] = oracle_files.head("dflash")
    folders["map missing"] = break_map(
        folders["z-lab's form"], tmp_path_factory.mktemp("broken") / "missing", "missing"
    )
    job = {"target": str(oracle_files.target), "method": "dflash", "k": 1, "max_tokens": TOKENS, "dtype": "float32"}
    jobs = [job | {"head": str(folder), "prompts": prompts()} for folder in folders.values()]
    return dict(zip(folders, ask("vllm_worker.py", jobs), strict=True))


@pytest.mark.engine("vllm")
@pytest.mark.parametrize("name", [*CASES, "unconverted"])
def test_vllm_accepts_every_draft_and_the_output_is_unchanged(served: dict[str, Json], name: str) -> None:
    result = served[name]
    assert "error" not in result, result
    assert result["tokens"] == [oracle.continuation(prompt, TOKENS) for prompt in prompts()]
    assert result["accepted"] == result["drafted"] > 0


@pytest.mark.engine("vllm")
def test_without_its_map_vllm_accepts_none(served: dict[str, Json]) -> None:
    assert served["map missing"]["accepted"] == 0


@pytest.mark.engine("speculators")
def test_speculators_loads_a_slim_draft_of_its_own_form(oracle_files: OracleFiles, tmp_path: Path) -> None:
    folder = copytree(oracle_files.artifact("dflash_mapped", 320), tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(oracle_files.target)
    (folder / "config.json").write_text(json.dumps(config))
    (result,) = ask("speculators_worker.py", [{"draft": str(folder)}])
    assert result == {"class": "DFlashDraftModel", "different": [], "tensors": 17}
    assert len(target_ids(folder)) == 320


@pytest.fixture(scope="module")
def gguf_target(oracle_files: OracleFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build_gguf_target(tmp_path_factory.mktemp("gguf") / "target.gguf", oracle_files.target)


def drafted(program: Path, target: Path, draft: Path | None, method: str, depth: int) -> list[Answer]:
    """What llama.cpp answers to each prompt."""
    drafts = None if draft is None else draft / "model-f32.gguf"
    texts = [oracle.text(prompt) for prompt in prompts()]
    how = {"depth": depth, "num_tokens": TOKENS, "target": target, "method": method}
    return [generate(program, prompt, drafts, **how) for prompt in texts]


@pytest.mark.engine("gguf")
@pytest.mark.parametrize(
    ("head", "size", "method", "depth"),
    [*((head, size, "draft-dflash", 1) for head, size in CASES.values()), ("dspark", 320, "draft-dspark", 3)],
)
def test_llama_cpp_accepts_every_draft_and_the_output_is_unchanged(
    llama_cpp: Path, gguf_target: Path, oracle_files: OracleFiles, head: str, size: int, method: str, depth: int
) -> None:
    folder = oracle_files.artifact(head, size, "--gguf", "f32")
    assert verify_artifact(folder, offline=True, engines=["llama.cpp"], engine_version="b11434").ok
    answers = drafted(llama_cpp, gguf_target, folder, method, depth)
    for prompt, answer, plain in zip(prompts(), answers, drafted(llama_cpp, gguf_target, None, method, 1), strict=True):
        assert answer.num_prompt == len(prompt)
        assert answer.text == oracle.text(oracle.continuation(prompt, answer.num_tokens))
        assert answer.text.startswith(plain.text) or plain.text.startswith(answer.text)
        # Every pass gives all that it drafted and one more; the last may end sooner.
        assert answer.num_passes <= -(-answer.num_tokens // (1 + depth))
        assert plain.num_accepted == 0


@pytest.mark.engine("gguf")
def test_llama_cpp_accepts_none_with_a_shifted_map(
    llama_cpp: Path, gguf_target: Path, oracle_files: OracleFiles, tmp_path: Path
) -> None:
    import gguf

    folder = copytree(oracle_files.artifact("dflash", 320, "--gguf", "f32"), tmp_path / "broken")
    (d2t,) = [tensor for tensor in gguf.GGUFReader(folder / "model-f32.gguf", "r+").tensors if tensor.name == "d2t"]
    d2t.data[:] = np.roll(d2t.data, 1)
    d2t.data.flush()
    assert sum(answer.num_accepted for answer in drafted(llama_cpp, gguf_target, folder, "draft-dflash", 1)) == 0
    assert "d2t differs" in verify_artifact(folder, offline=True)["model-f32.gguf"].detail
