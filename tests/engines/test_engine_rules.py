"""`convert/engines.py`: which heads an engine cannot take, and what is said instead; the table of docs/heads.md.

Only the kinds of heads are stated here; what an engine makes of each comes from its rules in `convert/engines.py`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from eagle_slim.convert import engines as rules
from eagle_slim.convert import names, verify_artifact
from eagle_slim.convert.engines import ENGINES, HeadFacts, flavoured_architecture, head_findings
from eagle_slim.vocab_tools.errors import UsageError
from engines.artifacts import OracleFiles
from support.raising import raises

DOCS = Path(__file__).resolve().parents[2] / "docs" / "heads.md"

_CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
EAGLE3 = HeadFacts("eagle3", _CONFIG, frozenset({names.FC}), 640, 2048, num_taps=3, target_layers=8)
"""An ordinary EAGLE-3 head with a reduced vocabulary."""
EAGLE1 = HeadFacts(
    "eagle", _CONFIG | {"architectures": ["LlamaForCausalLM"]}, frozenset({names.FC, names.FC_BIAS}), 320, 2048, 0
)
"""An ordinary EAGLE-1/2 head with a token map."""
DFLASH = HeadFacts("dflash", {}, frozenset({names.LM_HEAD}), 640, 2048, 0)
"""A DFlash draft with LM-head rows of its own."""


def with_config(facts: HeadFacts, **changes: object) -> HeadFacts:
    return replace(facts, config={**facts.config, **changes})


_WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
_TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
# Of a target of 8 layers the output of the last, too; as --tap-layers 2,4,8 writes it.
_TO_THE_LAST = {
    "eagle_aux_hidden_state_layer_ids": [2, 4, 8],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
}
_BIASED = frozenset({names.FC, names.ATTENTION_BIASES["eagle3"][0]})
_MLP_BIASED = frozenset({names.FC, names.MLP_BIASES["eagle3"][0]})
QWEN3 = with_config(
    replace(EAGLE3, tensor_names=frozenset({names.FC, *names.HEAD_NORMS["eagle3"]})),
    architectures=["Eagle3Qwen3ForCausalLM"],
    model_type="qwen3",
)
HEADS: dict[str, HeadFacts] = {
    "EAGLE-3 with a reduced vocabulary": EAGLE3,
    "… with its full vocabulary (`--draft-vocab full`)": replace(EAGLE3, draft_vocab=2048),
    "EAGLE-1/2 with a token map": EAGLE1,
    "… with a non-zero `fc.bias`": replace(EAGLE1, nonzero_fc_bias=True),
    "… with a sliding window": with_config(EAGLE1, **_WINDOW),
    "`fc` over more or fewer than 3 target layers, unconverted": replace(EAGLE3, num_taps=4),
    "only the target's last hidden state, without `fc`": with_config(
        replace(EAGLE3, num_taps=0, tensor_names=frozenset()), eagle_config={"use_aux_hidden_state": False}
    ),
    "tap layers other than (2, n/2, n-3), converted with `--tap-layers`": with_config(
        EAGLE3, **_TAPS, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    ),
    "… named at top level only": with_config(EAGLE3, **_TAPS),
    "… named in `eagle_config` only": with_config(EAGLE3, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}),
    "`rope_scaling` other than null, `linear`, `dynamic`": with_config(EAGLE3, rope_scaling={"rope_type": "llama3"}),
    "… `yarn`": with_config(EAGLE3, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "`partial_rotary_factor` below 1": with_config(EAGLE3, partial_rotary_factor=0.5),
    "`head_dim` × heads ≠ hidden size (Qwen3 style)": with_config(EAGLE3, head_dim=128),
    "norms before `fc`": replace(EAGLE3, tensor_names=frozenset({names.FC, "input_norm.weight"})),
    "a norm for each captured layer (`fc_norm`)": replace(
        EAGLE3, tensor_names=frozenset({names.FC, *(f"fc_norm.{layer}.weight" for layer in range(3))})
    ),
    "`norm_before_residual` (default of speculators' format)": with_config(EAGLE3, norm_before_residual=True),
    "`norm_output`": with_config(EAGLE3, norm_output=True),
    "biases in the attention": replace(EAGLE3, tensor_names=_BIASED),
    "biases in the MLP": replace(EAGLE3, tensor_names=_MLP_BIASED),
    "norms of q and k (Qwen3's layer)": QWEN3,
    "… with biases of its output projection or MLP": replace(QWEN3, tensor_names=QWEN3.tensor_names | _MLP_BIASED),
    "… in an EAGLE-1/2 head": replace(EAGLE1, tensor_names=EAGLE1.tensor_names | frozenset(names.HEAD_NORMS["eagle"])),
    "an embedding that is not the target's": replace(EAGLE3, tensor_names=frozenset({names.FC, names.EMBEDDING})),
    "`hidden_act` other than `silu`": with_config(EAGLE3, hidden_act="gelu"),
    "`hidden_act: swish` (the same function: write `silu`)": with_config(EAGLE3, hidden_act="swish"),
    "a sliding window in its own layer": with_config(EAGLE3, **_WINDOW),
    "DFlash with a reduced vocabulary": DFLASH,
    "DSpark with a reduced vocabulary": replace(DFLASH, tensor_names=frozenset({names.LM_HEAD, names.MARKOV_OUT})),
}


def severity(facts: HeadFacts, engine: str) -> str | None:
    """The worst that an engine makes of a head itself, versions apart: "error", "warning" or None."""
    found = {finding.severity for finding in head_findings(facts, engine)}
    return next((worst for worst in ("error", "warning") if worst in found), None)


def written_for(facts: HeadFacts, engine: str) -> HeadFacts:
    """The head as `--for` writes it, where `engine` reads a class name of its own."""
    name = flavoured_architecture(facts.kind, engine, str(facts.architecture))
    return with_config(facts, architectures=[name])


def head_table() -> str:
    """The table in Markdown: ✓ takes it, (✓) with a loss or a condition, – refuses it or drafts wrongly."""
    marks = {None: "✓", "warning": "(✓)", "error": "–"}
    rows = [["head", *(engine.title for engine in ENGINES.values())], ["---"] * (len(ENGINES) + 1)]
    rows += [
        [words, *(marks[severity(written_for(facts, engine), engine)] for engine in ENGINES)]
        for words, facts in HEADS.items()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_what_the_table_does_not_tell() -> None:
    for changes, engine, taken in (
        ({"architectures": ["LlamaForCausalLM"]}, "sglang", False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "safeailab", True),
        # The default taps spelt out.
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "sglang", True),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, "sglang", False),
        (_TO_THE_LAST, "vllm", True),
        (_TO_THE_LAST, "sglang", False),
    ):
        assert (severity(with_config(EAGLE3, **changes), engine) is None) == taken


def test_engines_that_a_conversion_speaks_of() -> None:
    for facts, engines in (
        (EAGLE3, set()),
        # A window without a layer type is none.
        (with_config(EAGLE3, sliding_window=2048), set()),
        (HEADS["a sliding window in its own layer"], {*ENGINES} - {"vllm"}),
        (EAGLE1, {*ENGINES}),
    ):
        assert {finding.engine for finding in rules.conversion_findings(facts)} == engines


def test_the_table_of_the_docs_is_made_from_the_rules() -> None:
    assert head_table() in DOCS.read_text(encoding="utf-8")


def test_a_finding_names_the_alternative() -> None:
    for kind, engine, words in (
        ("`hidden_act` other than `silu`", "tensorrt-llm", "draft with SafeAILab/EAGLE or eagle-generate"),
        ("`hidden_act: swish` (the same function: write `silu`)", "vllm", "the same function"),
        ("a sliding window in its own layer", "sglang", "--speculative-draft-window-size 2047"),
        ("biases in the MLP", "sglang", "drafts wrongly; serve it with vLLM or eagle-generate"),
        ("`norm_output`", "lmdeploy", "serve it with vLLM, SGLang or eagle-generate"),
        ("EAGLE-1/2 with a token map", "vllm", "--speculative-token-map"),
        ("… in an EAGLE-1/2 head", "vllm", "generate with eagle-generate"),
    ):
        assert any(words in str(finding) for finding in head_findings(HEADS[kind], engine))
    # One with all rows needs no token map.
    for engine in ("tensorrt-llm", "llama.cpp", "lmdeploy"):
        (found,) = head_findings(replace(EAGLE1, draft_vocab=2048), engine)
        assert found.alternative == "serve it with vLLM or eagle-generate"


@pytest.mark.parametrize(
    ("version", "severities"), [("0.25.1", []), ("0.32.0+cpu", []), ("0.33.1", ["warning"]), ("0.25", ["warning"])]
)
def test_a_version_outside_the_proven_range_is_a_warning(version: str, severities: list[str]) -> None:
    assert [finding.severity for finding in rules.version_findings("vllm", version)] == severities


def test_unknown_engines_and_versions_are_usage_errors() -> None:
    with raises(UsageError, option="--engine"):
        rules.require_engines(["ollama"])
    for asked, version in ((["vllm"], "latest"), (["vllm", "sglang"], "0.32.0")):
        with raises(UsageError, option="--engine-version"):
            rules.require_engines(asked, version)


def test_sglang_finds_eagle1_by_a_class_of_its_own() -> None:
    assert flavoured_architecture("eagle", "sglang", "Qwen2ForCausalLM") == "Qwen2ForCausalLMEagle"


def test_eagle_verify_asks_the_engine(oracle_files: OracleFiles) -> None:
    for engine, version, status, words in (
        ("vllm", "0.32.0", "ok", ""),
        ("vllm", "0.9.1", "warning", "outside the proven range"),
        ("lmdeploy", None, "failed", "--for lmdeploy"),
    ):
        artifact = oracle_files.artifact("full", 640)
        verified = verify_artifact(artifact, engines=[engine], engine_version=version, offline=True)
        assert verified.ok == (status != "failed")
        assert verified[f"engine {engine}"].status == status
        assert words in verified[f"engine {engine}"].detail
