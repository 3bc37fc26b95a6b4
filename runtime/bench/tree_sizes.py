"""Make the tables that choose the size of a tree from the results of `bench.step` and `bench.accepted_lengths`.

    python -m eagle_slim.runtime.bench.tree_sizes

Reads `ACCEPTED` and `STEPS` under ``runtime/bench/results`` and writes ``runtime/generation/tree_sizes.json``: accepted
lengths of a real head, and steps of named devices and dimensions. What is measured again gets its name here, behind
what it replaces or in its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..generation.tree_size import TABLES
from .problem import MODELS, first_rows, random_head
from .random_decoding import LAYERS

FOLDER = Path(__file__).with_name("results")
ACCEPTED = "2026-11-22-cpu-accepted-lengths.json"
STEPS = (
    "2026-11-22-cpu-steps.json",
    "2026-11-22-h200-step-llama-3.1-8b.json",
    "2026-11-22-h200-step-llama-3.1-8b-16-nodes.json",
    "2026-11-22-h200-step-smollm2.json",
    "2026-11-22-h200-step-llama-3.1-8b-shared-packing.json",
)
LEVELS = 6
"""Passes of a draft of depth 5, which all of these measured."""


def read(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def weight_bytes(dims: str) -> int:
    """Bytes in bfloat16 of the decoder layers and the LM head of a target of these dimensions."""
    d = MODELS[dims]
    layer = (2 * d.heads + 2 * d.kv_heads) * d.head_dim * d.hidden + 3 * d.intermediate * d.hidden
    return 2 * (LAYERS[dims] * layer + d.vocab * d.hidden)


def draft_bytes(dims: str, draft_vocab: int) -> int:
    """Bytes in bfloat16 that drafting a tree with a head for these dimensions reads."""
    head = first_rows(random_head(MODELS[dims], torch.device("meta")), draft_vocab)
    return 2 * head.num_weights * LEVELS


def collect(accepted: str = ACCEPTED, steps: Iterable[str] = STEPS, folder: Path = FOLDER) -> dict[str, Any]:
    """Join results, by their files' names."""
    tables: dict[tuple[str, str, int], dict[str, Any]] = {}
    for name in steps:
        result = read(folder / name)
        machine, dims = result["machine"], result["dims"]
        is_gpu, draft_vocab = "num_sms" in machine, result.get("draft_vocab", MODELS[dims].vocab)
        device = machine["device"] if is_gpu else "CPU"
        table = tables.setdefault(
            (device, dims, draft_vocab),
            {
                "device": device, "kind": "cuda" if is_gpu else "cpu", "model": dims, "draft_vocab": draft_vocab,
                "weight_bytes": weight_bytes(dims), "draft_bytes": draft_bytes(dims, draft_vocab),
                "versions": {key: machine[key] for key in ("torch", "triton")}, "from": [], "steps": {},
            },
        )  # fmt: skip
        table["from"].append(name)
        table["steps"] |= {(*_place(row), row["nodes"]): row for row in result["rows"] if not row.get("sampled")}
    lengths = {str(row["nodes"]): round(row["accepted_length"], 3) for row in read(folder / accepted)["rows"]}
    return {
        "accepted_lengths": {"from": accepted, "by_nodes": lengths},
        "tables": [table | {"steps": _steps(table["steps"])} for table in tables.values()],
    }


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return row.get("slots", row.get("batch")), row.get("context", row.get("prefix"))


def _steps(rows: Mapping[tuple[int, int, int], Mapping[str, Any]]) -> list[list[float]]:
    """Slots, context, nodes, milliseconds of the step, and of its draft."""
    # A draft takes as long for every size of tree, and `bench.step` times it for the largest alone.
    drafts = {_place(row): row["draft_ms"] for row in rows.values() if row["nodes"] > 1 and "draft_ms" in row}
    return [
        [*place, round(row["step_ms"], 3), round(row.get("draft_ms", drafts[place[:2]]), 3) if place[2] > 1 else 0.0]
        for place, row in sorted(rows.items())
    ]


def to_text(tables: Mapping[str, Any]) -> str:
    """JSON with a step to a line."""
    text = json.dumps(tables, indent=1)
    for table in tables["tables"]:
        for step in table["steps"]:
            text = text.replace(json.dumps(step, indent=1).replace("\n", "\n    "), json.dumps(step))
    return text + "\n"


def main() -> None:
    """Write the tables."""
    TABLES.write_text(to_text(collect()), encoding="utf-8")


if __name__ == "__main__":
    main()
