"""Questions for whole calls: chats, real text, random ids, each with rules of choice, a seed, its plain answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.prompts import load_prompts
from eagle_slim.runtime.settings import TreeConfig

ROOT = Path(__file__).parents[2]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop strings": {"ignore_eos": True, "stop": ["\n\n\n", " because"]},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 40, "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.1, "min_new_tokens": 20, "suppress_tokens": [198]},
}
TREES = (
    TreeConfig(5, 10, 60), TreeConfig(5, 10, 16), TreeConfig(5, 1, 6), TreeConfig(3, 10, 5), TreeConfig(7, 10, 128),
)  # fmt: skip
NEW = 192
"""Most new tokens of an answer."""
SHORT = 700
"""Tokens of a prompt that is not long."""
MOST_DIFFERENCES = 10
"""Answers that a result tells of, where more of them are wrong."""


class Question(NamedTuple):
    """Prompt, rules and seed, which fix an answer; ``kind``: where the prompt comes from."""

    kind: str
    prompt: tuple[int, ...]
    rules: str
    seed: int


class Pool:
    """Questions by rules, and the answers of plain decoding of each alone."""

    def __init__(self, model: SpeculativeModel, chats: Sequence[Sequence[int]], text: Sequence[int], seed: int,
                 count: int, new_tokens: int = NEW) -> None:  # fmt: skip
        self.model, self.new_tokens = model.with_tree(model.drafter.tree), new_tokens
        self._answers: dict[Question, list[int]] = {}
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
        if question not in self._answers:
            self._answers[question] = generate(self.model, [question], self.new_tokens, speculative=False).token_ids[0]
        return self._answers[question]


def generate(model: SpeculativeModel, questions: Sequence[Question], new_tokens: int, **options: Any) -> Any:
    """Answer questions of the same rules in one call."""
    prompts, seeds = [list(q.prompt) for q in questions], [q.seed for q in questions]
    return model.generate(prompts, seed=seeds, max_new_tokens=new_tokens, **RULES[questions[0].rules], **options)


def read_text(folder: Path = ROOT) -> str:
    """The pages of this repository, one after the other: real text that every clone carries."""
    pages = sorted([*folder.glob("*.md"), *folder.glob("docs/**/*.md"), *folder.glob("convert/*.md")])
    return "\n\n".join(page.read_text("utf-8") for page in pages)


def read_chats(model: SpeculativeModel) -> list[list[int]]:
    """The prompts of the examples, each begun as a chat."""
    prompts = [p for path in sorted((ROOT / "examples").glob("*prompts.jsonl")) for p in load_prompts(path)]
    return [model.encode_chat(prompt.turns[0]) for prompt in prompts]
