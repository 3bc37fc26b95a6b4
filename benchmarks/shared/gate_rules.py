"""When a gate is green: thresholds from one file, and verdicts over measured numbers. Nothing here measures.

**Micro gates.** An operation's *ratio* is its time over that of a device copy of the bytes that it must move, both of
the same run. It is green while the ratio does not exceed the one committed for this device by more than its tolerance;
one that falls below by more is green and named, so that the reference can be recorded anew. All must be green several
times in a row.

**Full gates** run only then. Each is drafting over plain decoding in tokens/s, of the same run, with a stated accepted
length; it is green from its threshold on, and only if that length was really accepted. ``wanted`` decides nothing.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_slim.runtime.errors import UsageError

THRESHOLDS = Path(__file__).parents[1] / "gates.json"


@dataclass(frozen=True)
class MicroGates:
    """What the micro gates measure, how much worse than its reference each may be, and the references by device.

    ``model`` is the full gates', too. ``tolerances``: gate to a share of its reference; a gate is a phase of a step, or
    "attention at" a number of tokens. ``references``: device name to {"ratios": {gate: ratio}, and what was measured
    with}.
    """

    model: str
    draft_vocab: int
    depth: int
    nodes: int
    prefix: int
    accepted_length: int
    tolerances: dict[str, float]
    references: dict[str, dict[str, Any]]

    @property
    def prefixes(self) -> list[int]:
        """Tokens before the attention that is measured alone."""
        return [int(name.split()[-1]) for name in self.tolerances if name.startswith("attention at ")]


@dataclass(frozen=True)
class FullGate:
    """One end-to-end gate."""

    name: str
    draft_vocab: int
    depth: int
    nodes: int
    sequences: int
    prefix: int
    accepted_length: float
    threshold: float
    wanted: float


@dataclass(frozen=True)
class FullRecord:
    """What a full gate measured: tokens/s of both, and whether the accepted length was the stated one."""

    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    accepted_length: float
    is_length_met: bool

    @property
    def ratio(self) -> float:
        """Drafting over plain decoding."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True)
class Gates:
    """The thresholds file."""

    green_rounds: int
    most_rounds: int
    micro: MicroGates
    full: tuple[FullGate, ...]

    @classmethod
    def load(cls, path: Path) -> Gates:
        """Read a thresholds file."""
        values = json.loads(path.read_text())
        micro, full = MicroGates(**values.pop("micro")), tuple(FullGate(**gate) for gate in values.pop("full"))
        return cls(micro=micro, full=full, **values)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(temporary, path)

    def reference(self, device: str) -> dict[str, float]:
        """The committed ratios of a device. Raises `UsageError` where some or all are missing."""
        ratios: dict[str, float] = self.micro.references.get(device, {}).get("ratios", {})
        missing = sorted(set(self.micro.tolerances) - set(ratios))
        if missing:
            message = f"No reference of {', '.join(missing)} for {device}: measure it with --record on a good commit."
            raise UsageError(message, device=device, missing=missing)
        return ratios


def micro_verdicts(
    ratios: Mapping[str, float], reference: Mapping[str, float], tolerances: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Judge one round; a gate that was not measured, or is no number, is red."""
    found = {}
    for name, tolerance in tolerances.items():
        ratio, committed = ratios.get(name), reference[name]
        is_green = ratio is not None and ratio <= committed * (1 + tolerance)
        found[name] = {
            "ratio": ratio, "reference": committed, "limit": committed * (1 + tolerance), "is_green": is_green,
            "is_better": is_green and ratio is not None and ratio < committed * (1 - tolerance),
        }  # fmt: skip
    return found


def full_verdict(gate: FullGate, record: FullRecord) -> dict[str, Any]:
    """Judge one full gate."""
    return {
        **asdict(gate), **asdict(record), "ratio": record.ratio,
        "is_green": record.is_length_met and record.ratio >= gate.threshold,
        "is_wanted_met": record.is_length_met and record.ratio >= gate.wanted,
    }  # fmt: skip


def judge(
    gates: Gates, device: str, measure_micro: Callable[[], Mapping[str, float]],
    measure_full: Callable[[FullGate], FullRecord], say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Run micro rounds until enough in a row are green, then the full gates; ``is_green`` says whether all is well.

    ``measure_micro``: one round's ratios. The full gates do not run when ``most_rounds`` have passed before.
    """
    reference = gates.reference(device)
    rounds: list[dict[str, dict[str, Any]]] = []
    in_a_row = 0
    while in_a_row < gates.green_rounds and len(rounds) < gates.most_rounds:
        verdicts = micro_verdicts(measure_micro(), reference, gates.micro.tolerances)
        rounds.append(verdicts)
        red = [name for name, verdict in verdicts.items() if not verdict["is_green"]]
        in_a_row = 0 if red else in_a_row + 1
        for name, verdict in verdicts.items():
            say(_micro_line(name, verdict))
        say(f"round {len(rounds)}: {'red, ' + ', '.join(red) if red else f'green, {in_a_row} in a row'}")
    report: dict[str, Any] = {"micro_rounds": rounds, "is_micro_green": in_a_row >= gates.green_rounds, "full": []}
    if not report["is_micro_green"]:
        say(f"The micro gates were not green {gates.green_rounds} times in a row: the full ones do not run.")
        return report | {"is_green": False}
    for gate in gates.full:
        report["full"].append(full_verdict(gate, measure_full(gate)))
        say(_full_line(report["full"][-1]))
    return report | {"is_green": all(verdict["is_green"] for verdict in report["full"])}


def median_ratios(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """References from several rounds: the median of each ratio."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _micro_line(name: str, verdict: Mapping[str, Any]) -> str:
    ratio = "not measured" if verdict["ratio"] is None else f"{verdict['ratio']:.3f}"
    word = ("green, better than its reference" if verdict["is_better"] else "green") if verdict["is_green"] else "RED"
    limits = f"reference {verdict['reference']:.3f}, limit {verdict['limit']:.3f}"
    return f"  {name:20s} {ratio:>8s} x a copy of its bytes, {limits}: {word}"


def _full_line(verdict: Mapping[str, Any]) -> str:
    word = "green" if verdict["is_green"] else "RED"
    wanted = "met" if verdict["is_wanted_met"] else "not met"
    length = "" if verdict["is_length_met"] else f", but {verdict['accepted_length']:.3f} tokens a pass were accepted"
    return (
        f"{verdict['name']}: {verdict['ratio']:.2f} x plain decoding (threshold {verdict['threshold']}, wanted "
        f"{verdict['wanted']}: {wanted}), accepted length {verdict['accepted_length']:.2f}, depth {verdict['depth']}, "
        f"{verdict['nodes']} nodes{length}: {word}"
    )
