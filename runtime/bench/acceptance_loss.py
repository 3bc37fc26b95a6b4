"""How much shorter accepted lengths get with fewer LM-head rows: published tables, and what SmolLM2 measures here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError


@dataclass(frozen=True)
class AcceptanceLoss:
    """Mean accepted lengths by LM-head rows, ``full`` over the whole vocabulary of ``full_rows``; ``source`` in words.

    Raises `UsageError` without a length.
    """

    source: str
    lengths: Mapping[int, float]
    full_rows: int
    full: float

    def __post_init__(self) -> None:
        if not self.lengths:
            raise UsageError(f"{self.source}: no accepted length of a smaller draft vocabulary.", lengths=0)

    def factor(self, rows: int) -> float:
        """Accepted length over ``rows`` as a share of the full vocabulary's; between two sizes linear in log2(rows).

        From ``full_rows`` on it is 1. Raises `UsageError` below the smallest size.
        """
        points = sorted({**self.lengths, self.full_rows: self.full}.items())
        if rows < points[0][0]:
            raise UsageError(
                f"{self.source}: the smallest size is {points[0][0]} rows, not {rows}.",
                option="sizes", found=rows, expected=points[0][0],
            )  # fmt: skip
        if rows >= self.full_rows:
            return 1.0
        place = next(place for place, (size, _) in enumerate(points) if size > rows)
        (low, below), (high, above) = points[place - 1 : place + 1]
        share = math.log2(rows / low) / math.log2(high / low)
        return (below + share * (above - below)) / self.full


_SIZES = (8192, 16384, 32768, 65536)


def _published(model: str, lengths: Iterable[float], full_rows: int, full: float) -> AcceptanceLoss:
    source = f"FR-Spec (arXiv:2502.14856): {model}, EAGLE-2, rows ranked on SlimPajama"
    return AcceptanceLoss(source, dict(zip(_SIZES, lengths, strict=True)), full_rows, full)


FR_SPEC = {
    "llama-3.1-8b": _published("Llama-3-8B", (3.13, 3.40, 3.63, 3.80), 128256, 3.89),
    "llama-3.2-1b": _published("Llama-3.2-1B, depth 3, 30 nodes", (2.486, 2.601, 2.690, 2.773), 128256, 2.809),
    "qwen3-8b": _published("Qwen2-7B", (3.10, 3.35, 3.57, 3.69), 151936, 3.74),
}
"""Mean accepted lengths that FR-Spec publishes, by the model of `problem.MODELS` that is nearest."""


def measured_loss(rows: Iterable[Mapping[str, Any]], run: str = "this run") -> AcceptanceLoss | None:
    """Read the loss off rows of `bench.generate`: those of real answers; ``run`` says in words which run's.

    It is taken by number of rows, whatever the size of the other model's vocabulary. None unless the rows hold the full
    vocabulary and a smaller one.
    """
    real = [row for row in rows if row.get("is_verdict_drawn") is False]
    full = next((row for row in real if row["is_full"]), None)
    lengths = {row["draft_vocab"]: row["accepted_length"] for row in real if not row["is_full"]}
    if full is None or not lengths:
        return None
    source = f"SmolLM2-135M-Instruct, head of {full['draft_vocab']:,} rows, by number of rows, measured in {run}"
    return AcceptanceLoss(source, lengths, full["draft_vocab"], full["accepted_length"])
