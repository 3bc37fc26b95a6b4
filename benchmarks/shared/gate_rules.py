"""When a gate is green: thresholds from one file, and verdicts over measured numbers. Nothing here measures.

**Micro gates.** An operation's *ratio* is its time over that of a device copy of the bytes that it must move, both of
the same run. It is green while the ratio does not exceed the one committed for this device by more than its tolerance.
All must be green several times in a row.

**Full gates** run only then. Each is drafting over plain decoding in tokens/s, of the same run, with a stated accepted
length, or drafting with partial verification over drafting without it. It is green from its threshold on, and only if
that length was really accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig

THRESHOLDS = Path(__file__).parents[1] / "gates.json"


@dataclass(frozen=True)
class MicroGates:
    """Shape that the micro gates measure, their tolerances, and the references by device.

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
    """One end-to-end gate.

    ``partial_blocks``: blocks of partial verification, 0 for none; then ``survival`` is the chance that a full pass
    confirms a token once it has confirmed those before it.
    """

    name: str
    draft_vocab: int
    depth: int
    top_k: int
    nodes: int
    sequences: int
    prefix: int
    accepted_length: float
    threshold: float
    partial_blocks: int = 0
    survival: float = 1.0

    @property
    def tree(self) -> TreeConfig:
        """Trees that are drafted."""
        return TreeConfig(self.depth, self.top_k, self.nodes)


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
        """Write the file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def reference(self, device: str) -> dict[str, float]:
        """The committed ratios of a device. Raises `UsageError` where some or all are missing."""
        ratios: dict[str, float] = self.micro.references.get(device, {}).get("ratios", {})
        missing = sorted(set(self.micro.tolerances) - set(ratios))
        if missing:
            raise UsageError(
                f"No reference of {', '.join(missing)} for {device}: measure it with --record on a good commit."
            )
        return ratios


def micro_verdicts(
    ratios: Mapping[str, float], reference: Mapping[str, float], tolerances: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Judge one round; a ratio that is no number is red."""
    found = {}
    for name, tolerance in tolerances.items():
        ratio, limit = ratios[name], reference[name] * (1 + tolerance)
        found[name] = {"ratio": ratio, "reference": reference[name], "limit": limit, "is_green": ratio <= limit}
    return found


def full_verdict(gate: FullGate, plain: Mapping[str, Any], drafted: Mapping[str, Any]) -> dict[str, Any]:
    """Judge one full gate by what its baseline and drafting came to (`decoding.take_turns`)."""
    ratio = drafted["tokens_per_s"] / plain["tokens_per_s"]
    is_green = drafted["is_length_met"] and ratio >= gate.threshold
    return {**asdict(gate), "plain": plain, "drafted": drafted, "ratio": ratio, "is_green": is_green}


def judge(
    gates: Gates, device: str, measure_micro: Callable[[], Mapping[str, float]],
    measure_full: Callable[[FullGate], Sequence[Mapping[str, Any]]], say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Run micro rounds until enough in a row are green, then the full gates; ``is_green`` says whether all is well.

    ``measure_micro``: one round's ratios. The full gates do not run when ``most_rounds`` have passed before.
    """
    reference = gates.reference(device)
    rounds: list[dict[str, dict[str, Any]]] = []
    in_a_row = 0
    while in_a_row < gates.green_rounds and len(rounds) < gates.most_rounds:
        rounds.append(micro_verdicts(measure_micro(), reference, gates.micro.tolerances))
        for name, verdict in rounds[-1].items():
            limits = f"reference {verdict['reference']:.3f}, limit {verdict['limit']:.3f}"
            say(f"  {name:20s} {verdict['ratio']:8.3f} x a copy of its bytes, {limits}: {_colour(verdict)}")
        red = [name for name, verdict in rounds[-1].items() if not verdict["is_green"]]
        in_a_row = 0 if red else in_a_row + 1
        say(f"round {len(rounds)}: {'red, ' + ', '.join(red) if red else f'green, {in_a_row} in a row'}")
    report: dict[str, Any] = {"micro_rounds": rounds, "is_micro_green": in_a_row >= gates.green_rounds, "full": []}
    if not report["is_micro_green"]:
        say(f"The micro gates were not green {gates.green_rounds} times in a row: the full ones do not run.")
        return report | {"is_green": False}
    for gate in gates.full:
        verdict = full_verdict(gate, *measure_full(gate))
        report["full"].append(verdict)
        drawn = verdict["plain" if gate.partial_blocks else "drafted"]
        baseline = "full passes alone" if gate.partial_blocks else "plain decoding"
        say(
            f"{gate.name}: {verdict['ratio']:.2f} x {baseline} (threshold {gate.threshold}), accepted length "
            f"{drawn['accepted_length']:.3f} of {gate.accepted_length}: {_colour(verdict)}"
        )
    return report | {"is_green": all(verdict["is_green"] for verdict in report["full"])}


def _colour(verdict: Mapping[str, Any]) -> str:
    return "green" if verdict["is_green"] else "RED"
