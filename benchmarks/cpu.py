"""Count tokens a second of processor time on a CPU: drafting as by default beside plain decoding, on one thread.

    python -m benchmarks.cpu [--rows REGEX] [--prompts 4] [--new 32] [--out benchmarks/results/DATE-cpu.json]

A row is a type and a number of rows of the built-in head (``float32/8192``), or of its sequences at a time after those
(``float32/8192/4``). The prompts are answered with drafts and without in turn, which of them first drawn anew for
each. Figures are of the steps alone: the same call for one token is taken off. ``ratio`` is of all prompts together,
``ratios`` of each call. Processor time is that of this process, whoever else computes; but whoever does takes caches
and bandwidth, so that single calls vary by a tenth. Exit status 1 if a row is slower with drafts.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare import load_prompts

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.timing import machine

SIZES = (4096, 8192, 16384, 32000)
ROWS = [
    *(f"{dtype}/{size}" for dtype in ("float32", "bfloat16") for size in SIZES),
    *(f"{dtype}/8192/{slots}" for dtype in ("float32", "bfloat16") for slots in (4, 16)),
]
PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.jsonl"


def seconds_of_steps(model: SpeculativeModel, prompts: list[Any], num_new: int, is_drafted: bool) -> tuple[float, Any]:
    """Return the processor seconds of an answer's steps, and its statistics."""
    taken = []
    for count in (1, num_new):
        began = time.process_time()
        output = model.generate(prompts, max_new_tokens=count, speculative=is_drafted, ignore_eos=True)
        taken.append(time.process_time() - began)
    return taken[1] - taken[0], output.stats


def measure(row: str, num_prompts: int, num_new: int) -> dict[str, Any]:
    """Measure one row."""
    dtype, size, slots = [*row.split("/"), "1"][:3]
    model = SpeculativeModel.from_pretrained(dtype=dtype, device="cpu", draft_vocab=int(size))
    prompts = [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(PROMPTS, num_prompts * int(slots))]
    groups = [prompts[first::num_prompts] for first in range(num_prompts)]
    drawn, passes, accepted, path = random.Random(0), 0, 0, ""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for group in (groups[0], *groups):  # the first is asked twice: once to warm up
        for is_drafted in drawn.sample((True, False), 2):
            taken, stats = seconds_of_steps(model, group, num_new, is_drafted)
            seconds[is_drafted].append(taken)
            if is_drafted:
                path, passes, accepted = stats.path, passes + stats.num_passes, accepted + stats.num_accepted_tokens
    drafted, plain = seconds[True][1:], seconds[False][1:]
    tokens = len(prompts) * (num_new - 1)
    return {
        "row": row,
        "drafted_per_s": tokens / sum(drafted),
        "plain_per_s": tokens / sum(plain),
        "ratio": sum(plain) / sum(drafted),
        "ratios": [round(before / after, 2) for before, after in zip(plain, drafted, strict=True)],
        "accepted_length": accepted / passes,
        "path": path,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen rows; returns 1 if one is slower with drafts."""
    command = Command("cpu", __doc__, ROWS)
    command.add_argument(
        "--prompts", type=whole_from(1), default=4, help="prompts, or groups of sequences (default: 4)"
    )
    command.add_argument("--new", type=whole_from(2), default=32, help="tokens of an answer (default: 32)")
    args = command.parse_args(arguments)
    rows = command.chosen(args)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(torch.device("cpu")), "new": args.new, "rows": []}
    for row in rows:
        result["rows"].append(measure(row, args.prompts, args.new))
        show(result["rows"][-1])
        write(result, args.out)
    return int(any(row["ratio"] < 1 for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
