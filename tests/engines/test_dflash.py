"""DFlash drafts in vLLM: every draft of the oracle is accepted over the gathered rows."""

import pytest
from engines import oracle
from engines.artifacts import OracleFiles, break_map
from engines.protocol import Json, ask

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.slow]

TOKENS = 24
CYCLES = (0, 1, 5)
CASES = {"z-lab's form": ("dflash", 320), "speculators' form with a map, cut again": ("dflash_mapped", 112)}


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


@pytest.mark.parametrize("name", [*CASES, "unconverted"])
def test_vllm_accepts_every_draft_and_the_output_is_unchanged(served: dict[str, Json], name: str) -> None:
    result = served[name]
    assert "error" not in result, result
    assert result["tokens"] == [oracle.continuation(prompt, TOKENS) for prompt in prompts()]
    assert result["accepted"] == result["drafted"] > 0


def test_without_its_map_vllm_accepts_none(served: dict[str, Json]) -> None:
    assert served["map missing"]["accepted"] == 0
