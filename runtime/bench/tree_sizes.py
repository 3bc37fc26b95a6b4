"""Make the tables that choose the size of a tree from the results of `bench.step` and `bench.accepted_lengths`.

    python -m eagle_slim.runtime.bench.tree_sizes

Reads `RESULTS` under ``runtime/bench/results`` and writes ``runtime/generation/tree_sizes.json``: accepted lengths from
the first, which ran a real head, steps from all. What was measured again gets its name here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..generation.tree_size import TABLES

FOLDER = Path(__file__).with_name("results")
RESULTS = (
    "2026-11-22-cpu-accepted-lengths.json",
    "2026-11-22-h200-tree-sizes-llama-3.1-8b.json",
    "2026-11-22-h200-tree-sizes-smollm2.json",
)


def read(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def collect(names: Iterable[str], folder: Path = FOLDER) -> dict[str, Any]:
    """Join results, by their files' names; the first one gives the accepted lengths."""
    found = {name: read(folder / name) for name in names}
    first = next(iter(found.values()))
    return {
        "accepted_lengths": {
            "from": next(iter(found)),
            "by_nodes": {
                str(row["nodes"]): round(row["accepted_length"], 3) for row in first["rows"] if row["slots"] == 1
            },
        },
        "tables": [_table(name, result) for name, result in found.items()],
    }


def _table(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    machine, is_gpu = result["machine"], "num_sms" in result["machine"]
    rows = [row for row in result["rows"] if not row.get("sampled")]
    # A draft takes as long for every size of tree, and `bench.step` times it once.
    drafts = {_place(row): row["draft_ms"] for row in rows if row["nodes"] > 1 and "draft_ms" in row}
    steps = [
        [*_place(row), row["nodes"], round(row["step_ms"], 3), round(_draft_ms(row, drafts), 3)]
        for row in rows
    ]  # fmt: skip
    return {
        "from": name, "device": machine["device"] if is_gpu else "CPU", "kind": "cuda" if is_gpu else "cpu",
        "model": result["dims"], "weight_bytes": result["weight_bytes"], "draft_bytes": result["draft_bytes"],
        "versions": {key: machine[key] for key in ("torch", "triton", "commit")}, "steps": sorted(steps),
    }  # fmt: skip


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return row.get("slots", row.get("batch")), row.get("context", row.get("prefix"))


def _draft_ms(row: Mapping[str, Any], drafts: Mapping[tuple[int, int], float]) -> float:
    return 0.0 if row["nodes"] == 1 else row.get("draft_ms", drafts[_place(row)])


def to_text(tables: Mapping[str, Any]) -> str:
    """A step to a line."""
    text = json.dumps(tables, indent=1)
    for table in tables["tables"]:
        for step in table["steps"]:
            text = text.replace(json.dumps(step, indent=1).replace("\n", "\n    "), json.dumps(step))
    return text + "\n"


def main() -> None:
    """Write the tables."""
    TABLES.write_text(to_text(collect(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main()
