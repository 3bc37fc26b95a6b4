"""How many tokens does a pass give, and what does it cost, with trees of 4 to 60 nodes?

    python -m eagle_slim.runtime.bench.accepted_lengths [--dtype float32] [--device cuda] [--batch 1 4] [--out FILE]

The built-in target with its real head, greedy, over ``examples/prompts.jsonl``: accepted length by nodes, and the
median of a step's milliseconds by sequences and nodes (1 node: plain decoding). Sizes take turns, prompt by prompt. On
a CPU one thread works and its own time counts, to which other programs add nothing. `bench.tree_sizes` takes both from
a CPU's run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..comparison.prompt_file import load_prompts
from ..config import TreeConfig
from ..generation.stats import GenerationStats
from ..model import SpeculativeModel
from .timing import machine

NODES = (1, 4, 8, 16, 24, 32, 48, 60)


def measure(
    model: SpeculativeModel,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    nodes: Sequence[int] = NODES,
    new_tokens: int = 64,
) -> list[dict[str, Any]]:
    """A row for each number of sequences and nodes: accepted length, passes, and milliseconds of a step."""
    tree = model.drafter.tree
    models = {n: model.with_tree(TreeConfig(tree.depth, tree.top_k, max(2, n))) for n in nodes}
    rows = []
    for batch in batches:
        stats: dict[int, list[GenerationStats]] = {n: [] for n in nodes}
        for first in range(0, len(prompts) - batch + 1, batch):
            for n, sized in models.items():
                output = sized.generate(
                    prompts[first : first + batch], max_new_tokens=new_tokens, speculative=n > 1, ignore_eos=True
                )
                stats[n].append(output.stats)
        context = statistics.median(len(prompt) for prompt in prompts) + new_tokens / 2
        for n, found in stats.items():
            whole = GenerationStats.sum(found)
            rows.append(
                {
                    "slots": batch,
                    "context": round(context),
                    "nodes": n,
                    "accepted_length": whole.mean_accepted_length,
                    "passes": whole.num_passes,
                    "step_ms": statistics.median(sum(step) for step in whole.steps) * 1e3,
                    "draft_ms": statistics.median(step.draft_s for step in whole.steps) * 1e3 if n > 1 else 0.0,
                }
            )
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


def main() -> None:
    """Measure, print a line for each row, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[2] / "examples" / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        time.perf_counter = time.process_time
    model = SpeculativeModel.from_pretrained(dtype=arguments.dtype, device=device, total_tokens=60)
    prompts = [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(arguments.prompts, limit=arguments.limit)]
    rows = measure(model, prompts, arguments.batch, arguments.nodes, arguments.new)
    report = {
        "dims": "smollm2-135m", "weight_bytes": model.target.weight_bytes,
        "draft_bytes": model.draft_bytes, "machine": machine(device),
        "dtype": arguments.dtype, "new_tokens": arguments.new, "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
