"""How much shorter accepted lengths get with fewer LM-head rows: published tables, and what SmolLM2 measures here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from eagle_slim.runtime.errors import UsageError


class AcceptanceLoss(NamedTuple):
    """Mean accepted lengths by LM-head rows, the most of which are the whole vocabulary; ``source`` in words."""

    source: str
    lengths: Mapping[int, float]

    def factor(self, rows: int) -> float:
        """Accepted length over ``rows`` as a share of the full vocabulary's; between two sizes linear in log2(rows).

        From the most rows on it is 1. Raises `UsageError` below the smallest size.
        """
        points = sorted(self.lengths.items())
        full_rows, full = points[-1]
        if rows >= full_rows:
            return 1.0
        if rows < points[0][0]:
            message = f"{self.source}: the smallest size is {points[0][0]} rows, not {rows}."
            raise UsageError(message, option="sizes", found=rows, expected=points[0][0])
        place = next(place for place, (size, _) in enumerate(points) if size > rows)
        (low, below), (high, above) = points[place - 1 : place + 1]
        share = math.log2(rows / low) / math.log2(high / low)
        return (below + share * (above - below)) / full


_NAME = "FR-Spec (arXiv:2502.14856): {}, EAGLE-2, rows ranked on SlimPajama".format
FR_SPEC = {
    "llama-3.1-8b": AcceptanceLoss(
        _NAME("Llama-3-8B"), {8192: 3.13, 16384: 3.40, 32768: 3.63, 65536: 3.80, 128256: 3.89}
    ),
    "llama-3.2-1b": AcceptanceLoss(
        _NAME("Llama-3.2-1B, depth 3, 30 nodes"),
        {8192: 2.486, 16384: 2.601, 32768: 2.690, 65536: 2.773, 128256: 2.809},
    ),
    "qwen3-8b": AcceptanceLoss(
        _NAME("Qwen2-7B"), {8192: 3.10, 16384: 3.35, 32768: 3.57, 65536: 3.69, 151936: 3.74}
    ),
}  # fmt: skip
"""Mean accepted lengths that FR-Spec publishes, by the model of `problem.MODELS` that is nearest."""


def measured_loss(rows: Iterable[Mapping[str, Any]], run: str) -> AcceptanceLoss:
    """Read the loss off greedy answers of SmolLM2 (`benchmarks.answers`); ``run`` names their file.

    It is taken by number of rows, whatever the size of the other model's vocabulary. Raises `UsageError` unless the
    rows hold two sizes.
    """
    lengths = {
        row["draft_vocab"]: row["accepted_length"]
        for row in rows
        if isinstance(row["draft_vocab"], int) and "drawn_length" not in row and not row.get("sampled")
    }
    if len(lengths) < 2:
        raise UsageError(f"{run} holds no answers over two sizes of SmolLM2's vocabulary.", lengths=len(lengths))
    return AcceptanceLoss(f"SmolLM2-135M-Instruct, by number of rows, measured in {run}", lengths)
