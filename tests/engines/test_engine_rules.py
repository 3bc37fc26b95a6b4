"""`convert/engines.py`: which heads an engine cannot take, and what is said instead."""

from pathlib import Path

import pytest
from eagle_slim.convert.engines import (
    ENGINES,
    HeadFacts,
    conversion_findings,
    flavoured_architecture,
    head_findings,
    require_engines,
    version_findings,
)
from eagle_slim.convert.verify.verify import verify_artifact
from eagle_slim.vocab_tools.errors import UsageError
from engines.artifacts import OracleFiles
from engines.head_table import EAGLE1, EAGLE3, HEADS, head_table, with_config
from support.raising import raises

DOCS = Path(__file__).resolve().parents[2] / "docs" / "engines.md"


def problems(facts: HeadFacts, engine: str) -> list[tuple[str, str]]:
    """(severity, message) of what the engine makes of the head itself, versions apart."""
    return [(f.severity, str(f)) for f in head_findings(facts, engine)]


@pytest.mark.parametrize(
    ("changes", "engine", "taken"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "sglang", False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "safeailab", True),
        # The default taps spelt out.
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "sglang", True),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, "sglang", False),
    ],
)
def test_what_the_table_does_not_tell(changes: dict[str, object], engine: str, taken: bool) -> None:
    assert (problems(with_config(EAGLE3, **changes), engine) == []) == taken


@pytest.mark.parametrize(
    ("facts", "engines"),
    [
        (EAGLE3, set()),
        # A window without a layer type is none.
        (with_config(EAGLE3, sliding_window=2048), set()),
        (HEADS["a sliding window in its own layer"], {*ENGINES} - {"vllm"}),
        (EAGLE1, {*ENGINES}),
    ],
)
def test_engines_that_a_conversion_speaks_of(facts: HeadFacts, engines: set[str]) -> None:
    assert {finding.engine for finding in conversion_findings(facts)} == engines


def test_the_table_of_the_docs_is_made_from_the_rules() -> None:
    assert head_table() in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "engine", "words"),
    [
        ("`hidden_act` other than `silu`", "tensorrt-llm", "draft with SafeAILab/EAGLE or eagle-generate"),
        ("`hidden_act: swish` (the same function: write `silu`)", "vllm", "the same function"),
        ("a sliding window in its own layer", "sglang", "--speculative-draft-window-size 2047"),
        ("biases in the MLP", "sglang", "drafts wrongly; serve it with vLLM or eagle-generate"),
        ("`norm_output`", "lmdeploy", "serve it with vLLM, SGLang or eagle-generate"),
        ("EAGLE-1/2 with a token map", "vllm", "--speculative-token-map"),
        ("… in an EAGLE-1/2 head", "vllm", "generate with eagle-generate"),
    ],
)
def test_a_finding_names_the_alternative(kind: str, engine: str, words: str) -> None:
    assert any(words in text for _, text in problems(HEADS[kind], engine))


@pytest.mark.parametrize(
    ("version", "severities"), [("0.25.1", []), ("0.32.0+cpu", []), ("0.33.1", ["warning"]), ("0.25", ["warning"])]
)
def test_a_version_outside_the_proven_range_is_a_warning(version: str, severities: list[str]) -> None:
    assert [finding.severity for finding in version_findings("vllm", version)] == severities


def test_unknown_engines_and_versions_are_usage_errors() -> None:
    with raises(UsageError, option="--engine"):
        require_engines(["ollama"])
    with raises(UsageError, option="--engine-version"):
        require_engines(["vllm"], "latest")
    with raises(UsageError, option="--engine-version"):
        require_engines(["vllm", "sglang"], "0.32.0")


def test_sglang_finds_eagle1_by_a_class_of_its_own() -> None:
    assert flavoured_architecture("eagle", "sglang", "Qwen2ForCausalLM") == "Qwen2ForCausalLMEagle"


@pytest.mark.parametrize(
    ("engine", "version", "status", "words"),
    [
        ("vllm", "0.32.0", "ok", ""),
        ("vllm", "0.9.1", "warning", "outside the proven range"),
        ("lmdeploy", None, "failed", "--for lmdeploy"),
    ],
)
def test_eagle_verify_asks_the_engine(
    oracle_files: OracleFiles, engine: str, version: str | None, status: str, words: str
) -> None:
    artifact = oracle_files.artifact("full", 640)
    verified = verify_artifact(artifact, engines=[engine], engine_version=version, offline=True)
    assert verified.ok == (status != "failed")
    assert verified[f"engine {engine}"].status == status
    assert words in verified[f"engine {engine}"].detail
