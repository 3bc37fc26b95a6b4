import numpy as np
import pytest
from eagle_slim.vocab_tools import DraftVocab, export_token_map
from engines import oracle
from engines.artifacts import OracleFiles, expected_ids
from engines.protocol import Json, ask

pytestmark = pytest.mark.engine("sglang")

EAGLE3_CASES = {
    "full head to 640": ("full", 640, None),
    "full head to 100, padded to 128 rows": ("full", 100, None),
    "a map in the order of frequency, int32, layers.0., to 320": ("mapped", 320, 640),
    "rows from the target, to 640": ("target_rows", 640, None),
}
EXPORTED = [248_044, 3, 11, 7]


@pytest.fixture(scope="module")
def loaded(oracle_files: OracleFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    jobs: dict[str, Json] = {
        name: {"head": str(oracle_files.artifact(head, size)), "algorithm": "EAGLE3"}
        for name, (head, size, _) in EAGLE3_CASES.items()
    }
    artifact = oracle_files.artifact("eagle1", 320, "--for", "sglang")
    token_map = str(artifact / "freq_320.pt")
    jobs["EAGLE-2"] = {"head": str(artifact), "algorithm": "EAGLE", "token_map": token_map}
    jobs["token map"] = {"token_map": token_map}
    jobs["token map of an EAGLE-3 artifact"] = {"token_map": str(oracle_files.artifact("full", 640) / "freq_640.pt")}
    exported = tmp_path_factory.mktemp("exported") / "qwen.pt"
    export_token_map(DraftVocab(np.array(EXPORTED), 1, 248_320), exported, "sglang")
    jobs["exported list"] = {"token_map": str(exported)}
    asked = [{"target": str(oracle_files.target), **job} for job in jobs.values()]
    return dict(zip(jobs, ask("sglang_worker.py", asked), strict=True))


@pytest.mark.parametrize("name", EAGLE3_CASES)
def test_an_eagle3_artifact_loads_completely(loaded: dict[str, Json], name: str) -> None:
    _, draft_vocab, trained = EAGLE3_CASES[name]
    result = loaded[name]
    assert "error" not in result, result
    assert result["class"] == "LlamaForCausalLMEagle3"
    assert result["unloaded"] == []
    assert result["hot_token_ids"] == expected_ids(draft_vocab, trained)
    assert result["lm_head_rows"] == -(-draft_vocab // 64) * 64
    assert result["lm_head_equal"]
    assert result["fc_equal"]
    assert result["embedding_is_targets"]


def test_the_token_map_is_read_in_rank_order(loaded: dict[str, Json]) -> None:
    for name, size in (("token map", 320), ("token map of an EAGLE-3 artifact", 640)):
        found = loaded[name]["token_map"]
        assert sorted(found) == expected_ids(size)
        ranked = [token for token in oracle.ranked_ids() if token not in (oracle.BOS, oracle.EOS)]
        assert found[2:] == ranked[: size - 2]


def test_an_exported_list_is_read_as_it_is(loaded: dict[str, Json]) -> None:
    assert loaded["exported list"]["token_map"] == EXPORTED


def test_an_eagle2_head_with_its_token_map(loaded: dict[str, Json]) -> None:
    result = loaded["EAGLE-2"]
    assert "error" not in result, result
    assert result["class"] == "LlamaForCausalLMEagle"
    assert result["unloaded"] == []
    assert result["hot_token_ids"] == loaded["token map"]["token_map"]
    assert result["lm_head_rows"] == 320
    assert result["lm_head_equal"]
    assert result["fc_equal"]
