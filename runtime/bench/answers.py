"""How many tokens a second do whole calls give, with the built-in target and head?

    python -m eagle_slim.runtime.bench.answers [--sizes full,16384,4096] [--new 128] [--draft-weights auto,fp8]
        [--out answers.json]

Every prompt of ``examples/prompts.jsonl`` is a call of its own (batch 1, greedy), after one to warm up; sizes and plain
decoding take turns, and each row is the median over rounds of all prompts together. Beside tokens/s of whole calls:
tokens/s without the prompts' forwards, the time to the first token, and answers that equal plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comparison.prompt_file import load_prompts
from ..model import SpeculativeModel
from .timing import commit, machine, synchronize

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
Prompts = Sequence[list[int]]


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first_s = 0.0
        self._calls = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt, then new tokens."""
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter() - self.start

    def end(self) -> None:
        """Nothing more comes."""


def answer_all(
    model: SpeculativeModel, prompts: Prompts, options: Mapping[str, Any], time_phases: bool = False
) -> dict[str, Any]:
    """Answer every prompt in a call of its own: figures of all of them together.

    ``time_phases`` adds ``draft_ms`` and ``verify_ms`` (to the commit) of a step.
    """
    outputs, first = [], []
    synchronize(model.device)
    start = time.perf_counter()
    for prompt in prompts:
        streamer = FirstToken()
        outputs.append(model.generate(prompt, streamer=streamer, time_phases=time_phases, **options))
        first.append(streamer.first_s)
    whole_s = time.perf_counter() - start
    stats = [output.stats for output in outputs]
    tokens = sum(each.num_new_tokens for each in stats)
    steps = [step for each in stats for step in each.steps]
    phases = {
        "draft_ms": statistics.median(step.draft_s for step in steps) * 1e3,
        "verify_ms": statistics.median(step.verify_s for step in steps) * 1e3,
    }  # fmt: skip
    return {
        **(phases if time_phases else {}),
        "tokens_per_s": tokens / whole_s,
        "decode_tokens_per_s": (tokens - len(prompts)) / sum(each.decode_s for each in stats),
        "first_token_ms": statistics.median(first) * 1e3,
        "accepted_length": sum(each.num_accepted_tokens for each in stats) / max(1, sum(e.num_passes for e in stats)),
        "passes": sum(each.num_passes for each in stats),
        "path": stats[0].path,
        "token_ids": [output.token_ids[0] for output in outputs],
    }


def call_transformers(model: nn.Module, ids: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, float, float]:
    """Continue ``ids`` int64 [batch, seq] greedily with transformers' ``generate``.

    Returns the new tokens [batch, new], the seconds to the first one, and the seconds of all the others.
    """
    streamer = FirstToken()
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=streamer, **options
    )
    synchronize(ids.device)
    return output[:, ids.shape[1] :], streamer.first_s, time.perf_counter() - streamer.start - streamer.first_s


def answer_by_transformers(model: SpeculativeModel, prompts: Prompts, options: Mapping[str, Any]) -> dict[str, Any]:
    """The same with transformers' own ``generate``, greedy."""
    synchronize(model.device)
    start = time.perf_counter()
    calls = [
        call_transformers(model.target.model, torch.tensor([ids], device=model.device), options) for ids in prompts
    ]
    whole_s = time.perf_counter() - start
    answers = [new[0].tolist() for new, _, _ in calls]
    tokens = sum(map(len, answers))
    return {
        "tokens_per_s": tokens / whole_s,
        "decode_tokens_per_s": (tokens - len(prompts)) / sum(decode_s for _, _, decode_s in calls),
        "first_token_ms": statistics.median(first_s for _, first_s, _ in calls) * 1e3,
        "accepted_length": 1.0,
        "passes": tokens - len(prompts),
        "path": "transformers' generate",
        "token_ids": answers,
    }


