"""Trainers read the artifact too, to fine-tune it or to repackage it: speculators and SpecForge, executed."""

import pytest
from engines import oracle
from engines.artifacts import OracleFiles, break_map
from engines.protocol import ask

HEADS = [("full", 640), ("mapped_by_frequency", 320)]


@pytest.mark.engine("speculators", "vllm")
def test_speculators_converts_reloads_and_vllm_serves_the_result(oracle_files: OracleFiles) -> None:
    outputs = [oracle_files.folder / f"speculators-{head}" for head, _ in HEADS]
    jobs = [
        {"head": str(oracle_files.artifact(head, size)), "target": str(oracle_files.target), "out": str(out)}
        for (head, size), out in zip(HEADS, outputs, strict=True)
    ]
    for result in ask("speculators_worker.py", jobs):
        assert "error" not in result, result
        assert result["different"] == []
        assert result["teacher_rows_equal"]
        assert result["not_from_head"] == ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    prompt = oracle.prompt(0)
    serve = {"target": str(oracle_files.target), "head": str(outputs[0]), "prompts": [prompt], "max_model_len": 128}
    (result,) = ask("vllm_worker.py", [serve])
    assert result["tokens"] == [oracle.continuation(prompt, 32)]
    assert result["accepted"] == result["drafted"] > 0


@pytest.mark.engine("specforge")
def test_specforge_loads_and_its_mapping_check_passes(oracle_files: OracleFiles) -> None:
    good = [str(oracle_files.artifact(head, size)) for head, size in HEADS]
    broken = break_map(oracle_files.artifact("full", 640), oracle_files.folder / "broken-specforge", "absolute")
    *results, refused = ask("specforge_worker.py", [{"head": head} for head in [*good, str(broken)]])
    for result in results:
        assert "error" not in result, result
        assert result["class"] == "LlamaForCausalLMEagle3"
        assert result["missing"] == ["embed_tokens.weight"]
        assert result["unexpected"] == []
        assert result["different"] == []
    assert "mapping is inconsistent" in refused["error"]
