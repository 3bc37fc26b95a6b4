"""vLLM serves the oracle's artifacts: all drafts accepted, output as without speculation.

An oracle draft is accepted exactly when rows, map, order and tap layers are right (see oracle.py), so "all accepted"
proves the artifact, and "none accepted" is what an engine shows, without any error, for a wrong one.
"""

from pathlib import Path

import pytest
from engines import oracle
from engines.artifacts import TAPS, OracleFiles, break_map, command, expected_ids, target_ids
from engines.protocol import Json, ask
from support.sweeps import sweep

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
    "a map in the order of frequency, int32, no t2d, layers.0., to 320": ("mapped", 320),
    "rows from the target, to 640": ("target_rows", 640),
}
MORE_CASES = {
    "full head to 100, not a multiple of 64": ("full", 100),
    "tap layers 1, 3, 6, to 640": ("other_taps", 640, "--tap-layers", ",".join(map(str, TAPS))),
    "biases of attention and MLP, to 640": ("biased", 640),
    "an embedding that was trained, to 640": ("trained_embedding", 640),
    "norms of q and k, map, to 320": ("head_norms", 320),
    "a norm before fc for each tap, to 640": ("tap_norms", 640),
    "a norm before fc, the last layer's output, to 640": ("norm", 640, "--tap-layers", f"1,3,{oracle.LAYERS}"),
    "EAGLE-1, unchanged head": ("eagle1", 320),
    "EAGLE-1 with biases of attention and MLP": ("eagle1_biased", 320),
    "DFlash in z-lab's form": ("dflash", 320),
    "DFlash in speculators' form with a map, cut again": ("dflash_mapped", 112),
}


def job(files: OracleFiles, head: Path | None, **more: object) -> Json:
    models = {"target": str(files.target), "head": None if head is None else str(head)}
    return models | {"prompts": PROMPTS, "k": K, "max_tokens": MAX_TOKENS, "max_model_len": 128, **more}


def case(files: OracleFiles, head: str, draft_vocab: int | str, *options: str) -> Json:
    artifact = files.artifact(head, draft_vocab, *options)
    if head.startswith("dflash"):
        # Of its drafted tokens the first is right.
        return job(files, artifact, method="dflash", k=1, dtype="float32")
    return job(files, artifact, method="eagle" if head.startswith("eagle1") else "eagle3")


def broken(files: OracleFiles, how: str) -> Json:
    return job(files, break_map(files.artifact("full", 640), files.folder / "broken" / how, how))


@pytest.fixture(scope="module")
def served(oracle_files: OracleFiles) -> dict[str, Json]:
    slim = oracle_files.artifact("full", 640)
    jobs = {"plain": job(oracle_files, None, prompts=[*PROMPTS, RARE_PROMPT])}
    jobs |= {name: case(oracle_files, *what) for name, what in CASES.items()}
    jobs["rare"] = job(oracle_files, slim, prompts=[RARE_PROMPT])
    jobs["order"] = broken(oracle_files, "order")
    return dict(zip(jobs, ask("vllm_worker.py", list(jobs.values())), strict=True))


@pytest.fixture(scope="module")
def more_served(oracle_files: OracleFiles) -> dict[str, Json]:
    jobs = {name: case(oracle_files, *what) for name, what in MORE_CASES.items()}
    jobs |= {how: broken(oracle_files, how) for how in ("missing", "absolute")}
    unmapped = break_map(oracle_files.artifact("dflash", 320), oracle_files.folder / "broken" / "dflash", "missing")
    jobs["DFlash without its map"] = job(oracle_files, unmapped, method="dflash", k=1, dtype="float32")
    return dict(zip(jobs, ask("vllm_worker.py", list(jobs.values())), strict=True))


def all_are_accepted(result: Json, k: int = K) -> None:
    assert "error" not in result, result
    assert result["tokens"] == [oracle.continuation(prompt, MAX_TOKENS) for prompt in PROMPTS]
    # One token comes from the prompt; each step then yields k drafted tokens and one of the target's own.
    steps = len(PROMPTS) * -(-(MAX_TOKENS - 1) // (k + 1))
    assert result["drafts"] == steps
    assert result["per_position"] == [steps] * k
    assert result["accepted"] == result["drafted"] == k * steps


def test_the_oracle_target_says_what_it_should(served: dict[str, Json]) -> None:
    assert served["plain"]["tokens"] == [oracle.continuation(prompt, MAX_TOKENS) for prompt in [*PROMPTS, RARE_PROMPT]]


@pytest.mark.parametrize("name", CASES)
def test_all_drafts_are_accepted_and_the_output_is_unchanged(served: dict[str, Json], name: str) -> None:
    all_are_accepted(served[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_all_drafts_are_accepted_of_other_heads(more_served: dict[str, Json], name: str) -> None:
    all_are_accepted(more_served[name], 1 if name.startswith("DFlash") else K)


@pytest.mark.slow
def test_without_its_map_no_draft_of_dflash_is_accepted(more_served: dict[str, Json]) -> None:
    assert more_served["DFlash without its map"]["accepted"] == 0


def test_tokens_outside_the_draft_vocabulary_are_generated_but_never_drafted(served, oracle_files):
    found = target_ids(oracle_files.artifact("full", 640))
    assert found == expected_ids(640)
    assert not set(oracle.prompt(100, length=oracle.CYCLE)) & set(found)
    assert served["rare"]["tokens"] == served["plain"]["tokens"][len(PROMPTS) :]
    assert served["rare"]["accepted"] == 0


@pytest.mark.parametrize("how", sweep(("order", "missing", "absolute"), "order"))
def test_a_broken_map_drafts_nothing_right_and_eagle_verify_refuses_it(request, oracle_files, how):
    result = request.getfixturevalue("served" if how == "order" else "more_served")[how]
    if how == "absolute":
        assert "IndexError" in result["error"]
    else:
        assert result["tokens"] == [oracle.continuation(prompt, MAX_TOKENS) for prompt in PROMPTS]
        assert result["drafts"] > 0
        assert result["accepted"] == 0
    refused = command("eagle-verify", str(oracle_files.folder / "broken" / how), expect=1)
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_two_tensor_parallel_ranks(oracle_files: OracleFiles) -> None:
    (result,) = ask("vllm_worker.py", [job(oracle_files, oracle_files.artifact("full", 640))], 2)
    all_are_accepted(result)
