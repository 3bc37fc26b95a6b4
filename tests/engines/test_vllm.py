"""vLLM serves the oracle's artifacts: all drafts accepted, output as without speculation.

An oracle draft is accepted exactly when rows, map, order and tap layers are right (see oracle.py), so "all accepted"
proves the artifact, and "none accepted" is what an engine shows, without any error, for a wrong one.
"""

from pathlib import Path

import pytest
from engines import oracle
from engines.artifacts import TAPS, OracleFiles, break_map, command, expected_ids, target_ids
from engines.protocol import Json, ask, ask_together

pytestmark = pytest.mark.engine("vllm")

K = 3
MAX_TOKENS = 32
PROMPTS = [oracle.prompt(0), oracle.prompt(1, start=3), oracle.prompt(3, start=7, length=9)]
"""Cycles that even the smallest draft vocabulary of these tests holds whole."""
RARE_PROMPT = oracle.prompt(100)

# (head, draft vocabulary, options of eagle-convert)
CASES = {
    "full head": ("full", "full"),
    "full head to 640": ("full", 640),
    "full head to 100, not a multiple of 64": ("full", 100),
    "mapped head to 320": ("mapped", 320),
    "frequency order, int32, no t2d, layers.0., to 320": ("mapped_by_frequency", 320),
    "frequency order, normalised at its own size": ("mapped_by_frequency", 640),
    "pytorch_model.bin, model. prefix, to 128": ("mapped_bin", 128),
    "rows from the target, to 640": ("target_rows", 640),
    "tap layers 1, 3, 6, to 640": ("other_taps", 640, "--tap-layers", ",".join(map(str, TAPS))),
    "biases of attention and MLP, to 640": ("biased", 640),
    "an embedding that was trained, to 640": ("trained_embedding", 640),
    "norms of q and k, map, to 320": ("head_norms", 320),
    "EAGLE-1, unchanged head": ("eagle1", 320),
    "EAGLE-1 with biases of attention and MLP": ("eagle1_biased", 320),
}


def job(files: OracleFiles, head: Path | None, **more: object) -> Json:
    return {
        "target": str(files.target),
        "head": None if head is None else str(head),
        "prompts": PROMPTS,
        "k": K,
        "max_tokens": MAX_TOKENS,
        "max_model_len": 128,
        **more,
    }


@pytest.fixture(scope="module")
def served(oracle_files: OracleFiles) -> dict[str, Json]:
    """Results of every case, and of plain decoding, from one vLLM process."""
    jobs = {"plain": job(oracle_files, None, prompts=[*PROMPTS, RARE_PROMPT])}
    for name, (head, draft_vocab, *options) in CASES.items():
        method = "eagle" if head.startswith("eagle1") else "eagle3"
        jobs[name] = job(oracle_files, oracle_files.artifact(head, draft_vocab, *options), method=method)
    jobs["rare"] = job(oracle_files, oracle_files.artifact("full", 640), prompts=[RARE_PROMPT])
    for how in ("missing", "absolute", "order"):
        broken = break_map(oracle_files.artifact("full", 640), oracle_files.folder / "broken" / how, how)
        jobs[how] = job(oracle_files, broken)
    return dict(zip(jobs, ask("vllm_worker.py", list(jobs.values())), strict=True))


def test_the_oracle_target_says_what_it_should(served: dict[str, Json]) -> None:
    expected = [oracle.continuation(prompt, MAX_TOKENS) for prompt in [*PROMPTS, RARE_PROMPT]]
    assert served["plain"]["tokens"] == expected


@pytest.mark.parametrize("name", CASES)
def test_all_drafts_are_accepted_and_the_output_is_unchanged(
    served: dict[str, Json], figures: dict[str, str], name: str
) -> None:
    result = served[name]
    assert "error" not in result, result
    assert result["tokens"] == served["plain"]["tokens"][: len(PROMPTS)]
    # One token comes from the prompt; each step then yields K drafted tokens and one of the target's own.
    steps = len(PROMPTS) * -(-(MAX_TOKENS - 1) // (K + 1))
    assert result["drafts"] == steps
    assert result["per_position"] == [steps] * K
    assert result["accepted"] == result["drafted"] == K * steps
    figures[f"oracle, {name}"] = f"{result['accepted']} of {result['drafted']} drafts accepted"


def test_tokens_outside_the_draft_vocabulary_are_generated_but_never_drafted(
    served: dict[str, Json], oracle_files: OracleFiles
) -> None:
    assert not set(oracle.prompt(100, length=oracle.CYCLE)) & set(target_ids(oracle_files.artifact("full", 640)))
    assert served["rare"]["tokens"] == served["plain"]["tokens"][len(PROMPTS) :]
    assert served["rare"]["accepted"] == 0


@pytest.mark.parametrize(("head", "draft_vocab"), [("full", 640), ("full", 100), ("mapped_by_frequency", 320)])
def test_the_map_holds_the_ranked_ids(oracle_files: OracleFiles, head: str, draft_vocab: int) -> None:
    found = target_ids(oracle_files.artifact(head, draft_vocab))
    assert found == expected_ids(draft_vocab, trained=None if head == "full" else 640)


@pytest.mark.parametrize("how", ["missing", "order"])
def test_vllm_loads_a_broken_map_silently_and_eagle_verify_does_not(
    served: dict[str, Json], oracle_files: OracleFiles, how: str
) -> None:
    result = served[how]
    assert result["tokens"] == served["plain"]["tokens"][: len(PROMPTS)]
    assert result["drafts"] > 0
    assert result["accepted"] == 0
    refused = command("eagle-verify", str(oracle_files.folder / "broken" / how), expect=1)
    assert "Traceback" not in refused.stderr


def test_absolute_ids_stop_vllm_only_once_it_serves_and_eagle_verify_before(
    served: dict[str, Json], oracle_files: OracleFiles
) -> None:
    assert "IndexError" in served["absolute"]["error"]
    refused = command("eagle-verify", str(oracle_files.folder / "broken" / "absolute"), expect=1)
    assert "d2t" in refused.stdout + refused.stderr


def test_eagle_verify_accepts_what_vllm_accepted(oracle_files: OracleFiles) -> None:
    command("eagle-verify", str(oracle_files.artifact("full", 640)), "--target", str(oracle_files.target))


def test_two_tensor_parallel_ranks(oracle_files: OracleFiles) -> None:
    artifact = oracle_files.artifact("full", 640)
    ((result,),) = ask_together("vllm_worker.py", [job(oracle_files, artifact, tensor_parallel=2)], [()])
    assert result["tokens"] == [oracle.continuation(prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert result["accepted"] == result["drafted"] > 0
