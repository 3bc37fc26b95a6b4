"""The result of a comparison, and its forms: text, JSON, and one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from eagle_slim.convert.atomic import atomic_directory, check_output
from eagle_slim.vocab_tools.coverage import aligned

from ..errors import UsageError
from ..miss_log import MissLog
from .answers import Answer
from .recommend import Advice
from .report import CompareReport
from .statistics import Estimate

_DATA_MARK = "/*DATA*/null"
_MARKER = "compare.json"
_ANSWERS = "answers.jsonl"
_NUM_NAMES = 4
"""Columns of the table that hold names and stand on the left."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    report: CompareReport
    """The figures: a row for each candidate, mode, batch size and category."""
    recommendations: Sequence[Advice]
    """Which draft vocabulary to use on this device, for each mode and batch size."""
    answers: Sequence[Answer]
    """Every answer, in the order in which they were made."""
    miss_log: MissLog
    """The tokens of plain decoding's answers, each text once, as counts for the next ranking."""
    answers_file: Path | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all answers that were planned are in."""
        return self.report.is_complete

    def write(self, folder: str | Path, force: bool = False) -> None:
        """Write compare.json and compare.html into a folder, both or none.

        The file of answers is written there too, as answers.jsonl, and removed from its old place once the comparison
        is complete. Raises `OutputExistsError` for a folder that exists, unless ``force`` is given and a comparison
        wrote it; `OutputError` where it cannot be written.
        """
        with atomic_directory(folder, force=force, marker=_MARKER) as inside:
            (inside / _MARKER).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            (inside / "compare.html").write_text(self.to_html(), encoding="utf-8")
            if self.answers_file is not None:
                (inside / _ANSWERS).write_bytes(self.answers_file.read_bytes())
        if self.answers_file is not None and self.is_complete:
            self.answers_file.unlink()

    def to_json(self) -> dict[str, Any]:
        """Return everything but the answers as plain values: setup, rows, coverage curves, remarks, advice."""
        report = self.report
        return {
            "setup": report.setup,
            "is_complete": report.is_complete,
            "rows": [row.to_json() for row in report.rows],
            "coverage": [
                {"name": curve.name, "sizes": list(curve.sizes), "covered": list(curve.covered)}
                for curve in report.curves
            ],
            "remarks": list(report.remarks),
            "recommendations": [each.to_json() for each in self.recommendations],
        }

    def to_text(self) -> str:
        """Return an aligned table, the advice and the remarks.

        Ranges are 95% intervals over prompts. Times are in milliseconds a step; ``missed`` is the share of tokens that
        the draft vocabulary does not hold; ``exact``: answers equal to plain decoding's, of all; "equal" where the
        target promises that for every type of weights, and no answer broke the promise. "-": not measured.
        """
        table = aligned(list(_cells(self.report)), _NUM_NAMES)
        advice = ["\n  ".join([each.headline, *each.reasons]) for each in self.recommendations]
        remarks = "\n".join(f"disturbed: {remark}" for remark in self.report.remarks)
        return "\n\n".join([table, *advice, *([remarks] if remarks else [])])

    def to_html(self) -> str:
        """Return one HTML page with charts, table and hover; it fetches nothing."""
        template = files("eagle_slim.runtime.compare").joinpath("page.html").read_text(encoding="utf-8")
        # Inside a script element only "</" and "<!--" could end the data or change how it is read.
        data = json.dumps(self.to_json(), ensure_ascii=False).replace("<", "\\u003c")
        assert _DATA_MARK in template
        return template.replace(_DATA_MARK, data)


def saved_answers(folder: str | Path) -> Path | None:
    """Return the file of answers inside the folder of a finished comparison; None for others.

    None too where another comparison was begun that will replace it.
    """
    inside = Path(folder).expanduser()
    try:
        is_complete = json.loads((inside / _MARKER).read_text(encoding="utf-8"))["is_complete"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return None
    answers = inside / _ANSWERS
    return answers if is_complete and answers.is_file() and not _answers_beside(inside).exists() else None


def prepare_folder(folder: str | Path, force: bool = False, resume: bool = False) -> Path:
    """Return the file of answers for a comparison that `Comparison.write` will write to a folder: FOLDER.answers.jsonl.

    Nothing is computed in vain: answers of an interrupted comparison are kept for ``resume``, removed by ``force``.
    Raises `UsageError` for such answers with neither, and as `Comparison.write` does.
    """
    answers = _answers_beside(Path(folder).expanduser())
    if answers.exists() and force and not resume:
        answers.unlink()
    if answers.exists() and not resume:
        raise UsageError(
            f"{answers}: the answers of an interrupted comparison. Give --resume to take it up, or --force to start "
            "over.",
            option="--resume", path=str(answers),
        )  # fmt: skip
    check_output(folder, force or answers.exists(), _MARKER)
    answers.parent.mkdir(parents=True, exist_ok=True)
    return answers


def _answers_beside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".answers.jsonl")


def _cells(report: CompareReport) -> Iterator[list[str]]:
    yield [
        "size", "mode", "batch", "category", "accepted", "missed", "tokens/s", "speed-up", "ms/step", "draft", "verify",
        "host", "passes", "exact",
    ]  # fmt: skip
    for row in report.rows:
        found = row.measured
        times = (found.step_s, found.draft_s, found.verify_s, found.host_s) if found else ()
        yield [
            row.label,
            row.mode,
            str(row.batch),
            row.category,
            f"{found.accepted_length.value:.3f}" if found else "-",
            "-" if row.candidate.is_plain or not row.num_new_tokens else f"{row.missed_rate:.1%}",
            _with_range(found.tokens_per_s if found else None, 1),
            _with_range(row.speedup, 2),
            *([f"{seconds * 1e3:.1f}" for seconds in times] or ["-"] * 4),
            str(row.num_passes) if row.num_answers else "-",
            "equal" if row.is_exact else f"{row.num_identical}/{row.num_answers}" if row.num_answers else "-",
        ]


def _with_range(estimate: Estimate | None, digits: int) -> str:
    """Format a value with its interval, unless that says nothing, or is none."""
    if estimate is None:
        return "-"
    ends = [f"{end:.{digits}f}" for end in (estimate.value, estimate.low, estimate.high)]
    return "{} ({} to {})".format(*ends) if estimate.says_something and len(set(ends)) > 1 else ends[0]
