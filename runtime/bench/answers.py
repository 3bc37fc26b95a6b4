"""How many tokens a second do whole calls give, with the built-in target and head?

    python -m eagle_slim.runtime.bench.answers [--sizes full,16384,4096] [--new 128] [--out answers.json]

Every prompt of ``examples/prompts.jsonl`` is a call of its own (batch 1, greedy), after one to warm up; sizes and plain
decoding take turns, and each row is the median over rounds of all prompts together. Beside tokens/s of whole calls:
tokens/s without the prompts' forwards, the time to the first token, and answers that equal plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ..comparison.prompt_file import load_prompts
from ..model import SpeculativeModel
from .timing import commit, machine


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first_s = 0.0
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then new tokens."""
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter() - self.start

    def end(self) -> None:
        """Nothing more comes."""


def answer_all(model: SpeculativeModel, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt in a call of its own: figures of all of them together."""
    outputs, first = [], []
    torch.cuda.synchronize()
    start = time.perf_counter()
    for prompt in prompts:
        streamer = FirstToken()
        outputs.append(model.generate(prompt, streamer=streamer, **options))
        first.append(streamer.first_s)
    whole_s = time.perf_counter() - start
    stats = [output.stats for output in outputs]
    tokens = sum(each.num_new_tokens for each in stats)
    return {
        "tokens_per_s": tokens / whole_s,
        "decode_tokens_per_s": (tokens - len(prompts)) / sum(each.decode_s for each in stats),
        "first_token_ms": statistics.median(first) * 1e3,
        "accepted_length": sum(each.num_accepted_tokens for each in stats) / max(1, sum(e.num_passes for e in stats)),
        "passes": sum(each.num_passes for each in stats),
        "path": stats[0].path,
        "token_ids": [output.token_ids[0] for output in outputs],
    }


def main() -> None:
    """Measure, print a line for each row, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[2] / "examples" / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--sizes", default="full,16384,4096")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device="cuda")
    prompts = [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(arguments.prompts, limit=arguments.limit)]
    options: dict[str, Any] = {"max_new_tokens": arguments.new}
    sampled = options | {"temperature": 0.7, "top_p": 0.9, "seed": 1}
    variants: dict[str, tuple[SpeculativeModel, dict[str, Any]]] = {"plain": (model, options | {"speculative": False})}
    for size in arguments.sizes.split(","):
        sized = model if size == "full" else model.with_draft_vocab(int(size))
        variants[size] = (sized, options)
        variants[f"{size}, sampled"] = (sized, sampled)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    warm_up_s = {}
    for number in range(arguments.rounds + 1):
        for name, (each, how) in variants.items():
            start = time.perf_counter()
            row = answer_all(each, prompts[:1] if number == 0 else prompts, how)
            if number:
                rounds[name].append(row)
            else:
                warm_up_s[name] = time.perf_counter() - start
    plain = rounds["plain"][0]["token_ids"]
    rows = []
    for name, found in rounds.items():
        row = {"draft_vocab": name, "warm_up_s": warm_up_s[name]}
        for key in ("tokens_per_s", "decode_tokens_per_s", "first_token_ms", "accepted_length", "passes"):
            row[key] = statistics.median(each[key] for each in found)
        row["equal_answers"] = f"{sum(a == b for a, b in zip(found[0]['token_ids'], plain, strict=True))}/{len(plain)}"
        row["path"] = found[0]["path"]
        rows.append(row)
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    if arguments.out:
        report = {
            "machine": machine(torch.device("cuda")),
            "commit": commit(),
            "new_tokens": arguments.new,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