def measure(
    model: SpeculativeModel,
    prompts: Prompts,
    sizes: Sequence[str],
    new_tokens: int,
    rounds: int,
    is_sampled: bool = False,
    transformers_tokens: int = 0,
    has_phases: bool = True,
) -> list[dict[str, Any]]:
    """Let plain decoding, drafting over each of ``sizes`` ("full" or a number) and others take turns.

    ``is_sampled``: each size sampled, too. ``transformers_tokens``: new tokens of transformers' ``generate`` for each
    of the first four prompts, as it is slow; 0 leaves it out. One row a variant: medians over ``rounds``, milliseconds
    of each phase in a call phase by phase (``has_phases``), answers that equal plain decoding's as far as they go;
    ``draft_vocab`` a number of rows, "plain" or "transformers".
    """
    options: dict[str, Any] = {"max_new_tokens": new_tokens}
    sampled = options | {"temperature": 0.7, "top_p": 0.9, "seed": 1}
    variants: dict[tuple[int | str, bool], Callable[..., dict[str, Any]]] = {}
    if transformers_tokens:
        few = {"max_new_tokens": transformers_tokens}
        variants["transformers", False] = lambda asked: answer_by_transformers(model, asked[:4], few)
    variants["plain", False] = partial(answer_all, model, options=options | {"speculative": False})
    for size in sizes:
        sized = model if size == "full" else model.with_draft_vocab(int(size))
        variants[sized.draft_vocab, False] = partial(answer_all, sized, options=options)
        if is_sampled:
            variants[sized.draft_vocab, True] = partial(answer_all, sized, options=sampled)
    found: dict[tuple[int | str, bool], list[dict[str, Any]]] = {key: [] for key in variants}
    warm_up_s = {}
    for number in range(rounds + 1):
        for key, answer in variants.items():
            start = time.perf_counter()
            row = answer(prompts[:1] if number == 0 else prompts)
            if number:
                found[key].append(row)
            else:
                warm_up_s[key] = time.perf_counter() - start
    phases = {
        key: answer(prompts[:4], time_phases=True)
        for key, answer in variants.items()
        if key[0] != "transformers" and has_phases
    }
    plain = found["plain", False][0]["token_ids"]
    rows = []
    for key, answers in found.items():
        row = {"draft_vocab": key[0], "sampled": key[1], "warm_up_s": warm_up_s[key]}
        for name in ("tokens_per_s", "decode_tokens_per_s", "first_token_ms", "accepted_length", "passes"):
            row[name] = statistics.median(each[name] for each in answers)
        mine = answers[0]["token_ids"]
        equal = sum(answer == theirs[: len(answer)] for answer, theirs in zip(mine, plain, strict=False))
        row["equal_answers"] = f"{equal}/{len(mine)}"
        row |= {name: phases[key][name] for name in ("draft_ms", "verify_ms") if key in phases}
        row["path"] = answers[0]["path"]
        rows.append(row)
        print({name: round(x, 2) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
    return rows


def load_model(prompts: Path, limit: int | None, **options: Any) -> tuple[SpeculativeModel, list[list[int]]]:
    """Load the built-in target and head in bfloat16 on the GPU, and the first turns of a file of prompts."""
    model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device="cuda", **options)
    return model, [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(prompts, limit=limit)]


def main() -> None:
    """Measure, print a line for each row, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--sizes", default="full,16384,4096")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-phases", action="store_true", help="leave out the milliseconds of each phase")
    parser.add_argument("--draft-weights", default="auto", help="types of the drafter's weights, one after the other")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for draft_weights in arguments.draft_weights.split(","):
        model, prompts = load_model(arguments.prompts, arguments.limit, draft_weights=draft_weights)
        sizes = arguments.sizes.split(",")
        measured = measure(
            model, prompts, sizes, arguments.new, arguments.rounds, is_sampled=True, has_phases=not arguments.no_phases
        )
        rows += [{"draft_weights": model.draft_weights, **row} for row in measured]
    if arguments.out:
        report = {
            "machine": machine(torch.device("cuda")),
            "commit": commit(),
            "new_tokens": arguments.new,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
