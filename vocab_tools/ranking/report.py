"""A coverage report: per source and size the share of tokens covered, as numbers, JSON and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shares import Part

CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class SourceCoverage:
    """Coverage of one source, by size.

    Attributes:
        name: of the source; "all sources" is their weighted mean.
        weight: share of the source in the mean, 1 in sum.
        part: "held-out", or "counted" where nothing was held out (optimistic: the same text made the ranking).
        documents: number measured; 0 for counted text, where documents are not known.
        tokens: number measured.
        coverage: share of the tokens covered, float64 [sizes].
        low, high: bounds of the 95% interval, float64 [sizes]; None with fewer than two documents.
        baseline: coverage of the first ids, float64 [sizes].
    """

    name: str
    weight: float
    part: Part
    documents: int
    tokens: int
    coverage: NDArray[np.float64]
    low: NDArray[np.float64] | None
    high: NDArray[np.float64] | None
    baseline: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CoverageReport:
    """Coverage of a draft vocabulary over sizes and sources.

    Attributes:
        draft_vocab: size that is to be used, one of `sizes`.
        target_vocab: size of the target's vocabulary.
        sizes: ascending; every one at least the number of forced ids.
        shown: the sizes that the table shows; the others make the plot smooth.
        sources: one entry per source, then "all sources" when there are several.
        uncounted: number of the first `draft_vocab` ids, forced ids aside, that never occur in the sources' counted
            text.
        bootstrap, seed: number of resamples and their seed.
        warnings: sources on which the ranking loses to the baseline, and sources measured on counted text.
    """

    draft_vocab: int
    target_vocab: int
    sizes: tuple[int, ...]
    shown: tuple[int, ...]
    sources: tuple[SourceCoverage, ...]
    uncounted: int
    bootstrap: int
    seed: int
    warnings: tuple[str, ...]

    def at(self, source: str, size: int | None = None) -> float:
        """Return the coverage of a source at a size, the vocabulary's own by default."""
        position = self.sizes.index(self.draft_vocab if size is None else size)
        return float(next(entry for entry in self.sources if entry.name == source).coverage[position])

    def to_json(self) -> dict[str, Any]:
        """Return the report JSON-ready; shares are rounded to six digits."""
        return {
            "draft_vocab": self.draft_vocab,
            "target_vocab": self.target_vocab,
            "confidence": CONFIDENCE,
            "bootstrap": self.bootstrap,
            "seed": self.seed,
            "uncounted": self.uncounted,
            "sizes": list(self.sizes),
            "sources": [
                {
                    "name": source.name,
                    "weight": round(source.weight, 6),
                    "part": source.part,
                    "documents": source.documents,
                    "tokens": source.tokens,
                    "coverage": _rounded(source.coverage),
                    "low": _rounded(source.low),
                    "high": _rounded(source.high),
                    "baseline_first_ids": _rounded(source.baseline),
                }
                for source in self.sources
            ],
            "warnings": list(self.warnings),
        }

    def table(self) -> str:
        """Return a plain text table: one row per source and size, in percent."""
        header = ("source", "text", "size", "covered", "95% interval", "first ids", "difference")
        rows = [header]
        for source in self.sources:
            for size in self.shown:
                position = self.sizes.index(size)
                covered, first = source.coverage[position], source.baseline[position]
                interval = "-"
                if source.low is not None and source.high is not None:
                    interval = f"{100 * source.low[position]:.2f} – {100 * source.high[position]:.2f}"
                rows.append(
                    (
                        source.name if size == self.shown[0] else "",
                        f"{source.part}, {_thousands(source.tokens)} tokens" if size == self.shown[0] else "",
                        f"{size}",
                        f"{100 * covered:.2f}%",
                        interval,
                        f"{100 * first:.2f}%",
                        f"{100 * (covered - first):+.2f}",
                    )
                )
        return aligned(rows, num_left=2)


def aligned(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Return a plain text table of rows of as many cells: the first ``num_left`` columns on the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.ljust(width) if i < num_left else cell.rjust(width) for i, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _rounded(values: NDArray[np.float64] | None) -> list[float] | None:
    return None if values is None else [round(float(value), 6) for value in values]


def _thousands(value: int) -> str:
    for limit, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return str(value)
