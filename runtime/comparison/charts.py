"""The figures of a comparison as one PNG: accepted length with coverage, and speed, against the draft vocabulary."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from .compare import ALL, PLAIN
from .output import heading
from .recommend import Advice
from .report import CompareReport, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: its colours differ under all common kinds of colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Room around the points, as a share of the axis, so that no marker is cut.
_MARGIN = 0.1


def png_bytes(report: CompareReport, advice: Sequence[Advice]) -> bytes:
    """Draw a column of charts for all prompts and for each category; the same report gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.style import context

    columns = [ALL, *report.categories]
    # The user's matplotlibrc must not change the picture.
    with context("default"):
        figure = Figure(figsize=(2.5 + 5.5 * len(columns), 8.0), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        charts = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
        for place, category in enumerate(columns):
            length_axes, speed_axes = charts[0][place], charts[1][place]
            _draw_lengths(length_axes, report, category)
            _draw_speeds(speed_axes, report, category)
            for axes in (length_axes, speed_axes):
                _mark_advice(axes, report, advice)
            length_axes.set_title("all prompts" if category == ALL else category, fontsize=10)
        _finish(charts[0][0], charts[1][0], report)
        figure.suptitle(heading(report), fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def series(report: CompareReport, category: str) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows that belong on one line, by size, and the line's name.

    A line has one mode, batch size, head and tree, and follows one text or none.
    """
    rows = [row for row in report.rows if row.category == category and row.candidate != PLAIN]
    lines = dict.fromkeys((row.mode, row.batch, row.head, row.tree, row.follow) for row in rows)
    for line in lines:
        mode, batch, head, tree, follow = line
        name = [mode]
        if len({other[1] for other in lines}) > 1:
            name.append(f"batch {batch}")
        if len({other[2] for other in lines}) > 1:
            name.append(head)
        if len({other[3] for other in lines}) > 1:
            name.append("tree {}/{}/{}".format(*tree))
        if follow is not None:
            name.append(f"follows the {follow}")
        own = [row for row in rows if (row.mode, row.batch, row.head, row.tree, row.follow) == line]
        yield ", ".join(name), sorted(own, key=lambda row: row.draft_vocab)


def _draw_lengths(axes: Axes, report: CompareReport, category: str) -> None:
    from matplotlib.ticker import PercentFormatter

    for (name, rows), colour in zip(series(report, category), cycle(_COLOURS), strict=False):
        axes.plot(
            [row.draft_vocab for row in rows], [row.mean_accepted_length for row in rows],
            color=colour, marker="o", label=f"accepted length, {name}",
        )  # fmt: skip
    axes.grid(True, color="0.9", linewidth=0.8)
    handles = [axes.get_legend_handles_labels()]
    if category == ALL and report.curves:
        right = axes.twinx()
        for curve, style in zip(report.curves, cycle(("--", ":", "-.")), strict=False):
            right.plot(curve.sizes, curve.covered, color="0.35", linestyle=style, label=f"coverage of {curve.name}")
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
        right.set_ylabel("coverage (share of tokens)")
        handles.append(right.get_legend_handles_labels())
    axes.legend([h for pair in handles for h in pair[0]], [t for pair in handles for t in pair[1]], fontsize=8)


def _draw_speeds(axes: Axes, report: CompareReport, category: str) -> None:
    for (name, rows), colour in zip(series(report, category), cycle(_COLOURS), strict=False):
        shown = [row for row in rows if row.measured]
        estimates = [row.measured.tokens_per_s for row in shown if row.measured]
        finite = [min(each.high, 2 * each.value) for each in estimates]
        errors = (
            [each.value - max(each.low, 0.0) for each in estimates],
            [high - each.value for high, each in zip(finite, estimates, strict=True)],
        )
        axes.errorbar(
            [row.draft_vocab for row in shown], [each.value for each in estimates], yerr=errors,
            color=colour, marker="o", capsize=3, label=f"tokens/s, {name}",
        )  # fmt: skip
        if rows:
            plain = report.find(PLAIN, rows[0].mode, category, rows[0].batch)
            axes.axhline(plain.tokens_per_s, color=colour, linestyle=(0, (4, 3)), linewidth=1.0)
    axes.plot([], [], color="0.3", linestyle=(0, (4, 3)), linewidth=1.0, label="plain decoding")
    axes.set_xlabel("draft vocabulary (tokens)")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.legend(fontsize=8)


def _mark_advice(axes: Axes, report: CompareReport, advice: Sequence[Advice]) -> None:
    decided = sorted({each.draft_vocab for each in advice if each.as_fast})
    for vocab in decided:
        names = ", ".join(
            each.mode if len(report.batches) == 1 else f"{each.mode} {each.batch}"
            for each in advice
            if each.draft_vocab == vocab
        )
        axes.axvline(vocab, color="0.6", linewidth=6, alpha=0.3)
        axes.annotate(
            f"recommended ({names})", (vocab, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -4),
            textcoords="offset points", rotation=90, va="top", fontsize=7, color="0.35",
        )  # fmt: skip


def _finish(length_axes: Axes, speed_axes: Axes, report: CompareReport) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sizes = sorted({row.draft_vocab for row in report.rows if row.draft_vocab})
    for axes in (length_axes, speed_axes):
        axes.set_xscale("log", base=2)
        axes.margins(_MARGIN)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value):,}"))
        axes.tick_params(axis="x", rotation=30)
    factor = (max(sizes) / min(sizes)) ** _MARGIN * 1.05
    speed_axes.set_xlim(min(sizes) / factor, max(sizes) * factor)
    speed_axes.set_ylim(bottom=0)
    length_axes.set_ylabel("tokens per target pass")
    speed_axes.set_ylabel("tokens per second, decoding")
