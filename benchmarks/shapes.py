"""Does choosing the tree of every step reach the best fixed one, and is it never slower than plain decoding?

    python -m benchmarks.shapes [--rows REGEX] [--seconds 420] [--out benchmarks/results/DATE-h100-shapes.json]

Before anything is timed, every row is made ready in a process of its own, all at once, which leaves its kernels in
Triton's cache. Then the variants of a row take turns: plain decoding, each fixed shape (`runtime.step.shapes`), and the
choice by step, which begins each round with nothing learned. Rows, those that tell most first:

* ``slots/N``: SmolLM2 and its head over 16,384 rows, N sequences at a time, all prompts;
* ``text/ROWS/CATEGORY``: the same over ROWS rows, one sequence at a time, the first prompts of one category;
* ``drawn/DIMS/LAW/N``: random weights of DIMS, 32,000 rows, N sequences; a child of rank r at level l is accepted with
  chance q_l * 0.2 ** r, of q = 0.75, 0.65, 0.6, 0.6, ... (falling), or the same at every level. All variants take the
  same draws. Of a mixture, whose router is uniform (`shared.routing`), these are plain decoding and the choice alone.
  Steps that only time a shape are not counted, but in ``timing_s`` of ``parts``;
* ``change/ROWS/BEFORE/AFTER``: ten prompts of one category right after ten of another, so that all that is known is of
  the other; one sequence at a time;
* ``mixed/N``: as ``slots/N``, prompts of mathematics and German side by side;
* ``unknown/N``: as ``slots/N`` on a GPU whose name no table has;
* ``sampled/N``: as ``slots/N`` with temperature 0.7 and top-p 0.9.

All rows have tokens/s of every variant, by round and as medians over rounds, and the choice over plain
and over the best of the rest; ``parts`` tells where the time of each round went (`parts_of`). Exit status 1 where the
choice is under 0.98 of plain decoding, or under 0.97 of the best, and where ``--seconds`` ended the run before all rows
were measured.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from eagle_slim.runtime import GenerationStats, SpeculativeModel
from eagle_slim.runtime.compare.prompts import Prompt, load_prompts
from eagle_slim.runtime.settings import MAX_WAITING, TreeConfig
from eagle_slim.runtime.step.shapes import (
    LARGE,
    OF_MIXTURES,
    SHAPES,
    Acceptance,
    Costs,
    ShapeChooser,
    first_shape,
    shapes_for,
    shapes_up_to,
)

from benchmarks.shared import decoding
from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.decoding import EXPERTS, RandomModel, fill, run_steps
from benchmarks.shared.drawn_verdicts import DrawnVerdicts, draw_ranks
from benchmarks.shared.routing import RoutedModel
from benchmarks.shared.timing import machine, synchronize

PROMPTS = (Path(__file__).with_name("prompts.jsonl"), Path(__file__).parents[1] / "examples" / "prompts.jsonl")
CHANGES = ("math/summaries", "chat/german", "german/code")
"""Categories before and after a change of text."""
CHANGE_PROMPTS = 10
LAWS: Mapping[str, Callable[[int], float]] = {
    "falling": lambda level: (0.75, 0.65)[level] if level < 2 else 0.6,
    "0.3": lambda _: 0.3,
    "0.1": lambda _: 0.1,
}
RATES = ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")
"""Acceptance at every level, of mixtures."""
SAMPLED: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
ROWS, PREFIX = 32000, 512
MAX_LENGTH = 1024
"""Most tokens of a prompt and its answer."""
COMPILED_LAYERS = 8
"""Layers of a random target that is only compiled."""
TREES = tuple(shape for shape in SHAPES if shape is not None)
Shapes: TypeAlias = Sequence["TreeConfig | None"]
LEAST_OF_PLAIN, LEAST_OF_BEST = 0.98, 0.97


def name_of(shape: TreeConfig | None) -> str:
    """Short name of a variant."""
    return "plain" if shape is None else f"{shape.depth},{shape.top_k},{shape.total_tokens}"


def all_rows() -> list[str]:
    """List the names of all rows, those first that tell most."""
    categories = sorted({prompt.category for prompt in read_prompts()}, key=lambda name: (name != "german", name))
    text = [f"text/{rows}/{category}" for category in categories for rows in ("full", 4096, 512)]
    drawn = [
        f"drawn/{dims}/{law}/{count}"
        for dims in ("llama-3.1-8b", "smollm2-135m")
        for count in (1, 4, 16)
        for law in LAWS
    ]
    slots = [f"{kind}/{count}" for kind in ("slots", "sampled") for count in (16, 4, 1)]
    change = [f"change/{rows}/{kinds}" for kinds in CHANGES for rows in ("full", 16384, 512)]
    mixtures = [f"drawn/{dims}/{law}/1" for dims in ("qwen3-30b-a3b",) for law in RATES]
    dense = [*slots[:3], *change, "mixed/16", *text[:3], *drawn[:9], *text[3:], "unknown/4", *slots[3:], *drawn[9:]]
    return [*dense, *mixtures]


@cache
def read_prompts() -> list[Prompt]:
    """Read all prompts."""
    return [prompt for path in PROMPTS for prompt in load_prompts(path)]


def prompts_of(*categories: str) -> list[Prompt]:
    """List the prompts of categories."""
    return [prompt for prompt in read_prompts() if prompt.category in categories]


class NotedChooser(ShapeChooser):
    """A chooser that notes the shape of every step, the times of steps by shape, and its own time on the host."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.host_s = 0.0
        self.order: list[TreeConfig | None] = []
        self.step_ms: defaultdict[TreeConfig | None, list[float]] = defaultdict(list)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.host_s += time.perf_counter() - started

    def next(self, *given: Any) -> TreeConfig | None:
        """Choose as `ShapeChooser.next`, noted."""
        with self._noted():
            self.order.append(super().next(*given))
        return self.order[-1]

    def see(self, shape: TreeConfig | None, verdicts: Mapping[int, Sequence[int]]) -> None:
        """Learn as `ShapeChooser.see`, noted."""
        with self._noted():
            super().see(shape, verdicts)

    def time(self, shape: TreeConfig | None, places: int, context: float, ms: float) -> None:
        """Learn as `ShapeChooser.time`, noted."""
        self.step_ms[shape].append(ms)
        with self._noted():
            super().time(shape, places, context, ms)


