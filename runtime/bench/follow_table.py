"""Results of `eagle-compare --follow` and of `bench.draft_tails` as Markdown tables.

python -m eagle_slim.runtime.bench.follow_table results/follow/compare.json results/draft-tails.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ALL = "all"
_ORDER = (None, "prompt", "text")


def compare_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the rows of a `compare.json` of one head, mode and batch size: gains are over the same size alone."""
    drafted = [row for row in rows if row["draft_vocab"]]
    categories = [*dict.fromkeys(row["category"] for row in drafted if row["category"] != ALL), ALL]
    found = {(row["draft_vocab"], row["follow"], row["category"]): row for row in drafted}
    sizes = sorted({(size, _ORDER.index(follow)) for size, follow, _ in found})
    names = ("rows", "follows", *categories, "missed", "draft, ms", "tokens/s", "× plain")
    lines = [_line(names), _line(["---"] * len(names))]
    for size, place in sizes:
        own = {category: found[size, _ORDER[place], category] for category in categories}
        alone = {category: found.get((size, None, category)) for category in categories} if place else {}
        whole, base = own[ALL], alone.get(ALL)
        lengths = [
            f"{row['mean_accepted_length']:.3f}" + _gain(row, alone.get(category), "mean_accepted_length")
            for category, row in own.items()
        ]
        speed = f"{whole['tokens_per_s']:,.0f}" + _gain(whole, base, "tokens_per_s")
        lines.append(
            _line(
                [
                    f"{size:,}", _ORDER[place] or "-", *lengths, f"{whole['missed_rate']:.1%}",
                    f"{whole['draft_s_per_step'] * 1e3:.3f}", speed, f"{whole['speedup']:.2f}",
                ]
            )
        )  # fmt: skip
    return "\n".join(lines)


def tails_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the rows of `bench.draft_tails`: microseconds of a draft, and what they are more than without a tail."""
    timed = [row for row in rows if "times" in row]
    names = list(dict.fromkeys(name for row in timed for name in row["times"]))
    lines = [_line(["base", "sequences", *names]), _line(["---"] * (len(names) + 2))]
    for row in timed:
        times = {name: row["times"][name]["median_us"] for name in names if name in row["times"]}
        cells = [
            f"{value:,.1f}" + (f" ({value / times['none'] - 1:+.1%})" if name.startswith("tail") else "")
            for name, value in times.items()
        ]
        lines.append(_line([f"{row['base']:,}", str(row["batch"]), *cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _gain(row: Mapping[str, Any], alone: Mapping[str, Any] | None, name: str) -> str:
    return "" if alone is None else f" ({row[name] / alone[name] - 1:+.1%})"


def main(paths: Sequence[str]) -> None:
    """Print the table of each file."""
    for path in paths:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        print(tails_table(result["rows"]) if "dims" in result else compare_table(result["rows"]))


if __name__ == "__main__":
    main(sys.argv[1:])
