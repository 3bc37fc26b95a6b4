"""DFlash drafts in vLLM and speculators: every draft of the oracle is accepted over the rows that were gathered."""

import json
from pathlib import Path
from shutil import copytree

import pytest
from engines import oracle
from engines.artifacts import OracleFiles, break_map, target_ids
from engines.protocol import Json, ask

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