def parts_of(
    wall_s: float, stats: Iterable[GenerationStats], orders: Iterable[Sequence[TreeConfig | None]], chooser_s: float
) -> dict[str, Any]:
    """Split the time of calls, with the shapes of each one's steps.

    ``steps``: by shape the number of steps, their seconds on the GPU, and the median in milliseconds; the first step
    that drafts after plain ones stands apart, as the drafter takes their tokens before it. ``between_s``: the GPU
    waits for the host between steps; ``prompts_s``: all else, prompts above all. ``chooser_s`` of the host lies beside
    steps that run.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    between_s = 0.0
    for each, shapes in zip(stats, orders, strict=True):
        before: TreeConfig | None = TREES[0]
        for shape, times in zip(shapes, each.steps, strict=True):
            is_back = before is None and shape is not None
            found[name_of(shape) + (" after plain" if is_back else "")].append(times.draft_s + times.verify_s)
            between_s += times.host_s
            before = shape
    steps = {name: [len(values), sum(values), statistics.median(values) * 1e3] for name, values in found.items()}
    prompts_s = wall_s - between_s - sum(map(sum, found.values()))
    return {"wall_s": wall_s, "prompts_s": prompts_s, "between_s": between_s, "chooser_s": chooser_s, "steps": steps}


class TextVariants:
    """SmolLM2 with its head over ``rows`` rows, ``slots`` sequences at a time, ready in each of ``shapes``."""

    def __init__(self, rows: str, slots: int, rules: Mapping[str, Any], shapes: Shapes, device: torch.device) -> None:
        vocab = None if rows == "full" else int(rows)
        base = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device=device, draft_vocab=vocab)
        self.base, self.slots, self.rules = base, slots, rules
        self.parts: defaultdict[str, list[Any]] = defaultdict(list)
        """By variant: where the time of each round went (`parts_of`)."""
        self.fixed = {name_of(tree): base.with_tree(tree) for tree in shapes if tree is not None}
        for model in self.fixed.values():
            model.warmup(slots, MAX_LENGTH, max_slots=slots, **rules)
        if None in shapes:
            base.warmup(slots, MAX_LENGTH, max_slots=slots, speculative=False, **rules)

    @cached_property
    def _fresh(self) -> tuple[Acceptance, Costs]:
        """Acceptance and costs with everything ready to choose from, and nothing learned."""
        known = self.base._decoders
        self.base.warmup(self.slots, MAX_LENGTH, max_slots=self.slots, **self.rules)
        return deepcopy((known.acceptance, known.costs))

    def measure(
        self,
        prompts: Sequence[Prompt],
        new_tokens: int,
        rounds: int,
        seconds: float,
        before: Sequence[Prompt] = (),
    ) -> dict[str, list[float]]:
        """Answer prompts with every variant in turn: tokens/s by round. The choice has learned from ``before``."""
        known, fresh = self.base._decoders, self._fresh
        asked = [self.base.encode_chat(each.turns[0]) for each in prompts]
        calls = [asked] if self.slots > 1 else [[prompt] for prompt in asked]
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "max_slots": self.slots, **self.rules}
        choosers: list[NotedChooser] = []

        def noted(shapes: Shapes) -> NotedChooser:
            choosers.append(NotedChooser(known.acceptance, known.costs, shapes))
            return choosers[-1]

        def tokens_per_s(name: str, model: SpeculativeModel, calls: Sequence[Any]) -> float:
            choosers.clear()
            synchronize(self.base.device)
            started = time.perf_counter()
            stats = [model.generate(call, speculative=name != "plain", **options).stats for call in calls]
            wall_s = time.perf_counter() - started
            tree = None if name == "plain" else model.drafter.tree
            orders = [chooser.order for chooser in choosers] or [[tree] * len(each.steps) for each in stats]
            # A step that was chosen for sequences that had ended meanwhile did not run.
            orders = [order[: len(each.steps)] for order, each in zip(orders, stats, strict=True)]
            chooser_s = sum(chooser.host_s for chooser in choosers)
            self.parts[name].append(parts_of(wall_s, stats, orders, chooser_s))
            return sum(each.num_new_tokens for each in stats) / wall_s

        def choosing(calls: Sequence[Any]) -> float:
            known.acceptance, known.costs = deepcopy(fresh)
            for each in before:
                self.base.generate(self.base.encode_chat(each.turns[0]), **options)
            return tokens_per_s("chosen", self.base, calls)

        variants: dict[str, Callable[[Sequence[Any]], float]] = {"plain": partial(tokens_per_s, "plain", self.base)}
        variants |= {name: partial(tokens_per_s, name, model) for name, model in self.fixed.items()}
        variants["chosen"] = choosing
        with mock.patch.object(known, "new_chooser", noted):
            for run in variants.values():
                # The first call of a model allocates, and each graph is uploaded when it is first launched.
                run(calls[:2])
            self.parts.clear()
            # So that no collection of all that was loaded falls into a round.
            gc.collect()
            gc.freeze()
            found = _in_turn({name: partial(run, calls) for name, run in variants.items()}, rounds, seconds)
            gc.unfreeze()
        return found


class DrawnVariants:
    """Random weights with ``slots`` sequences whose acceptance is drawn, ready in each of ``shapes``."""

    @torch.inference_mode()
    def __init__(self, model: RandomModel, slots: int, shapes: Shapes, steps: int) -> None:
        self.model, self.slots, self.shapes, self.steps = model, slots, shapes, steps
        self.parts: defaultdict[str, list[Any]] = defaultdict(list)
        """Of the choice: its time on the host, and by shape the steps of each round and their median time."""
        cache = model.new_cache(slots, PREFIX + (steps + MAX_WAITING) * LARGE.path_width + LARGE.total_tokens)
        self.decoder = model.drawn_decoder(cache, LARGE, ROWS, draw_ranks(LAWS["0.1"]))
        for shape in shapes:
            # So many plain steps that the drafter takes their tokens.
            self.run([shape], MAX_WAITING + 2 if shape is None else 2)

    @torch.inference_mode()
    def run(self, shapes: Sequence[TreeConfig | None], steps: int) -> float:
        """Run steps that choose among some shapes, with nothing learned: tokens/s."""
        fill(self.decoder, self.slots, PREFIX)
        costs = Costs(self.model.weight_bytes, self.model.kv_bytes(1), self.model.target.is_mixture)
        chooser = NotedChooser(Acceptance(), costs, shapes)
        found = run_steps(self.decoder, self.slots, steps, chooser, PREFIX)
        if len(shapes) > 1:
            ran = {
                name_of(shape): [number, statistics.median(chooser.step_ms[shape] or [0.0])]
                for shape, number in chooser.steps.items()
            }
            self.parts["chosen"].append({"chooser_s": chooser.host_s, "timing_s": found.timing_s, "steps": ran})
        return found.tokens / (found.step_ms * steps) * 1e3

    @torch.inference_mode()
    def measure(self, law: str, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Run steps with every variant in turn: tokens/s by round."""
        self.parts.clear()
        assert isinstance(self.decoder.steps.revise, DrawnVerdicts)
        self.decoder.steps.revise.drawn.copy_(draw_ranks(LAWS.get(law, lambda _: float(law))))
        is_mixture = self.model.target.is_mixture
        first = first_shape(self.slots, self.shapes, is_mixture)
        fixed = (None,) if is_mixture else self.shapes
        variants = {name_of(shape): partial(self.run, [shape], self.steps) for shape in fixed}
        every = [first, *(shape for shape in self.shapes if shape != first)]
        return _in_turn(variants | {"chosen": partial(self.run, every, self.steps)}, rounds, seconds)


