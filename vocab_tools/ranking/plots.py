"""Coverage against draft-vocabulary size, as a PNG whose bytes depend on the figures only."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import write_file
from .report import CoverageReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, safe for all common forms of colour blindness; black is kept for the mean of all sources.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# The axis ends here at the latest; curves that cover more run out of it at the top.
_SMALLEST_MISS = 1e-4


def plot_coverage(report: CoverageReport, path: str | Path) -> None:
    """Write the coverage plot of a report as PNG, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_file(path, render_coverage(report))


def render_coverage(report: CoverageReport) -> bytes:
    """Return the coverage plot as PNG bytes; the same report gives the same bytes.

    One curve per source with its 95% interval, and dashed in the same colour the no-corpus baseline of the first ids.
    Both axes are logarithmic: the left one is the share of tokens missed, the right one names the coverage.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.style import context

    # The user's matplotlibrc must not change the bytes.
    with context("default"):
        figure = Figure(figsize=(8.0, 5.0), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_curves(axes, report)
        _draw_axes(axes, report)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_curves(axes: Axes, report: CoverageReport) -> None:
    sizes = np.asarray(report.sizes)
    is_shown = np.isin(sizes, report.shown)
    for index, source in enumerate(report.sources):
        is_mean = len(report.sources) > 1 and index == len(report.sources) - 1
        colour = "black" if is_mean else _COLOURS[index % len(_COLOURS)]
        label = f"{source.name} ({source.part})"
        axes.plot(
            sizes,
            _miss(source.coverage),
            color=colour,
            linewidth=2.4 if is_mean else 1.8,
            marker="*" if is_mean else _MARKERS[index % len(_MARKERS)],
            markevery=np.flatnonzero(is_shown).tolist(),
            markersize=8 if is_mean else 5,
            label=label,
            zorder=3,
        )
        axes.plot(sizes, _miss(source.baseline), color=colour, linewidth=1.1, linestyle=(0, (4, 2)), alpha=0.8)
        if source.low is not None and source.high is not None:
            axes.fill_between(sizes, _miss(source.high), _miss(source.low), color=colour, alpha=0.15, linewidth=0)
    axes.plot([], [], color="0.35", linewidth=1.1, linestyle=(0, (4, 2)), label="first N ids, no corpus")


def _draw_axes(axes: Axes, report: CoverageReport) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    misses = np.concatenate([_miss(part) for source in report.sources for part in (source.coverage, source.baseline)])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    inside = misses[misses >= _SMALLEST_MISS]
    low, high = (float(inside.min()), float(inside.max())) if len(inside) else (_SMALLEST_MISS, _SMALLEST_MISS)
    axes.set_ylim(min(1.0, high * 1.3), low / 1.4)
    steps = (1, 2, 5) if high > 50 * low else (1, 2, 3, 5, 7)
    ticks = [step * 10.0**power for power in range(-4, 1) for step in steps]
    ticks = [tick for tick in ticks if low / 1.4 <= tick <= min(1.0, high * 1.3)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda miss, _: f"{100 * miss:.4g}%"))
    right = axes.secondary_yaxis("right")
    right.yaxis.set_major_locator(FixedLocator(ticks))
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(FuncFormatter(lambda miss, _: f"{100 * (1 - miss):.6g}%"))
    powers = [1 << n for n in range(6, 21) if report.sizes[0] <= 1 << n <= report.sizes[-1]]
    # Without those whose label the vocabulary's own would touch.
    apart = [power for power in powers if not 0.75 < power / report.draft_vocab < 1.33]
    axes.xaxis.set_major_locator(FixedLocator(sorted([*apart, report.draft_vocab])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{round(size):,}".replace(",", "\u202f")))
    axes.axvline(report.draft_vocab, color="0.6", linewidth=1.0, zorder=1)
    axes.set_xlabel("draft vocabulary size N (ids)")
    axes.set_ylabel("tokens missed (log scale, less is higher)")
    right.set_ylabel("tokens covered")
    axes.set_title(f"Coverage of a draft vocabulary of {report.draft_vocab:,} in {report.target_vocab:,}", fontsize=11)
    axes.grid(which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="best", fontsize=9, framealpha=0.9)


def _miss(coverage: Any) -> Any:
    # A logarithmic axis has no zero; a value far beyond its end is drawn instead.
    return np.maximum(1.0 - np.asarray(coverage), _SMALLEST_MISS / 1000)
