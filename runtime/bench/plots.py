"""Curves of time and bytes against draft vocabulary and batch, from the JSON of `bench.draft` or `bench.generate`.

python -m eagle_slim.runtime.bench.plots results/draft-h200.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_BASE = {"model": "llama-3.1-8b", "draft_vocab": 32000, "depth": 5, "batch": 1, "prefix": 512}
_STYLES = {"bf16": ("persistent, bf16", "C0"), "fp8": ("persistent, FP8", "C1"), "B": ("PyTorch, CUDA graph", "C2")}


def plot_curves(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw ``<path>-vocab.png`` and ``<path>-batch.png``; a curve of fewer than two points is left out."""
    drawn = []
    for axis, log in (("draft_vocab", False), ("batch", True)):
        wanted = {key: value for key, value in _BASE.items() if key != axis}
        rows = [row for row in result["rows"] if "times" in row and all(row[k] == v for k, v in wanted.items())]
        rows.sort(key=lambda row: row[axis])
        if len(rows) > 1:
            target = path.with_name(f"{path.stem}-{axis.removeprefix('draft_')}.png")
            _draw(result, rows, axis, log, target)
            drawn.append(target)
    return drawn


def _draw(result: dict[str, Any], rows: list[dict[str, Any]], axis: str, log: bool, target: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left, right = panels
    values = [row[axis] for row in rows]

    def times(name: str, field: str = "median_us") -> list[float]:
        return [row["times"][name][field] / 1e3 for row in rows]

    for name, (label, color) in _STYLES.items():
        if all(name in row["times"] for row in rows):
            left.plot(values, times(name), "o-", color=color, label=label)
            left.fill_between(values, times(name, "low_us"), times(name, "high_us"), color=color, alpha=0.2)
        if all(name in row["floor_us"] for row in rows):
            floors = [row["floor_us"][name] / 1e3 for row in rows]
            left.plot(values, floors, "--", color=color, label=f"bytes / copy bandwidth, {name}")
    gigabytes = [row["draft_bytes"] / 1e9 for row in rows]
    right.plot(gigabytes, times("bf16"), "o-", color="C0", label="persistent, bf16")
    right.plot(gigabytes, times("B"), "o-", color="C2", label="PyTorch, CUDA graph")
    for row, x, y in zip(rows, gigabytes, times("bf16"), strict=True):
        right.annotate(f"{row[axis]:,}", (x, y), textcoords="offset points", xytext=(4, -12), fontsize=8)
    left.set_xlabel({"draft_vocab": "draft vocabulary", "batch": "batch"}[axis])
    right.set_xlabel("bytes that must be read, GB")
    if log:
        left.set_xscale("log", base=2)
        left.set_yscale("log", base=2)
        left.set_xticks(values, [str(value) for value in values])
    else:
        left.set_ylim(bottom=0)
        right.set_ylim(bottom=0)
        right.set_xlim(left=0)
    for panel in panels:
        panel.set_ylabel("time of one draft, ms")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    fixed = ", ".join(f"{key} {value}" for key, value in _BASE.items() if key != axis)
    described = result["machine"]
    versions = f"torch {described['torch']}, triton {described['triton']}"
    figure.suptitle(f"{described['device']}, {versions}: {fixed}", fontsize=9)
    figure.savefig(target, dpi=110, metadata={"Software": None})
    plt.close(figure)


def plot_gains(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw ``<path>.png``: tokens/s over the full vocabulary's against the draft vocabulary, a panel for each row.

    One line with equal acceptance and one for each source of a loss. Rows of fewer than two sizes are left out; without
    any, nothing is drawn.
    """
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "net_over_full" in row:
            panels.setdefault(row["row"], []).append(row)
    panels = {name: rows for name, rows in panels.items() if len({row["draft_vocab"] for row in rows}) > 1}
    if not panels:
        return []
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), layout="constrained", squeeze=False
    )
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        full = [row for row in rows if row["is_full"]]
        gross = {row["draft_vocab"]: row["gross_over_full"] for row in rows}
        panel.plot(
            list(gross), [100 * gain - 100 for gain in gross.values()], "o--", color="C7", label="equal acceptance"
        )
        sources = dict.fromkeys(row["acceptance_from"] for row in rows if not row["is_full"])
        for place, source in enumerate(sources):
            net = [*full, *(row for row in rows if row["acceptance_from"] == source)]
            gains = [100 * row["net_over_full"] - 100 for row in net]
            label = f"net: {re.split('[:(,]', source)[0].strip()}"
            panel.plot([row["draft_vocab"] for row in net], gains, "o-", color=f"C{place}", label=label)
        panel.axhline(0, color="0.7", linewidth=0.8)
        panel.set_title(name, fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(gross), [f"{size:,}" for size in gross], fontsize=7)
        panel.minorticks_off()
        panel.set_ylabel("tokens/s over the full vocabulary, %", fontsize=8)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    described = result["machine"]
    versions = f"torch {described['torch']}, triton {described['triton']}"
    figure.suptitle(f"{described['device']}, {versions}: draft vocabulary and speed end to end", fontsize=9)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return [target]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    measured = json.loads(source.read_text())
    for written in (plot_curves if "top_k" in measured else plot_gains)(measured, source):
        print(written)
