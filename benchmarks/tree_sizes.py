"""Which size of tree gives the most tokens a second? Makes the tables that choose it, and measures what goes into them.

    python -m benchmarks.tree_sizes                           # joins results into runtime/requests/tree_sizes.json
    python -m benchmarks.tree_sizes --measure [--dtype float32] [--device cuda] [--batch 1 4] --out FILE

The tables join `ACCEPTED`, accepted lengths of a real head by nodes, and `STEPS`, steps of named devices and dimensions
(``benchmarks.step`` on a GPU, ``--measure`` on a CPU). What is measured again gets its name here, behind what it
replaces or in its place.

``--measure``: the built-in target with its real head, greedy, over ``examples/prompts.jsonl``, as `eagle-compare` does
it: accepted length by nodes, and a step's milliseconds by sequences and nodes (1 node: plain decoding). On a CPU one
thread works and its own time counts, to which other programs add nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare import CompareOptions, compare, load_prompts
from eagle_slim.runtime.compare.prompts import Prompt
from eagle_slim.runtime.compare.report import ALL
from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head
from eagle_slim.runtime.step.tree_size import TABLES

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import LAYERS
from benchmarks.shared.timing import machine

FOLDER = Path(__file__).with_name("results")
ACCEPTED = "2026-11-23-cpu-accepted-lengths.json"
STEPS = (
    "2026-11-22-cpu-steps.json",
    "2026-11-22-h200-step-llama-3.1-8b.json",
    "2026-11-22-h200-step-llama-3.1-8b-16-nodes.json",
    "2026-11-22-h200-step-smollm2.json",
    "2026-11-22-h200-step-llama-3.1-8b-shared-packing.json",
    "2026-11-24-h200-step-llama-3.1-8b.json",
    "2026-11-24-h200-step-smollm2.json",
)
LEVELS = 6
"""Passes of a draft of depth 5, which all of these measured."""
NODES = (4, 8, 16, 24, 32, 48, 60)


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
    head = random_head(MODELS[dims], torch.device("meta")).of_rows(slice(draft_vocab))
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
        table["steps"] |= {
            (row["batch"], row["prefix"], row["nodes"]): row for row in result["rows"] if not row.get("sampled")
        }
    lengths = {str(row["nodes"]): round(row["accepted_length"], 3) for row in read(folder / accepted)["rows"]}
    return {
        "accepted_lengths": {"from": accepted, "by_nodes": lengths},
        "tables": [table | {"steps": _steps(table["steps"])} for table in tables.values()],
    }


def _steps(rows: Mapping[tuple[int, int, int], Mapping[str, Any]]) -> list[list[float]]:
    """Sequences, tokens before, nodes, milliseconds of the step, and of its draft."""
    # A draft takes as long for every size of tree, and `benchmarks.step` times it for the largest alone.
    drafts = {place[:2]: row["draft_ms"] for place, row in rows.items() if place[2] > 1 and "draft_ms" in row}
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


def measure(
    model: SpeculativeModel, prompts: Sequence[Prompt], batches: Sequence[int], new_tokens: int
) -> list[dict[str, Any]]:
    """A row for each number of sequences and of nodes: accepted length, passes, and milliseconds of a step."""
    trees = [replace(model.drafter.tree, total_tokens=nodes) for nodes in NODES]
    options = CompareOptions(["full"], trees, modes=["greedy"], batches=batches, max_new_tokens=new_tokens)
    prefix = statistics.median(len(model.encode_chat(prompt.turns[0])) for prompt in prompts) + new_tokens / 2
    rows = []
    for row in compare(model, prompts, options).report.rows:
        if row.category == ALL and row.measured is not None:
            rows.append(
                {
                    "batch": row.batch, "prefix": round(prefix), "nodes": row.candidate.tree[2],
                    "accepted_length": row.mean_accepted_length, "passes": row.num_passes,
                    "step_ms": row.measured.step_s * 1e3, "draft_ms": row.measured.draft_s * 1e3,
                }
            )  # fmt: skip
            show(rows[-1])
    return rows


def main(argv: list[str] | None = None) -> None:
    """Make the tables, or measure; `--help` lists the options."""
    command = Command("tree_sizes", __doc__)
    command.add_argument("--measure", action="store_true", help="measure on this machine instead of joining results")
    command.add_argument("--new", type=int, default=64, help="new tokens a prompt")
    command.add_argument("--batch", type=int, nargs="+", default=[1])
    command.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    command.add_argument("--device", default="cpu")
    args = command.parse_args(argv)
    if not args.measure:
        (args.out or TABLES).write_text(to_text(collect()), encoding="utf-8")
        return
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        time.perf_counter = time.process_time
    model = SpeculativeModel.from_pretrained(dtype=args.dtype, device=device, total_tokens=60)
    path = Path(__file__).parents[1] / "examples" / "prompts.jsonl"
    rows = measure(model, load_prompts(path, limit=12), args.batch, args.new)
    about = {"dims": "smollm2-135m", "machine": machine(device), "dtype": args.dtype, "new_tokens": args.new}
    write(about | {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
