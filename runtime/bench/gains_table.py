"""The result of `bench.generate` as a Markdown table, a line for each variant.

python -m eagle_slim.runtime.bench.gains_table results/generate-h200.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_COLUMNS = (
    "row", "nodes", "draft vocabulary", "draft, verify", "step", "accepted", "tokens/s", "× plain",
    "over full: gross, net", "over 32,000: gross, net", "acceptance from",
)  # fmt: skip
_NAMES = {"transformers": "transformers' `generate`", "plain": "none, plain decoding"}


def gains_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay out rows of `bench.generate` in their order; gains in per cent, times in milliseconds."""
    header = [f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS)]
    return "\n".join([*header, *map(_line, rows)])


def _line(row: Mapping[str, Any]) -> str:
    size = _NAMES.get(row["variant"]) or f"{row['draft_vocab']:,}{' (full)' if row['is_full'] else ''}"
    phases = ", ".join(f"{row[name]:.2f}" for name in ("draft_ms", "verify_ms") if name in row)
    over_plain = f"{row['over_plain']:.2f}" if "over_plain" in row else ""
    gains = ["" if _is_base(row, name) else _gain(row, name) for name in ("full", "32000")]
    cells = [
        row["row"], row.get("nodes", ""), size, phases, f"{row['step_ms']:.2f}", f"{row['accepted_length']:.2f}",
        f"{row['tokens_per_s']:,.0f}", over_plain, *gains, row.get("acceptance_from", ""),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _is_base(row: Mapping[str, Any], name: str) -> bool:
    return f"net_over_{name}" not in row or row[f"net_over_{name}"] == 1


def _gain(row: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{100 * row[f'{kind}_over_{name}'] - 100:+.1f}%" for kind in ("gross", "net"))


if __name__ == "__main__":
    print(gains_table(json.loads(Path(sys.argv[1]).read_text())["rows"]))
