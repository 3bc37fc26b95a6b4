"""A comparison written out: text and Markdown tables, JSON, CSV, and one self-contained HTML page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from .recommend import Advice
from .report import CompareReport, Row
from .statistics import Estimate

_PAGE = "compare_page.html"
_DATA_MARK = "/*DATA*/null"
_NUM_NAMES = 4
"""Columns of the table that hold names and stand on the left."""


def report_to_json(report: CompareReport, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return everything as plain values: setup, rows, coverage curves, remarks, advice."""
    return {
        "setup": report.setup,
        "is_complete": report.is_complete,
        "rows": [row.to_json() for row in report.rows],
        "coverage": [
            {"name": curve.name, "sizes": list(curve.sizes), "covered": list(curve.covered)} for curve in report.curves
        ],
        "remarks": list(report.remarks),
        "recommendations": [each.to_json() for each in advice],
    }


def text_table(report: CompareReport) -> str:
    """Return an aligned table.

    Times are in milliseconds a step; ``missed`` is the share of tokens that the draft vocabulary does not hold;
    ``exact``: answers equal to plain decoding's, of all.
    """
    lines = list(_cells(report))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < _NUM_NAMES else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(report: CompareReport, advice: Sequence[Advice]) -> str:
    """Return the table, the advice and the remarks as Markdown."""
    titles, *lines = _cells(report)
    rule = ["---"] * _NUM_NAMES + ["---:"] * (len(titles) - _NUM_NAMES)
    parts = [_heading(report), "\n".join(_markdown_row(line) for line in (titles, rule, *lines))]
    for each in advice:
        parts.append("\n".join([f"**{each.headline[0].upper()}{each.headline[1:]}**", "", *_bullets(each.reasons)]))
    if report.remarks:
        parts.append("\n".join(["Disturbances:", "", *_bullets(report.remarks)]))
    return "\n\n".join(parts) + "\n"


def csv_text(report: CompareReport) -> str:
    """Return one line per row with all figures of `Row.to_json`; accepted lengths as ``length:count`` pairs."""
    buffer = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in report.rows:
        values = row.to_json()
        values["accepted_lengths"] = " ".join(
            f"{length}:{count}" for length, count in values["accepted_lengths"].items()
        )
        if writer is None:
            writer = csv.DictWriter(buffer, list(values), lineterminator="\n")
            writer.writeheader()
        writer.writerow(values)
    return buffer.getvalue()


def html_page(report: CompareReport, advice: Sequence[Advice]) -> str:
    """Return one HTML page with charts, table and hover; it fetches nothing."""
    template = files("eagle_slim.runtime").joinpath(_PAGE).read_text(encoding="utf-8")
    data = json.dumps(report_to_json(report, advice), ensure_ascii=False)
    # Inside a script element only "</" and "<!--" could end the data or change how it is read.
    data = data.replace("<", "\\u003c")
    assert _DATA_MARK in template
    return template.replace(_DATA_MARK, data)


def heading(report: CompareReport) -> str:
    """Return the models, the device and the type in one line."""
    setup = report.setup
    return f"{setup['target']} with {', '.join(setup['heads'])}: {setup['device']}, {setup['dtype']}"


def _heading(report: CompareReport) -> str:
    setup = report.setup
    part = "" if report.is_complete else " The comparison was interrupted; these are the answers so far."
    return (
        f"{heading(report)}; {setup['drafter']} drafter, {setup['draft_weights']} weights; "
        f"{'; '.join(setup['trees'])}; {setup['num_prompts']} prompts, at most "
        f"{setup['max_new_tokens']} new tokens, {setup['repeats']} repeat(s).{part}"
    )


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"* {line}" for line in lines]


def _cells(report: CompareReport) -> Iterable[list[str]]:
    yield [
        "size", "mode", "batch", "category", "accepted", "missed", "tokens/s", "speed-up", "ms/step", "draft", "verify",
        "host", "passes", "exact",
    ]  # fmt: skip
    for row in report.rows:
        found = row.measured
        times = (found.step_s, found.draft_s, found.verify_s, found.host_s) if found else ()
        yield [
            row.candidate,
            row.mode,
            str(row.batch),
            row.category,
            f"{row.mean_accepted_length:.3f}",
            f"{row.missed_rate:.1%}" if row.draft_vocab else "-",
            _with_error(found.tokens_per_s, 1) if found else "-",
            _speedup(row),
            *([f"{seconds * 1e3:.1f}" for seconds in times] or ["-"] * 4),
            str(row.num_passes),
            f"{row.num_identical}/{row.num_answers}",
        ]


def _speedup(row: Row) -> str:
    return "-" if row.speedup is None else _with_error(row.speedup, 2)


def _with_error(estimate: Estimate, digits: int) -> str:
    """Format a value with the relative half-width of its interval; a question mark where that says nothing."""
    error = "?" if estimate.error is None else f"{estimate.error:.0%}"
    return f"{estimate.value:.{digits}f} ±{error}"