def _in_turn(variants: Mapping[str, Callable[[], float]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Run all variants in turn, for ``rounds`` rounds or until ``seconds`` have passed, but for one round at least."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    started = time.perf_counter()
    for done in range(rounds):
        # Another round takes as long as one did.
        if (time.perf_counter() - started) * (done + 1) > seconds * max(1, done):
            break
        for name, run in variants.items():
            found[name].append(run())
    return found


def variants_of(kind: str, shapes: Shapes, steps: int, device: torch.device) -> TextVariants | DrawnVariants:
    """Build the variants of rows of a ``kind`` (`kind_of`), ready in each of ``shapes``."""
    name, *rest = kind.split("/")
    if name == "drawn":
        return DrawnVariants(random_model(rest[0], device), int(rest[1]), shapes, steps)
    if name == "text":
        return TextVariants(rest[0], 1, {}, shapes, device)
    return TextVariants("16384", int(rest[0]), SAMPLED if name == "sampled" else {}, shapes, device)


@cache
def kept_variants_of(kind: str, steps: int, device: torch.device) -> TextVariants | DrawnVariants:
    """Return the variants of a kind's rows, ready in every shape."""
    return variants_of(kind, shapes_of(kind), steps, device)


@cache
def random_model(dims: str, device: torch.device) -> RandomModel:
    """Build the random weights of ``dims``; a mixture's router is uniform."""
    if dims not in EXPERTS:
        return RandomModel(dims, device)
    model = RoutedModel(dims, device)
    model.follow("uniform", 1)
    return model


def shapes_of(kind: str) -> list[TreeConfig | None]:
    """List the shapes that steps of a kind of rows choose among."""
    is_mixture = kind.startswith("drawn") and kind.split("/")[1] in EXPERTS
    return shapes_for(slots_of(kind), shapes_up_to(LARGE, OF_MIXTURES) if is_mixture else SHAPES)


def slots_of(kind: str) -> int:
    """Sequences at a time of a kind of rows."""
    return 1 if kind.startswith("text") else int(kind.rpartition("/")[2])


def kind_of(row: str) -> str:
    """Name what a row shares with others: the same models, ready for as many sequences."""
    name, *rest = row.split("/")
    if name == "drawn":
        return f"drawn/{rest[0]}/{rest[2]}"
    if name == "mixed":
        return f"slots/{rest[0]}"
    return f"text/{rest[0]}" if name in ("text", "change") else row


def measure(row: str, device: torch.device, steps: int, new_tokens: int, most: int, rounds: int, seconds: float) -> Any:
    """Measure a row; ``most``: prompts of a category."""
    name, *rest = row.split("/")
    if name == "unknown":
        # The name is kept in many places of this process.
        with ProcessPoolExecutor(1, get_context("spawn"), hide_name) as fresh:
            slots = f"slots/{rest[0]}"
            found = fresh.submit(measure, slots, device, steps, new_tokens, most, rounds, seconds).result()
            return found | {"row": row}
    variants = kept_variants_of(kind_of(row), steps, device)
    if isinstance(variants, DrawnVariants):
        return judged(row, variants.measure(rest[1], rounds, seconds), variants.parts)
    prompts, before = read_prompts(), list[Prompt]()
    if name == "text":
        prompts = prompts_of(rest[1])[:most]
    elif name == "change":
        before, prompts = (prompts_of(category)[:CHANGE_PROMPTS] for category in rest[1:])
    elif name == "mixed":
        prompts = prompts_of("math", "german")
    return judged(row, variants.measure(prompts, new_tokens, rounds, seconds, before), variants.parts)


class Renamed:
    """Properties of a GPU with a name that no table has."""

    name = "a GPU that no table has"

    def __init__(self, properties: Any) -> None:
        self._properties = properties

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


def hide_name() -> None:
    """Rename this process's GPU."""
    cuda: Any = torch.cuda
    known = cuda.get_device_properties
    cuda.get_device_properties = lambda device=None: Renamed(known(device))


def make_ready(kind: str, shapes: Shapes, device: torch.device) -> None:
    """Compile the kernels of a ``kind`` of rows in some shapes, in a process of its own."""
    decoding.LAYERS = dict.fromkeys(decoding.LAYERS, COMPILED_LAYERS)
    variants_of(kind.replace("unknown", "slots"), shapes, 2, device)
    # The next kind's process may need the memory.
    random_model.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()


def make_all_ready(rows: Sequence[str], device: torch.device) -> None:
    """Compile all kernels of these rows, side by side in as many processes as there are cores."""
    started, kinds = time.perf_counter(), [kind for kind in dict.fromkeys(map(kind_of, rows)) if "/" in kind]
    spawn, most = get_context("spawn"), max(1, (os.cpu_count() or 2) - 5)
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        ProcessPoolExecutor(most, spawn) as workers,
        # Each takes 9 GB of the GPU at 8B's dimensions.
        ProcessPoolExecutor(5, spawn) as random,
        ProcessPoolExecutor(2, spawn, hide_name) as renamed,
    ):
        jobs, pools = {}, {"drawn": random, "unknown": renamed}
        for kind in kinds:
            alike = defaultdict(list)
            for shape in shapes_of(kind):
                alike[1 if shape is None else shape.top_k].append(shape)
            for top_k, shapes in alike.items():
                pool = pools.get(kind.partition("/")[0], workers)
                jobs[f"{kind}, top_k {top_k}"] = pool.submit(make_ready, kind, shapes, device)
        for name, job in jobs.items():
            print(f"{name}: {job.exception() or 'ready'} after {time.perf_counter() - started:.0f} s", flush=True)


def judged(name: str, found: Mapping[str, list[float]], parts: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return a row: medians, and the choice by step over plain decoding and over the best of the rest."""
    medians = {variant: statistics.median(values) for variant, values in found.items()}
    best = max((variant for variant in medians if variant != "chosen"), key=medians.__getitem__)
    row: dict[str, Any] = {"row": name, "tokens_per_s": medians, "best": best}
    row["over_plain"], row["over_best"] = (medians["chosen"] / medians[other] for other in ("plain", best))
    row["wanted"] = {"over_plain": LEAST_OF_PLAIN, "over_best": LEAST_OF_BEST}
    row["is_good"] = row["over_plain"] >= LEAST_OF_PLAIN and row["over_best"] >= LEAST_OF_BEST
    # The lists go on to be filled by the next row.
    return row | {"rounds": dict(found), "parts": {variant: [*each] for variant, each in parts.items()}}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    started = time.perf_counter()
    command = Command("shapes", __doc__, all_rows())
    command.add_argument("--rounds", type=whole_from(1), default=3, help="most rounds of a row")
    command.add_argument("--row-seconds", type=whole_from(1), default=24, help="begin no round that would take longer")
    command.add_argument("--seconds", type=whole_from(1), default=3600, help="begin no row later")
    command.add_argument("--new", type=whole_from(2), default=128, help="new tokens of a prompt")
    command.add_argument("--prompts", type=whole_from(1), default=8, help="most prompts of a category")
    command.add_argument("--steps", type=whole_from(2), default=300, help="drawn steps of a run")
    args = command.parse_args(argv)
    names, device = command.chosen(args), command.gpu()
    options = {name: getattr(args, name) for name in ("new", "prompts", "steps", "rounds", "row_seconds", "seconds")}
    result: dict[str, Any] = {"machine": machine(device), **options, "rows": []}
    make_all_ready(names, device)
    for name in names:
        if time.perf_counter() - started > args.seconds:
            break
        row = measure(name, device, args.steps, args.new, args.prompts, args.rounds, args.row_seconds)
        result["rows"].append(row | {"at_s": time.perf_counter() - started})
        show({key: value for key, value in result["rows"][-1].items() if key != "parts"})
        write(result, args.out)
    sys.exit(0 if len(result["rows"]) == len(names) and all(row["is_good"] for row in result["rows"]) else 1)


if __name__ == "__main__":
    main()
