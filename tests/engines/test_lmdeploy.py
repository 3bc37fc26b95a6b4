"""LMDeploy's own loader: reads what `--for lmdeploy` writes, refuses the default architecture name."""

import pytest
from engines.artifacts import OracleFiles, expected_ids
from engines.protocol import ask


@pytest.mark.slow
@pytest.mark.engine("lmdeploy")
def test_lmdeploy_loads_its_flavour_only(oracle_files: OracleFiles) -> None:
    flavour = oracle_files.artifact("full", 640, "--for", "lmdeploy")
    default = oracle_files.artifact("full", 640)
    loaded, refused = ask("lmdeploy_worker.py", [{"head": str(flavour)}, {"head": str(default)}])
    assert "error" not in loaded, loaded
    assert loaded["class"] == "Eagle3LlamaForCausalLM"
    assert loaded["vocab_size"] == 640
    # The embedding is shared from the target when the file has none.
    assert loaded["unloaded"] == ["model.embed_tokens.weight"]
    assert loaded["target_ids"] == expected_ids(640)
    assert loaded["lm_head_equal"]
    assert "LlamaForCausalLMEagle3" in refused["error"]
