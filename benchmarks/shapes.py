"""Does choosing the tree of every step reach the best fixed one, and is it never slower than plain decoding?

    python -m benchmarks.shapes [--rows REGEX] [--rounds 3] [--out benchmarks/results/DATE-h100-shapes.json]

Variants of a row take turns: plain decoding, each fixed shape (`runtime.step.shapes`), and the choice by step, which
begins each round with nothing learned. Compiling is apart. Rows:

* ``first token``: seconds from loading the built-in model to its first and its second token, in a fresh process with
  an empty cache of compiled kernels, and in another one with that cache full;
* ``slots/N``: SmolLM2 and its head over 16,384 rows, N sequences at a time, all prompts of ``examples/*.jsonl``;
* ``sampled/N``: the same with temperature 0.7 and top-p 0.9;
* ``text/ROWS/CATEGORY``: the same, greedy, over ROWS rows, one sequence at a time, prompts of one category;
* ``drawn/DIMS/LAW/N``: random weights of DIMS, 32,000 rows, N sequences; a child of rank r at level l is accepted with
  chance q_l * 0.2 ** r, of q = 0.75, 0.65, 0.6, 0.6, ... (falling), 0.3 or 0.1 at every level. All variants take the
  same draws, so that ``--rounds 1 --steps 150`` will do.

All rows but the first have tokens/s of every variant, as medians over rounds, and the choice over plain and over the
best of the rest. Exit status 1 where it is under 0.98 of plain decoding, or under 0.97 of the best.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.prompts import Prompt, load_prompts
from eagle_slim.runtime.drafter.tuning.timing import synchronize
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.shapes import LARGE, SHAPES, Acceptance, Costs, ShapeChooser, first_shape, shapes_for

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.decoding import RandomModel, compile_ahead, fill, run_steps
from benchmarks.shared.drawn_verdicts import draw_ranks
from benchmarks.shared.timing import machine

EXAMPLES = Path(__file__).parents[1] / "examples"
LAWS: Mapping[str, Callable[[int], float]] = {
    "falling": lambda level: (0.75, 0.65)[level] if level < 2 else 0.6,
    "0.3": lambda _: 0.3,
    "0.1": lambda _: 0.1,
}
SAMPLED: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
ROWS, PREFIX, CAPACITY = 32000, 512, 16384
TREES = tuple(shape for shape in SHAPES if shape is not None)
LEAST_OF_PLAIN, LEAST_OF_BEST = 0.98, 0.97


def name_of(shape: TreeConfig | None) -> str:
    """Short name of a variant."""
    return "plain" if shape is None else f"{shape.depth},{shape.top_k},{shape.total_tokens}"


def first_tokens(device: torch.device) -> list[float]:
    """Load the built-in model and ask it: seconds to the first and to the second token."""
    started, tokens_s = time.perf_counter(), list[float]()

    def note(*_: object) -> bool:
        tokens_s.append(time.perf_counter() - started)
        return False

    model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device=device)
    model.generate(model.encode_chat("Why is the sky blue?"), stopping_criteria=[note], max_new_tokens=8)
    return tokens_s[:2]


def measure_first_tokens(device: torch.device) -> dict[str, Any]:
    """Run `first_tokens` in fresh processes: the first finds no compiled kernels, the second those of the first."""
    row: dict[str, Any] = {"row": "first token", "is_good": True}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        for cache in ("empty", "full"):
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                row[f"{cache}_cache_s"] = fresh.submit(first_tokens, device).result()
    return row


def all_rows() -> list[str]:
    """List the names of all rows."""
    whole = [f"{kind}/{count}" for kind in ("slots", "sampled") for count in (1, 4, 16)]
    categories = dict.fromkeys(prompt.category for prompt in read_prompts())
    text = [f"text/{rows}/{category}" for rows in ("full", 4096, 512) for category in categories]
    drawn = [
        f"drawn/{dims}/{law}/{count}"
        for dims in ("llama-3.1-8b", "smollm2-135m") for law in LAWS for count in (1, 4, 16)
    ]  # fmt: skip
    return ["first token", *whole, *text, *drawn]


def read_prompts() -> list[Prompt]:
    """Read all prompts of the examples."""
    return [prompt for path in sorted(EXAMPLES.glob("*.jsonl")) for prompt in load_prompts(path)]


def measure_text(
    base: SpeculativeModel, category: str | None, slots: int, new_tokens: int, rounds: int, rules: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Answer the prompts of a category, or all, with every variant in turn: tokens/s by round."""
    asked = [base.encode_chat(each.turns[0]) for each in read_prompts() if category in (None, each.category)]
    fixed = {name_of(tree): base.with_tree(tree) for tree in TREES}
    calls = [asked] if slots > 1 else [[prompt] for prompt in asked]
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "max_slots": slots, **rules}

    def tokens_per_s(model: SpeculativeModel, speculative: bool) -> float:
        synchronize(base.device)
        started = time.perf_counter()
        outputs = [model.generate(call, speculative=speculative, **options) for call in calls]
        return sum(output.stats.num_new_tokens for output in outputs) / (time.perf_counter() - started)

    def choosing() -> float:
        # Nothing learned, and everything compiled.
        model = base.with_draft_vocab(base.draft_vocab)
        model.warmup(slots, 1024, max_slots=slots, **rules)
        found = tokens_per_s(model, True)
        print(model.generate(calls[0], **options).stats.path, flush=True)
        return found

    variants: dict[str, Callable[[], float]] = {"plain": partial(tokens_per_s, fixed[name_of(TREES[0])], False)}
    variants |= {name: partial(tokens_per_s, model, True) for name, model in fixed.items()}
    for run in variants.values():
        run()
    return _in_turn(variants | {"chosen": choosing}, rounds)


