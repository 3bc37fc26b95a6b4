"""How many nodes a tree has by default: chosen from measured steps, by active slots and context.

    tokens a second = slots * accepted length(nodes) / step(slots, context, nodes)
    step            = measured step + measured draft * (bytes that a draft reads / those of the head measured - 1)

`tree_sizes.json`, which ``benchmarks.tree_sizes`` makes, holds both: the accepted length by nodes of one real head, and
milliseconds of steps on named devices. The size with the most tokens a second is taken; a tree of one node is plain
decoding. What is not in the tables uses the nearest entry: tables of the same device, else of another of its kind
(GPU or CPU); of those the target nearest in bytes of weights; then the next larger number of slots, and the nearest
context, by ratio. Only the draft is scaled, as heads differ in their vocabulary; for the rest only ratios decide. That
drafting does not pay at all applies to the GPU that was measured alone; on other GPUs, and on CPUs, there is always a
tree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TABLES = Path(__file__).with_name("tree_sizes.json")


@dataclass(frozen=True)
class TreeSize:
    """A number of nodes, 1 for plain decoding, and where it comes from."""

    num_nodes: int
    reason: str


class Step(NamedTuple):
    """A measured step of ``slots`` sequences of ``context`` tokens; ``nodes`` 1 is a plain step, without a draft.

    ``draft_ms`` is the part of ``step_ms`` that the draft takes.
    """

    slots: int
    context: int
    nodes: int
    step_ms: float
    draft_ms: float = 0.0


@dataclass(frozen=True)
class StepTable:
    """Steps of one target on one device."""

    device: str
    kind: str
    """"cuda" or "cpu"."""
    model: str
    weight_bytes: int
    """Bytes of the weights that a step of the target reads."""
    draft_bytes: int
    """Bytes of the weights that drafting a tree reads, all levels together."""
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class TreeSizes:
    """Measured steps, and the accepted length by nodes."""

    accepted_lengths: Mapping[int, float]
    tables: tuple[StepTable, ...]

    @classmethod
    def load(cls, path: Path = TABLES) -> TreeSizes:
        """Read `tree_sizes.json`."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            {int(nodes): length for nodes, length in found["accepted_lengths"]["by_nodes"].items()},
            tuple(
                StepTable(
                    table["device"], table["kind"], table["model"], table["weight_bytes"], table["draft_bytes"],
                    tuple(Step(*row) for row in table["steps"]),
                )
                for table in found["tables"]
            ),
        )  # fmt: skip

    def choose(
        self,
        device: str,
        kind: str,
        weight_bytes: int,
        draft_bytes: int,
        slots: int,
        context: int,
        most_nodes: int,
    ) -> TreeSize:
        """Choose a number of nodes, at most ``most_nodes``.

        ``device``: its name; ``kind``: "cuda" or "cpu"; ``weight_bytes``, ``draft_bytes``: as in `StepTable`;
        ``slots``: sequences side by side; ``context``: tokens of the longest.
        """
        table = self._table(device, kind, weight_bytes)
        if table is None:
            return TreeSize(most_nodes, f"no steps were measured on any {kind}")
        steps = _nearest_steps(table.steps, slots, max(1, context))
        more = draft_bytes / table.draft_bytes - 1
        least = 1 if table.device == device and kind == "cuda" else 2
        rates = {
            step.nodes: self.accepted_lengths[step.nodes] / (step.step_ms + step.draft_ms * more)
            for step in steps
            if step.nodes in self.accepted_lengths and step.nodes >= least
        }
        best = max(rates, key=lambda nodes: (rates[nodes], -nodes))
        where = f"{table.device}, {table.model}, {steps[0].slots} x {steps[0].context} tokens"
        if best == 1:
            drafted = max((rate for nodes, rate in rates.items() if nodes > 1), default=0.0)
            here, plain = (1e3 * steps[0].slots * rate for rate in (drafted, rates[1]))
            return TreeSize(1, f"drafting does not pay there, {here:.0f} tokens/s beside {plain:.0f}: {where}")
        fastest = "fastest" if least == 1 else "of trees the fastest"
        return TreeSize(min(best, most_nodes), f"{fastest} where it was measured: {where}")

    def _table(self, device: str, kind: str, weight_bytes: int) -> StepTable | None:
        tables = [table for table in self.tables if table.kind == kind]
        named = [table for table in tables if table.device == device] or tables
        return min(named, key=lambda table: _distance(table.weight_bytes, weight_bytes), default=None)


@cache
def measured_sizes() -> TreeSizes:
    """The tables that ship with the package."""
    return TreeSizes.load()


def device_name(device: torch.device) -> str:
    """Name of a device as the tables have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _nearest_steps(steps: Iterable[Step], slots: int, context: int) -> list[Step]:
    steps = list(steps)
    counts = sorted({step.slots for step in steps})
    count = next((count for count in counts if count >= slots), counts[-1])
    contexts = {step.context for step in steps if step.slots == count}
    nearest = min(contexts, key=lambda found: (_distance(found, context), found))
    return [step for step in steps if (step.slots, step.context) == (count, nearest)]


def _distance(one: float, other: float) -> float:
    return abs(math.log(one / other))
