"""The gates: their logic on made-up records, the file of thresholds, and a whole run with toy dimensions on a CPU."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import PartialVerification
from support.programs import unknown_commits
from support.raising import raises

from benchmarks import gates as command
from benchmarks.gates import THRESHOLDS, judge, reference_of
from benchmarks.shared import decoding

Values = dict[str, Any]
SHAPE = {"draft_vocab": 60, "depth": 2, "nodes": 16}
FULL: Values = {"name": "toy", **SHAPE, "top_k": 4, "sequences": 2, "prefix": 40, "threshold": 1.2}
FULL |= {"accepted_length": 2.0, "partial_blocks": 0, "survival": 1.0}
MICRO: Values = {"model": "tiny", **SHAPE, "prefix": 20, "accepted_length": 2}
MICRO |= {"tolerances": {"draft": 0.1, "verify": 0.1}}
MICRO |= {"references": {"toy GPU": {"ratios": {"draft": 2.0, "verify": 1.5}}}}
GATES: Values = {"green_rounds": 3, "most_rounds": 6, "micro": MICRO, "full": [FULL, FULL | {"name": "second"}]}
GREEN, RED = {"draft": 2.19, "verify": 1.5}, {"draft": 2.21, "verify": 1.5}


def summaries(*ratios: float, is_met: bool = True) -> list[list[Values]]:
    drafted = {"accepted_length": 2.0, "is_length_met": is_met}
    return [[{"tokens_per_s": 100.0}, {"tokens_per_s": 100.0 * ratio, **drafted}] for ratio in ratios]


def test_full_gates_wait_for_three_green_rounds_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = iter([GREEN, GREEN, RED, GREEN, GREEN, GREEN])
    report = judge(GATES, "toy GPU", rounds, lambda gate, times: summaries(*[1.3] * times))
    is_green = [all(gate["is_green"] for gate in each.values()) for each in report["micro_rounds"]]
    assert is_green == [True, True, False, True, True, True]
    assert report["is_micro_green"] is report["is_green"] is True
    assert [gate["name"] for gate in report["full"]] == [*["toy"] * 3, *["second"] * 3]
    assert capsys.readouterr().out.count("RED") == 1
    json.dumps(report)
    # Otherwise they do not run.
    report = judge(GATES, "toy GPU", iter([GREEN, GREEN, RED] * 2), lambda *_: pytest.fail("a full gate ran"))
    assert len(report["micro_rounds"]) == 6
    assert (report["is_micro_green"], report["is_green"], report["full"]) == (False, False, [])


def test_full_verdicts():
    for ratio, is_met, green in (
        (1.2, True, True),
        (1.1999, True, False),
        (9.0, False, False),  # the stated length was not accepted
        (float("nan"), True, False),
    ):
        measured = summaries(1.3, ratio, 1.3, is_met=is_met)
        report = judge(GATES, "toy GPU", iter([GREEN] * 3), lambda *_, found=measured: found)
        assert report["is_green"] == report["full"][1]["is_green"] == green


def test_references_are_by_device() -> None:
    with raises(UsageError, option="draft, verify for other GPU"):
        reference_of(GATES, "other GPU")
    partly = MICRO | {"references": {"toy GPU": {"ratios": {"draft": 2.0}}}}
    with raises(UsageError, option="No reference of verify for"):
        reference_of(GATES | {"micro": partly}, "toy GPU")


def test_the_file_of_thresholds() -> None:
    shipped = json.loads(THRESHOLDS.read_text())
    names = ("prefix", "sequences", "nodes", "partial_blocks", "threshold", "accepted_length")
    assert [tuple(gate[name] for name in names) for gate in shipped["full"]] == [
        (32768, 1, 16, 0, 2.0, 3),
        (32768, 1, 4, 0, 1.5, 2.2),
        (32768, 1, 4, 0, 2.0, 3),
        (16384, 4, 16, 0, 1.5, 3),
        (16384, 4, 4, 0, 1.0, 2.2),
        (128000, 1, 60, 64, 1.5, 3),
    ]
    # Gates of partial verification run the number of blocks that calls take.
    assert {gate["partial_blocks"] for gate in shipped["full"]} == {0, PartialVerification().num_blocks}
    micro = shipped["micro"]
    for device, reference in micro["references"].items():
        assert set(reference_of(shipped, device)) == set(micro["tolerances"])
        assert unknown_commits([reference["commit"]]) == []
    assert shipped["green_rounds"] == 3 <= shipped["most_rounds"]
    assert micro["model"] in decoding.LAYERS


@pytest.mark.parametrize("place", [0, 1], ids=["H200", "H100"])
def test_what_was_measured_agrees_with_the_file_of_thresholds(place):
    not_run = ["one sequence after 32,768 tokens, a chain of three, three tokens a pass"][:place]
    (path,) = (THRESHOLDS.parent / "results").glob("*-gates.json")
    shipped, found = json.loads(THRESHOLDS.read_text()), json.loads(path.read_text())["runs"][place]
    assert found["is_green"]
    assert (found["is_strict"], found["tuned_misses"]) == (True, 0)
    run = [gate for gate in shipped["full"] if gate["name"] not in not_run]
    assert len(run) == len(shipped["full"]) - len(not_run)
    for name in ("name", "threshold"):
        assert [gate[name] for gate in found["full"]] == [gate[name] for gate in run for _ in range(3)]
    ratios = reference_of(shipped, found["machine"]["device"])
    assert all(each[name]["reference"] == ratios[name] for each in found["micro_rounds"] for name in ratios)


def test_a_run_end_to_end(random_model, tmp_path, monkeypatch, capsys):
    """References are recorded, then met; with references of nothing every round is red."""
    monkeypatch.setattr(command, "TOP_K", 4)
    monkeypatch.setattr(command, "_TIMES", dict.fromkeys(command._TIMES, 1))
    # Two tokens a pass, however few the passes.
    for module in (command, decoding):
        monkeypatch.setattr(module, "draw_lengths", lambda mean, longest: [2] * 240)
    measure = command.measure_full
    monkeypatch.setattr(command, "measure_full", partial(measure, steps=2, turns=1))
    monkeypatch.setenv("EAGLE_SLIM_STRICT", "1")
    tolerances = dict.fromkeys(("draft", "verify", "accept", "commit", "attention at 512", "attention at 40"), 1e9)
    path = tmp_path / "gates.json"
    full = [FULL | {"threshold": 1.0}, FULL | {"threshold": 0.0, "prefix": 400, "partial_blocks": 2, "survival": 0.5}]
    micro = MICRO | {"tolerances": tolerances, "references": {}}
    gates = {"green_rounds": 1, "most_rounds": 1, "micro": micro, "full": full}
    report = command.run(gates, path, random_model, True, samples=1)
    recorded = json.loads(path.read_text())
    (reference,) = recorded["micro"]["references"].values()
    assert set(reference["ratios"]) == set(tolerances)
    assert all(ratio > 0 for ratio in reference["ratios"].values())
    assert reference["torch"] == torch.__version__
    assert report["is_micro_green"]
    assert report["full"][0]["drafted"]["accepted_length"] == report["full"][1]["plain"]["accepted_length"] == 2.0
    assert report["full"][1]["is_green"]
    assert report["is_green"] == (report["full"][0]["ratio"] >= 1.0)
    # No kernel drafts on a CPU.
    assert (report["is_strict"], report["tuned_hits"], report["tuned_misses"]) == (True, 0, 0)
    reference["ratios"] |= {"accept": 0.0}
    again = command.run(recorded, path, random_model, samples=1)
    assert not again["is_green"]
    assert "RED" in capsys.readouterr().out