@torch.inference_mode()
def measure_drawn(model: RandomModel, law: str, slots: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Run steps of ``slots`` sequences whose acceptance is drawn, with every variant in turn: tokens/s by round."""
    decoder = model.drawn_decoder(model.new_cache(slots, CAPACITY), LARGE, ROWS, draw_ranks(LAWS[law]))

    def run(shapes: Sequence[TreeConfig | None], count: int) -> float:
        fill(decoder, slots, PREFIX)
        chooser = ShapeChooser(Acceptance(), Costs(model.weight_bytes, model.kv_bytes(1)), shapes)
        found = run_steps(decoder, slots, count, chooser, PREFIX)
        if len(shapes) > 1:
            print({name_of(shape): number for shape, number in chooser.steps.items()}, flush=True)
        return found.tokens / (found.step_ms * count) * 1e3

    shapes = shapes_for(slots, SHAPES)
    for shape in shapes:
        run([shape], 2)
    first = first_shape(slots, shapes)
    variants = {name_of(shape): partial(run, [shape], steps) for shape in shapes}
    variants["chosen"] = partial(run, [first, *(shape for shape in shapes if shape != first)], steps)
    return _in_turn(variants, rounds)


def _in_turn(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            found[name].append(run())
    return found


def judged(name: str, found: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return a row: medians, and the choice by step over plain decoding and over the best of the rest."""
    medians = {variant: statistics.median(values) for variant, values in found.items()}
    best = max((variant for variant in medians if variant != "chosen"), key=medians.__getitem__)
    row: dict[str, Any] = {"row": name, "tokens_per_s": medians, "best": best}
    row["over_plain"], row["over_best"] = (medians["chosen"] / medians[other] for other in ("plain", best))
    row["is_good"] = row["over_plain"] >= LEAST_OF_PLAIN and row["over_best"] >= LEAST_OF_BEST
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("shapes", __doc__, all_rows())
    command.add_argument("--rounds", type=whole_from(1), default=3)
    command.add_argument("--new", type=whole_from(2), default=128, help="new tokens of a prompt")
    command.add_argument("--steps", type=whole_from(2), default=600, help="drawn steps of a run")
    args = command.parse_args(argv)
    names, device = command.chosen(args), command.gpu()
    result: dict[str, Any] = {"machine": machine(device), "new_tokens": args.new, "rounds": args.rounds, "rows": []}
    texts: dict[str, SpeculativeModel] = {}
    drawn: dict[str, RandomModel] = {}
    for name in names:
        kind, *rest = name.split("/")
        if kind == "first token":
            row = measure_first_tokens(device)
        elif kind == "drawn":
            dims, law, count = rest
            if dims not in drawn:
                drawn.clear()
                batches = {int(other.split("/")[-1]) for other in names if other.startswith(f"drawn/{dims}/")}
                # Shapes of one top_k share a kernel, that of the largest, which is the last of them.
                kernels = {(tree.top_k, batch): (tree, batch, ROWS) for batch in sorted(batches)
                           for tree in shapes_for(batch, TREES) if tree}  # fmt: skip
                compile_ahead(dims, kernels.values(), device)
                drawn[dims] = RandomModel(dims, device)
            row = judged(name, measure_drawn(drawn[dims], law, int(count), args.steps, args.rounds))
        else:
            rows, category = rest if kind == "text" else ("16384", None)
            if rows not in texts:
                vocab = None if rows == "full" else int(rows)
                texts[rows] = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device=device, draft_vocab=vocab)
            slots, rules = 1 if kind == "text" else int(rest[0]), SAMPLED if kind == "sampled" else {}
            row = judged(name, measure_text(texts[rows], category, slots, args.new, args.rounds, rules))
        result["rows"].append(row)
        show(row)
        write(result, args.out)
    sys.exit(0 if all(row["is_good"] for row in result["rows"]) else 1)


if __name__ == "__main__":
    main()
