"""The gates: their logic on made-up records, the file of thresholds, and a whole run with toy dimensions on a CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime.drafter.tuning import problem
from eagle_slim.runtime.errors import UsageError
from support.raising import raises

from benchmarks import gates as command
from benchmarks.shared import decoding, partial
from benchmarks.shared.gate_rules import THRESHOLDS, FullGate, Gates, MicroGates, full_verdict, judge

FULL = FullGate("toy", 60, 2, 4, 16, 2, 40, 2.0, threshold=1.2)
REFERENCE = {"draft": 2.0, "verify": 1.5}
MICRO = MicroGates("tiny", 60, 2, 16, 20, 2, {"draft": 0.1, "verify": 0.1}, {"toy GPU": {"ratios": REFERENCE}})
GATES = Gates(green_rounds=3, most_rounds=6, micro=MICRO, full=(FULL, replace(FULL, name="second")))
Summaries = list[dict[str, Any]]
GREEN, RED = {"draft": 2.19, "verify": 1.5}, {"draft": 2.21, "verify": 1.5}


def judged(
    rounds: list[dict[str, float]], full: Callable[[FullGate], Summaries], gates: Gates = GATES
) -> tuple[dict[str, Any], list[str]]:
    left: Iterator[dict[str, float]] = iter(rounds)
    said: list[str] = []
    return judge(gates, "toy GPU", lambda: next(left), full, said.append), said


def never(gate: FullGate) -> Summaries:
    raise AssertionError("a full gate ran")


def summaries(ratio: float, is_length_met: bool = True) -> Summaries:
    drafted = {"tokens_per_s": 100.0 * ratio, "accepted_length": 2.0, "is_length_met": is_length_met}
    return [{"tokens_per_s": 100.0}, drafted]


def test_full_gates_wait_for_three_green_rounds_in_a_row() -> None:
    report, said = judged([GREEN, GREEN, RED, GREEN, GREEN, GREEN], lambda gate: summaries(1.3))
    assert [all(gate["is_green"] for gate in each.values()) for each in report["micro_rounds"]] == [
        True, True, False, True, True, True
    ]  # fmt: skip
    assert report["is_micro_green"]
    assert report["is_green"]
    assert [gate["name"] for gate in report["full"]] == ["toy", "second"]
    assert "round 3: red, draft" in said
    assert said[-3] == "round 6: green, 3 in a row"
    json.dumps(report)


def test_full_gates_do_not_run_otherwise() -> None:
    report, said = judged([GREEN, GREEN, RED] * 2, never)
    assert len(report["micro_rounds"]) == 6
    assert (report["is_micro_green"], report["is_green"], report["full"]) == (False, False, [])
    assert "do not run" in said[-1]


@pytest.mark.parametrize(
    ("ratio", "is_met", "green"),
    [
        (1.2, True, True),
        (1.1999, True, False),
        (9.0, False, False),  # the stated length was not accepted
        (float("nan"), True, False),
    ],
)
def test_full_verdicts(ratio: float, is_met: bool, green: bool) -> None:
    verdict = full_verdict(FULL, *summaries(ratio, is_met))
    assert verdict["is_green"] == green
    assert (verdict["depth"], verdict["nodes"], verdict["threshold"]) == (2, 16, 1.2)


def test_references_are_by_device() -> None:
    with raises(UsageError, option="draft, verify for other GPU"):
        judge(GATES, "other GPU", dict, never)
    partly = replace(MICRO, references={"toy GPU": {"ratios": {"draft": 2.0}}})
    with raises(UsageError, option="No reference of verify for"):
        replace(GATES, micro=partly).reference("toy GPU")


def test_the_file_of_thresholds(tmp_path: Path) -> None:
    shipped = Gates.load(THRESHOLDS)
    assert shipped.green_rounds == 3
    assert [(gate.prefix, gate.sequences, gate.nodes, gate.partial_blocks) for gate in shipped.full] == [
        (32768, 1, 16, 0), (16384, 4, 16, 0), (16384, 4, 4, 0), (128000, 1, 60, 64),
    ]  # fmt: skip
    assert [(gate.threshold, gate.accepted_length) for gate in shipped.full] == [
        (2.0, 3), (1.5, 3), (1.0, 2.2), (1.5, 3)
    ]  # fmt: skip
    assert set(shipped.reference("NVIDIA H200")) == set(shipped.micro.tolerances)
    assert 1 <= shipped.green_rounds <= shipped.most_rounds
    assert shipped.micro.model in decoding.LAYERS
    measured = re.compile(r"draft|verify|accept|commit|attention at [1-9]\d*")
    assert all(measured.fullmatch(name) and 0 < share < 1 for name, share in shipped.micro.tolerances.items())
    GATES.save(tmp_path / "gates.json")
    assert Gates.load(tmp_path / "gates.json") == GATES


def test_a_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """References are recorded, then met; with references of nothing every round is red."""
    monkeypatch.setitem(problem.MODELS, "tiny", problem.Dims(32, 48, 4, 2, 8, 90))
    monkeypatch.setitem(decoding.LAYERS, "tiny", 4)
    monkeypatch.setattr(command, "TOP_K", 4)
    monkeypatch.setattr(command, "_TIMES", dict.fromkeys(command._TIMES, 1))
    lengths: list[float] = []
    monkeypatch.setattr(command, "measure_full", _few_steps(lengths))
    tolerances = dict.fromkeys(("draft", "verify", "accept", "commit", "attention at 512", "attention at 40"), 1e9)
    micro = MicroGates("tiny", 60, 2, 16, 20, 2, tolerances, {})
    path = tmp_path / "gates.json"
    model = decoding.RandomModel("tiny", torch.device("cpu"), torch.float32)
    gates = (replace(FULL, threshold=1.0), replace(FULL, threshold=0.0, prefix=400, partial_blocks=2, survival=0.5))
    report = command.run(Gates(1, 1, micro, gates), path, model, True, samples=1)
    recorded = Gates.load(path)
    (reference,) = recorded.micro.references.values()
    assert set(reference["ratios"]) == set(tolerances)
    assert all(ratio > 0 for ratio in reference["ratios"].values())
    assert reference["torch"] == torch.__version__
    assert report["is_micro_green"]
    assert lengths[0] == report["full"][1]["plain"]["accepted_length"] == 2.0
    assert report["full"][1]["is_green"]
    assert report["is_green"] == (report["full"][0]["ratio"] >= 1.0)
    reference["ratios"] |= {"accept": 0.0}
    recorded.save(path)
    again = command.run(Gates.load(path), path, model, samples=1)
    assert not again["is_green"]
    assert "RED" in capsys.readouterr().out


def _few_steps(lengths: list[float]) -> Callable[..., Summaries]:
    measure = command.measure_full

    def measured(model: decoding.RandomModel, gate: FullGate) -> Summaries:
        # Two tokens a pass, however few the passes.
        with pytest.MonkeyPatch.context() as patch:
            for module in (command, partial):
                patch.setattr(module, "draw_lengths", lambda mean, longest: [2] * 240)
            found = measure(model, gate, steps=2, turns=1)
        lengths.append(found[1]["accepted_length"])
        return found

    return measured
