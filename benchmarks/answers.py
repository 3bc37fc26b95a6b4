"""How many tokens a second do whole calls give, with the built-in target and head?

    python -m benchmarks.answers [--sizes full,16384,4096] [--new 128] [--out benchmarks/results/DATE-h200-answers.json]
    python -m benchmarks.answers --draft-weights auto,fp8
    python -m benchmarks.answers --sizes full,32000,16000,8192 --limit 24 --nodes 60

Every prompt of ``examples/prompts.jsonl`` is a call of its own (batch 1), after one to warm up; plain decoding and
drafting over each size, greedy and sampled, take turns. Each row is the median over rounds of all prompts together:
tokens/s of whole calls and without the prompts' forwards, a step by the latter, the time to the first token, and
answers that equal plain decoding's of the same seed. What drafting and verifying take, `eagle-compare` and
``benchmarks.step`` tell.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.api.stats import GenerationStats
from eagle_slim.runtime.compare.prompts import load_prompts
from eagle_slim.runtime.drafter.tuning.timing import synchronize
from torch import Tensor

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.timing import machine

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.jsonl"
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
Prompts = Sequence[list[int]]


class FirstToken:
    """A streamer that notes the seconds from its making to the prompt and to each new token."""

    def __init__(self) -> None:
        self.start, self.calls_s = time.perf_counter(), list[float]()

    def put(self, value: Tensor) -> None:  # noqa: D102
        self.calls_s.append(time.perf_counter() - self.start)

    def end(self) -> None: ...  # noqa: D102


def answer_all(model: SpeculativeModel, prompts: Prompts, **options: Any) -> dict[str, Any]:
    """Answer every prompt in a call of its own: figures of all of them together."""
    outputs, first_s = [], []
    synchronize(model.device)
    start = time.perf_counter()
    for prompt in prompts:
        streamer = FirstToken()
        outputs.append(model.generate(prompt, streamer=streamer, **options))
        first_s.append(streamer.calls_s[1])
    whole_s = time.perf_counter() - start
    stats = GenerationStats.sum(output.stats for output in outputs)
    return {
        "tokens_per_s": stats.num_new_tokens / whole_s,
        "decode_tokens_per_s": (stats.num_new_tokens - len(prompts)) / stats.step_s,
        "first_token_ms": statistics.median(first_s) * 1e3, "accepted_length": stats.mean_accepted_length,
        "path": outputs[0].stats.path, "token_ids": [output.token_ids[0] for output in outputs],
    }  # fmt: skip


def measure(
    model: SpeculativeModel, prompts: Prompts, sizes: Sequence[str], new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Let all variants take turns, and return a row for each.

    ``sizes``: "full" or numbers. ``draft_vocab`` of a row is a number of rows, or "plain".
    """
    plain = partial(answer_all, model, speculative=False, max_new_tokens=new_tokens)
    answering: dict[int | str, partial[dict[str, Any]]] = {"plain": plain}
    for size in sizes:
        sized = model if size == "full" else model.with_draft_vocab(int(size))
        answering[sized.draft_vocab] = partial(answer_all, sized, max_new_tokens=new_tokens)
    variants = {
        (name, sampled): partial(answer, **(SAMPLED if sampled else {}))
        for name, answer in answering.items() for sampled in (False, True)
    }  # fmt: skip
    for answer in variants.values():
        answer(prompts=prompts[:1])
    found = [{key: answer(prompts=prompts) for key, answer in variants.items()} for _ in range(rounds)]
    rows = []
    for key in variants:
        row = {"draft_vocab": key[0], "sampled": key[1], "path": found[0][key]["path"]}
        for name in ("tokens_per_s", "decode_tokens_per_s", "first_token_ms", "accepted_length"):
            row[name] = statistics.median(turn[key][name] for turn in found)
        row["step_ms"] = 1e3 * row["accepted_length"] / row["decode_tokens_per_s"]
        equal = sum(map(operator.eq, found[0][key]["token_ids"], found[0]["plain", key[1]]["token_ids"]))
        rows.append(row | {"equal_answers": f"{equal}/{len(prompts)}"})
        show(rows[-1])
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("answers", __doc__)
    command.add_argument("--prompts", type=Path, default=PROMPTS)
    command.add_argument("--limit", type=whole_from(1), default=12)
    command.add_argument("--sizes", default="full,16384,4096")
    command.add_argument("--new", type=whole_from(2), default=128, help="new tokens a prompt")
    command.add_argument("--rounds", type=whole_from(1), default=3)
    command.add_argument("--draft-weights", default="auto", help="types of the drafter's weights, one after the other")
    command.add_argument("--nodes", type=whole_from(2), help="of a tree; default: as a call chooses by itself")
    args = command.parse_args(argv)
    device = command.gpu()
    result: dict[str, Any] = {"machine": machine(device), "new_tokens": args.new, "rows": []}
    for draft_weights in args.draft_weights.split(","):
        model = SpeculativeModel.from_pretrained(
            dtype=torch.bfloat16, device=device, total_tokens=args.nodes, draft_weights=draft_weights
        )
        prompts = [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(args.prompts, limit=args.limit)]
        rows = measure(model, prompts, args.sizes.split(","), args.new, args.rounds)
        result["rows"] += [{"draft_weights": model.draft_weights, **row} for row in rows]
        write(result, args.out)


if __name__ == "__main__":
    main()
