"""What a conversion has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.coverage import CoverageReport

from ..manifest import Manifest


@dataclass(frozen=True)
class Conversion:
    """One artifact that was written.

    Attributes:
        coverage: on held-out text, or None where there was none.
        rows_before: rows of the LM head that the draft model had.
        bytes_before, bytes_after: weights that one draft step reads, LM head included.
    """

    folder: Path
    manifest: Manifest
    coverage: CoverageReport | None
    rows_before: int
    bytes_before: int
    bytes_after: int

    @property
    def draft_vocab(self) -> int:
        """Rows of the LM head now."""
        return self.manifest.draft_vocab

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know."""
        return self.manifest.warnings

    def to_json(self) -> dict[str, Any]:
        """The result as `eagle-convert --json` prints it."""
        return {
            "folder": str(self.folder),
            "kind": self.manifest.kind,
            "draft_vocab": self.draft_vocab,
            "target_vocab": self.manifest.target_vocab,
            "rows": {"before": self.rows_before, "after": self.draft_vocab},
            "bytes_per_draft_step": {"before": self.bytes_before, "after": self.bytes_after},
            "never_counted": self.manifest.num_uncounted,
            "coverage": None if self.manifest.coverage is None else coverage_summary(self.manifest),
            "warnings": list(self.warnings),
        }


def coverage_summary(manifest: Manifest) -> list[dict[str, Any]]:
    """Coverage at the artifact's own size, one entry per source: name, part, covered, interval, first ids instead."""
    report = manifest.coverage
    if report is None:
        return []
    at = report["sizes"].index(report["draft_vocab"])
    return [
        {
            "source": source["name"],
            "part": source["part"],
            "tokens": source["tokens"],
            "covered": source["coverage"][at],
            "interval": None if source["low"] is None else [source["low"][at], source["high"][at]],
            "first_ids_instead": source["baseline_first_ids"][at],
        }
        for source in report["sources"]
    ]
