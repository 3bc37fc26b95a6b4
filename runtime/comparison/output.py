"""A comparison written out: text table, JSON, CSV, PNG, and one self-contained HTML page."""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .compare import PLAIN, CompareReport
from .recommend import Recommendation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    ("size", "size"), ("mode", "mode"), ("category", "category"), ("accepted", "mean_accepted_length"),
    ("tokens/s", "tokens_per_s"), ("ms/pass", "seconds_per_pass"), ("draft", "draft_s_per_pass"),
    ("verify", "verify_s_per_pass"), ("host", "host_s_per_pass"), ("passes", "num_passes"), ("exact", "num_identical"),
)  # fmt: skip
# Okabe and Ito's palette: its colours differ under all common kinds of colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_PAGE = "compare_page.html"
_DATA_MARK = "/*DATA*/null"


def report_to_json(report: CompareReport, recommendation: Recommendation) -> dict[str, Any]:
    """Return everything as plain values: setup, rows, coverage curves, recommendation."""
    return {
        "setup": report.setup,
        "rows": [row.to_json() for row in report.rows],
        "coverage": [
            {"name": curve.name, "sizes": list(curve.sizes), "covered": list(curve.covered)} for curve in report.curves
        ],
        "recommendation": recommendation.to_json(),
    }


def text_table(report: CompareReport) -> str:
    """Return an aligned table; times in milliseconds, ``exact`` as answers equal to plain decoding's of all."""
    lines = [[title for title, _ in _COLUMNS]]
    for row in report.rows:
        values = row.to_json()
        cells = []
        for _, key in _COLUMNS:
            value = values[key]
            if key.endswith("_per_pass"):
                cells.append(f"{value * 1e3:.1f}")
            elif key == "num_identical":
                cells.append(f"{value}/{row.num_answers}")
            elif key == "mean_accepted_length":
                cells.append(f"{value:.3f}")
            elif key == "tokens_per_s":
                cells.append(f"{value:.1f}")
            else:
                cells.append(str(value))
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


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


def html_page(report: CompareReport, recommendation: Recommendation) -> str:
    """Return one HTML page with charts, table and hover; it fetches nothing."""
    template = files("eagle_slim.runtime").joinpath(_PAGE).read_text(encoding="utf-8")
    data = json.dumps(report_to_json(report, recommendation), ensure_ascii=False)
    # Inside a script element only "</" and "<!--" could end the data or change how it is read.
    data = data.replace("<", "\\u003c")
    assert _DATA_MARK in template
    return template.replace(_DATA_MARK, data)


def png_bytes(report: CompareReport, recommendation: Recommendation) -> bytes:
    """Draw accepted length with coverage, and tokens/s, both against the size; the same report gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.style import context

    # The user's matplotlibrc must not change the picture.
    with context("default"):
        figure = Figure(figsize=(8.0, 7.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        length_axes, speed_axes = figure.subplots(2, 1, sharex=True)
        _draw_lengths(length_axes, report)
        _draw_speeds(speed_axes, report, recommendation)
        setup = report.setup
        figure.suptitle(f"{setup['target']} with {setup['head']}: {setup['device']}, {setup['dtype']}", fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _points(report: CompareReport, mode: str) -> tuple[list[int], list[float], list[float]]:
    rows = sorted((report.find(size, mode) for size in report.sizes), key=lambda row: row.draft_vocab)
    return (
        [row.draft_vocab for row in rows],
        [row.stats.mean_accepted_length for row in rows],
        [row.tokens_per_s for row in rows],
    )


def _draw_lengths(axes: Axes, report: CompareReport) -> None:
    from matplotlib.ticker import PercentFormatter

    for mode, colour in zip(report.modes, _COLOURS, strict=False):
        sizes, lengths, _ = _points(report, mode)
        axes.plot(sizes, lengths, color=colour, marker="o", label=f"accepted length, {mode}")
    axes.set_ylabel("tokens per target pass")
    axes.set_ylim(bottom=1.0)
    axes.set_xscale("log", base=2)
    measured = [row.draft_vocab for row in report.rows if row.draft_vocab]
    axes.set_xlim(min(measured) * 0.85, max(measured) * 1.15)
    axes.grid(True, color="0.9", linewidth=0.8)
    right = axes.twinx()
    for curve, style in zip(report.curves, ("--", ":", "-."), strict=False):
        right.plot(curve.sizes, curve.covered, color="0.35", linestyle=style, label=f"coverage, {curve.name}")
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylabel("tokens covered")
    handles = [axis.get_legend_handles_labels() for axis in (axes, right)]
    axes.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], loc="lower right", fontsize=8)


def _draw_speeds(axes: Axes, report: CompareReport, recommendation: Recommendation) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks: list[int] = []
    for mode, colour in zip(report.modes, _COLOURS, strict=False):
        sizes, _, speeds = _points(report, mode)
        ticks = sizes
        axes.plot(sizes, speeds, color=colour, marker="o", label=f"tokens/s, {mode}")
        plain = report.find(PLAIN, mode).tokens_per_s
        axes.axhline(plain, color=colour, linestyle=(0, (4, 3)), linewidth=1.0, label=f"plain decoding, {mode}")
    axes.axvline(recommendation.draft_vocab, color="0.6", linewidth=6, alpha=0.3, label="recommended")
    axes.set_xlabel("draft vocabulary (tokens)")
    axes.set_ylabel("tokens per second, decoding")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value)}"))
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.legend(loc="lower right", fontsize=8)
