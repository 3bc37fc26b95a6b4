"""Compare every answer with plain decoding, bit for bit, whatever drafts it and whatever runs beside it.

    python -m benchmarks.exact [--tokens 200000] [--seconds 600] [--out benchmarks/results/DATE-h200-exact.json]
    python -m benchmarks.exact --changing --dims qwen2.5-0.5b --target-weights fp8
    python -m benchmarks.exact --windows 0 64 1024 [--out benchmarks/results/DATE-h200-windows.json]
    python -m benchmarks.exact --seed 0 --episode 17     # one episode again, as a difference names it
    python -m benchmarks.exact --quality [--out benchmarks/results/DATE-h200-quality.json]

The built-in target and head, or a random Qwen2 or mixture of experts whose next tokens its head often guesses
(`decoding.guessable_model`). An episode is a tree (5 to 128 nodes, a chain, one of a random shape, another at every
step, or none: plain decoding of several sequences) over a draft vocabulary, with a cache of its own that its calls let
grow: one sequence, several, 16, and more than there are slots, so that slots are taken over and ever fewer are active;
then the next turn of one of these, after rows that a slot still holds. Questions are chats, and real text and random
ids that end at multiples of 64, 256 and 512 or one beside; greedy and sampled, each with its seed; with and without an
end. Every answer is compared with plain decoding of that question alone; a question is decoded so once, and asked in
many episodes. One call in four follows a call that was broken off: its streamer raised an error, or KeyboardInterrupt
as Ctrl-C does. An episode depends on ``--seed`` and its number only; each seed begins five variants further, so that
several short runs go through all of them.

``--quality``: KL divergence from a float32 forward over real text (`shared.quality`), ours beside transformers' own.
``--target-weights fp8``: of the target in FP8; its divergence is from float32 of what was quantised.
Exit status 1 where a token differs, nothing was compared, or the divergence is more than 2% above transformers'.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.api.output import first_difference
from eagle_slim.runtime.compare.prompts import load_prompts
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.shapes import LARGE, Acceptance, Costs, ShapeChooser

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.decoding import EXPERTS, guessable_model
from benchmarks.shared.quality import TOLERANCE, measure_quality
from benchmarks.shared.timing import machine

ROOT = Path(__file__).parents[1]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop strings": {"ignore_eos": True, "stop": ["\n\n\n", " because"]},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 40, "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.1, "min_new_tokens": 20, "suppress_tokens": [198]},
}
TREES = (
    TreeConfig(5, 10, 60),
    TreeConfig(5, 10, 16),
    TreeConfig(5, 1, 6),
    TreeConfig(3, 10, 5),
    TreeConfig(7, 10, 128),
)
NEW = 192
"""Most new tokens of an answer."""
SHORT = 700
"""Tokens of a prompt that is not long."""
MOST_DIFFERENCES = 10
"""Answers that a result tells of, where more of them are wrong."""
LONG = 3900
"""Most tokens of prompt and answer: a cache grows once, as choices are compiled for each of its sizes."""
CALLS = ((1, SHORT), (16, SHORT), (0, LONG), (64, LONG), (48, LONG), (1, LONG))
"""Of an episode: how many questions, 0 for 2 to 15 of them, and how long a prompt may be, which lets the cache grow."""
MIXTURE_LAYERS = 8
"""Layers of a random mixture: fewer than its dimensions have, so that more tokens are compared."""
NUM_QUESTIONS = 144
"""Each is decoded plainly once."""
BROKEN_OFF = 0.25
"""Share of the calls that follow one which ended early."""


class Question(NamedTuple):
    """Prompt, rules and seed, which fix an answer; ``kind``: where the prompt comes from."""

    kind: str
    prompt: tuple[int, ...]
    rules: str
    seed: int


class Pool:
    """Questions by rules, and the answers of plain decoding of each alone."""

    def __init__(
        self,
        model: SpeculativeModel,
        chats: Sequence[Sequence[int]],
        text: Sequence[int],
        seed: int,
        count: int,
        new_tokens: int = NEW,
    ) -> None:
        self.model, self.new_tokens = model.with_tree(model.drafter.tree), new_tokens
        self.answers: dict[Question, list[int]] = {}
        rng, longest = random.Random(seed), (model.max_model_len or 8192) - 1
        ends = [m + beside for size in (64, 256, 512) for m in range(size, longest, size) for beside in (-1, 0, 1)]
        ends = [1, 2, 3, *(end for end in ends if end <= min(longest, len(text)))]
        short = [end for end in ends if end <= SHORT]
        self.questions: dict[str, list[Question]] = {rules: [] for rules in RULES}
        for number in range(count):
            kind, end = ("chat", "text", "random", "long")[number % 4], rng.choice(short)
            if kind == "chat":
                prompt = list(rng.choice(chats))
            elif kind == "random":
                prompt = [rng.randrange(model.target.vocab_size) for _ in range(end)]
            else:
                # All of them begin alike, so that one may take over another's rows.
                prompt = list(text[: rng.choice(ends) if kind == "long" else end])
            rules = list(RULES)[number // 4 % len(RULES)]
            self.questions[rules].append(Question(kind, tuple(prompt), rules, rng.randrange(1 << 31)))

    def draw(self, rng: random.Random, count: int, longest: int) -> list[Question]:
        """Draw questions of the same rules, perhaps one twice; no prompt is longer than ``longest``."""
        fitting = [[q for q in each if len(q.prompt) <= longest] for each in self.questions.values()]
        return rng.choices(rng.choice([each for each in fitting if each]), k=count)

    def next_turn(self, question: Question, rng: random.Random) -> Question:
        """Continue a question by its answer, or a part of it, and more text."""
        answer = self.answer(question)
        cut = answer[: rng.randint(len(answer) // 2, len(answer))]
        prompt = (*question.prompt, *cut, *question.prompt[: rng.randint(1, 70)])
        return question._replace(kind="next turn", prompt=prompt[: (self.model.max_model_len or 8192) - 1])

    def answer(self, question: Question) -> list[int]:
        """Decode a question alone and plainly: `new_tokens`, or fewer up to its end."""
        if question not in self.answers:
            self.answers[question] = generate(self.model, [question], self.new_tokens, speculative=False).token_ids[0]
        return self.answers[question]


def generate(model: SpeculativeModel, questions: Sequence[Question], new_tokens: int, **options: Any) -> Any:
    """Answer questions of the same rules in one call."""
    prompts, seeds = [list(q.prompt) for q in questions], [q.seed for q in questions]
    return model.generate(prompts, seed=seeds, max_new_tokens=new_tokens, **RULES[questions[0].rules], **options)


def read_text(folder: Path = ROOT) -> str:
    """Read the pages of this repository, one after the other: real text that every clone carries."""
    pages = sorted([*folder.glob("*.md"), *folder.glob("docs/**/*.md"), *folder.glob("convert/*.md")])
    return "\n\n".join(page.read_text("utf-8") for page in pages)


def read_chats(model: SpeculativeModel) -> list[list[int]]:
    """Encode the prompts of the examples, each as a chat."""
    prompts = [p for path in sorted((ROOT / "examples").glob("*prompts.jsonl")) for p in load_prompts(path)]
    return [model.encode_chat(prompt.turns[0]) for prompt in prompts]


class BreakingStreamer:
    """Raises ``error`` when it is given more than ``most`` times: the prompt, then new tokens."""

    def __init__(self, most: int, error: BaseException) -> None:
        self.left, self.error = most, error

    def put(self, value: torch.Tensor) -> None:  # noqa: D102
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self) -> None: ...  # noqa: D102


class ChangingShapes(ShapeChooser):
    """Draws another shape for every step; plain steps come alone or in runs."""

    def __init__(self, shapes: Sequence[TreeConfig | None], rng: random.Random, steps: Counter[Any]) -> None:
        super().__init__(Acceptance(), Costs(1, 1), shapes)
        self.rng, self.last, self.num_plain, self.steps = rng, shapes[0], 0, steps

    def next(self, *_: Any) -> TreeConfig | None:
        """Draw a shape; a run of plain steps may be longer than what the drafter takes at a time."""
        if self.num_plain > 0:
            self.num_plain -= 1
            return None
        self.last = self.rng.choice([shape for shape in self._shapes if shape != self.last])
        self.num_plain = self.rng.choice((0, 0, 1, 20)) if self.last is None else 0
        return self.last

    def is_unmeasured(self, shape: TreeConfig | None, places: int) -> bool:
        """Return False: no step waits for a time."""
        return False


@dataclass(frozen=True)
class Variant:
    """Draft vocabulary and tree of an episode. ``tree`` None: plain decoding; ``changes``: a new tree every step."""

    rows: str
    tree: TreeConfig | None
    changes: bool = False

    @property
    def name(self) -> str:
        """Name in the counts."""
        tree = self.tree
        if self.changes:
            return "a shape for every step"
        return f"depth {tree.depth}, top_k {tree.top_k}, {tree.total_tokens} nodes" if tree else "plain"


class Fuzz:
    """Runs episodes, and counts compared tokens; ``models`` by the name of their draft vocabulary."""

    def __init__(
        self,
        models: Mapping[str, SpeculativeModel],
        pool: Pool,
        trees: Sequence[TreeConfig],
        seed: int,
        calls: Sequence[tuple[int, int]] = CALLS,
        only_changing: bool = False,
    ) -> None:
        self.models, self.pool, self.seed, self.calls = models, pool, seed, calls
        names = [*models]
        drafted = [Variant(names[(seed + place) % len(names)], tree) for place, tree in enumerate(trees)]
        changing = [Variant(rows, LARGE, changes=True) for rows in models]
        self.variants = changing if only_changing else [*drafted, *changing, Variant(next(iter(models)), None)]
        self._of_any_shape: dict[str, SpeculativeModel] = {}
        self.tokens = self.reused = self.differing = 0
        self.counts: Counter[str] = Counter()
        self.steps: Counter[TreeConfig | None] = Counter()
        """Steps of each shape, where they change."""
        self.lengths: dict[str, Counter[int]] = {}
        """Of each variant, how many passes gave a sequence so many tokens."""
        self.broken_off: Counter[str] = Counter()
        self.differences: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.exactness: set[str] = set()

    def plan(self, number: int) -> tuple[Variant, list[tuple[list[Question], dict[str, Any]]], random.Random]:
        """Draw the calls of an episode: questions and options of each; returns what draws the rest, too."""
        rng, place = random.Random(f"{self.seed}/{number}"), (number + 5 * self.seed) % len(self.variants)
        # Few numbers of slots for a variant, as each has kernels of its own; fewer and fewer of 16 come to run.
        fewer, calls = (4, 8, 2)[place % 3], []
        for count, longest in self.calls:
            slots = 16 if rng.random() < 0.5 else rng.randint(fewer // 2 + 1, fewer)
            questions = self.pool.draw(rng, count or rng.randint(min(slots, 9), 15), longest)
            new = rng.choice((1, *[self.pool.new_tokens] * 4))
            calls.append((questions, {"max_slots": slots, "reuse_prefix": rng.random() < 0.5, "new_tokens": new}))
        return self.variants[place], calls, rng

    def _model_of(self, variant: Variant, kept: dict[str, SpeculativeModel]) -> SpeculativeModel:
        """Return a model whose cache is empty and small; with all shapes it has too many graphs, and is ``kept``."""
        base = self.models[variant.rows]
        if not variant.changes:
            return base.with_tree(variant.tree or base.drafter.tree)
        return kept.setdefault(variant.rows, base.with_tree(None))

    def run(self, is_over: Callable[[], bool], episodes: Iterable[int]) -> None:
        """Run the calls of episodes until it is over."""
        for number in episodes:
            if is_over():
                break
            self._run_episode(number, is_over)

    def _run_episode(self, number: int, is_over: Callable[[], bool]) -> None:
        variant, calls, rng = self.plan(number)
        model = self._model_of(variant, self._of_any_shape)
        if variant.changes:
            chooser = partial(ChangingShapes, rng=rng, steps=self.steps)
            model._decoders.new_chooser = chooser  # type: ignore[method-assign]
        for place, (questions, options) in enumerate(calls):
            where = {"seed": self.seed, "episode": number, "call": place, "rows": variant.rows, "tree": variant.name}
            if rng.random() < BROKEN_OFF:
                self._break_off(model, variant, questions[0], rng)
            self._call(model, variant, questions, where, **options)
            if len(questions) == 1:
                again = options | {"reuse_prefix": True, "new_tokens": self.pool.new_tokens}
                self._call(model, variant, [self.pool.next_turn(questions[0], rng)], where, **again)
            if is_over():
                break

    def _break_off(self, model: SpeculativeModel, variant: Variant, question: Question, rng: random.Random) -> None:
        """Make a call that its streamer ends early, unless the answer is over before."""
        error = rng.choice((RuntimeError("the streamer's own"), KeyboardInterrupt()))
        streamer = BreakingStreamer(rng.randint(0, self.pool.new_tokens // 2), error)
        try:
            generate(model, [question], self.pool.new_tokens, streamer=streamer, speculative=variant.tree is not None)
        except (RuntimeError, KeyboardInterrupt) as raised:
            if raised is not error:
                raise
            self.broken_off[type(error).__name__] += 1

    def _call(
        self,
        model: SpeculativeModel,
        variant: Variant,
        questions: Sequence[Question],
        where: dict[str, Any],
        **options: Any,
    ) -> None:
        wanted = [self.pool.answer(question)[: options["new_tokens"]] for question in questions]
        output = generate(model, questions, **options, speculative=variant.tree is not None)
        self.reused += output.stats.num_reused_tokens
        path = output.stats.path
        self.paths.add(path.rpartition("; ")[0] if variant.changes else path)
        self.exactness.add(str(output.stats.exactness))
        self.lengths.setdefault(variant.name, Counter()).update(output.stats.accepted_lengths)
        side_by_side = min(len(questions), options["max_slots"])
        for place, (question, own, found) in enumerate(zip(questions, wanted, output.token_ids, strict=True)):
            first = first_difference(found, own)
            compared = len(own) if first is None else first + 1
            self.tokens += compared
            kinds = [
                variant.name,
                f"{variant.rows} rows",
                f"{side_by_side} at once",
                question.rules,
                question.kind,
                f"reuse_prefix {options['reuse_prefix']}",
            ]
            self.counts.update(dict.fromkeys(kinds, compared))
            if first is None:
                continue
            self.differing += 1
            self.counts.update({f"{kind}: answers that differ": 1 for kind in kinds})
            if len(self.differences) < MOST_DIFFERENCES:
                tokens = {"token": first, "plain": own[first : first + 1], "found": found[first : first + 1]}
                self.differences.append({**where, **options, "place": place, **question._asdict(), **tokens})

    def result(self) -> dict[str, Any]:
        """Return the compared tokens, all and by kind of case; a token counts once in each of its kinds."""
        lengths = {
            name: sum(length * count for length, count in found.items()) / max(1, found.total())
            for name, found in self.lengths.items()
        }
        return {
            "seed": self.seed,
            "tokens": self.tokens,
            "answers_that_differ": self.differing,
            "questions": len(self.pool.answers),
            "tokens_of_their_answers": sum(map(len, self.pool.answers.values())),
            "tokens_a_pass": lengths,
            "steps_by_shape": {str(shape): count for shape, count in self.steps.items()},
            "reused_prompt_tokens": self.reused,
            "calls_broken_off": dict(self.broken_off),
            "tokens_by_kind": dict(sorted(self.counts.items())),
            "differences": self.differences,
            "exactness": sorted(self.exactness),
            "paths": sorted(self.paths),
        }


def random_tree(rng: random.Random) -> TreeConfig:
    """Draw a tree of a random shape, up to 128 nodes."""
    depth, top_k = rng.randint(1, 8), rng.randint(2, 12)
    return TreeConfig(depth, top_k, rng.randint(2, min(128, TreeConfig(depth, top_k, 2).num_candidates + 1)))


def parsed(argv: list[str] | None) -> tuple[Command, Namespace]:
    """Parse the options."""
    command = Command("exact", __doc__)
    command.add_argument("--tokens", type=whole_from(1), default=200_000, help="stop after as many drafted ones")
    command.add_argument("--seconds", type=whole_from(1), default=600, help="or after this time, with compilation")
    command.add_argument("--dims", choices=("smollm2-135m", "qwen2.5-0.5b", *EXPERTS), default="smollm2-135m")
    command.add_argument("--seed", type=whole_from(0), default=0)
    command.add_argument("--changing", action="store_true", help="only calls whose every step has another shape")
    command.add_argument(
        "--windows", type=whole_from(0), nargs="*", default=(), help="also draft from the last N tokens"
    )
    command.add_argument("--episode", type=whole_from(0), help="run this one alone, whole")
    command.add_argument("--quality", action="store_true", help="measure the divergence from float32 instead")
    command.add_argument("--target-weights", choices=("auto", "fp8"), default="auto")
    return command, command.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    start = time.perf_counter()
    command, args = parsed(argv)
    device = command.gpu()
    # Of a text that is forced every node is chosen on the host.
    nodes = 16 if args.quality else 60
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "tree": TreeConfig(total_tokens=nodes)}
    model = SpeculativeModel.from_pretrained(**options, target_weights=args.target_weights, max_model_len=LONG)
    named = {name: getattr(args, name) for name in ("dims", "target_weights", "changing", "windows")}
    tokenizer, result = model.tokenizer, {"machine": machine(device), **named}
    assert tokenizer is not None
    text = tokenizer(read_text(), add_special_tokens=False)["input_ids"]
    if args.quality:
        whole = SpeculativeModel.from_pretrained(**options) if args.target_weights == "fp8" else model
        result |= measure_quality(model, text, whole.target.model)
        write(result, args.out)
        show(result["quality"])
        sys.exit(0 if result["is_good"] else f"worse than transformers by more than {TOLERANCE - 1:.0%}")
    trees = [*TREES, random_tree(random.Random(args.seed))]
    models = {"full": model, "4096": model.with_draft_vocab(4096)}
    if args.dims != "smollm2-135m":
        weights = "fp8" if args.target_weights == "fp8" else "bf16"
        layers = MIXTURE_LAYERS if args.dims in EXPERTS else None
        models = {"full": guessable_model(args.dims, device, tokenizer, weights, layers, max_model_len=LONG)}
    models |= {f"{rows}, window {n},": each.with_draft_window(n) for rows, each in models.items() for n in args.windows}
    pool = Pool(models["full"], read_chats(model), text, args.seed, NUM_QUESTIONS)
    fuzz = Fuzz(models, pool, trees, args.seed, only_changing=args.changing)

    def is_over() -> bool:
        took_s = time.perf_counter() - start
        write(result | {"seconds": took_s} | fuzz.result(), args.out)
        drafted = fuzz.tokens - fuzz.counts["plain"]
        return bool(took_s >= args.seconds or (args.episode is None and drafted >= args.tokens))

    result["prepared_s"] = time.perf_counter() - start
    fuzz.run(is_over, itertools.count() if args.episode is None else [args.episode])
    is_over()
    show({name: value for name, value in fuzz.result().items() if name != "differences"})
    for difference in fuzz.differences:
        show({name: value for name, value in difference.items() if name != "prompt"})
    sys.exit(0 if fuzz.tokens and not fuzz.differing else 1)


if __name__ == "__main__":
    main()
