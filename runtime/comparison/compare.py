"""Accuracy against speed: the same prompts answered with several draft vocabularies, heads and trees, and plainly.

Runs are interleaved: every candidate answers a prompt before the next prompt begins, so that a machine that slows down
or warms up does so for all. Every answer is compared with plain decoding of the same prompt (greedy, or sampled with
the same seed), and the report says how many were identical: all of them in fp32. Times are of this device and do not
carry over to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import TreeConfig
from ..errors import PromptError, UsageError
from ..generation.output import GenerationOutput
from ..model import SpeculativeModel
from .answers import Answer, AnswerKey, AnswerLog
from .prompt_file import Prompt

if TYPE_CHECKING:
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
    from numpy.typing import NDArray

ALL = "all"
PLAIN = "plain"


@dataclass(frozen=True)
class Mode:
    """A way of choosing tokens: ``options`` are arguments of `SpeculativeModel.generate`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """One of the things compared: a head over some of its draft vocabulary, with a tree. ``label`` is unique."""

    label: str
    model: SpeculativeModel
    size: str = ""
    """The draft vocabulary in words, such as "4,096" or "full (49,152)"; empty means the label."""
    head: str = ""

    @property
    def tree(self) -> TreeConfig:
        """Shape of its trees."""
        return self.model.drafter.tree

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights that drafting one tree reads: the layer, the LM head and all that may join, a level."""
        return self.model.draft_bytes

    @property
    def follow(self) -> str | None:
        """Whose ids join the draft vocabulary: "prompt", "text", or None."""
        follow = self.model.drafter.weights.follow
        return None if follow is None else follow.source

    @property
    def follow_rows(self) -> int:
        """Most ids that join."""
        return self.model.drafter.weights.num_joining


@dataclass(frozen=True)
class CoverageCurve:
    """Share of tokens inside a draft vocabulary, against its size: both sequences of one length."""

    name: str
    sizes: tuple[int, ...]
    covered: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """What is compared, on which prompts, how: everything but the models themselves.

    ``batches``: how many prompts are answered at a time; groups of that many follow each other in the file's order, the
    last one filled up from the beginning. ``repeats``: times that all of it is measured.
    """

    prompts: Sequence[Prompt]
    modes: Sequence[Mode]
    max_new_tokens: int
    repeats: int = 1
    batches: Sequence[int] = (1,)
    use_chat_template: bool = True

    def groups(self, batch: int) -> list[tuple[int, ...]]:
        """Return the numbers of the prompts that are answered together."""
        count = len(self.prompts)
        return [tuple((first + i) % count for i in range(batch)) for first in range(0, count, batch)]

    def num_calls(self, num_candidates: int) -> int:
        """Return how many calls of `generate` a comparison makes, plain decoding included."""
        turns = sum(
            max(len(self.prompts[place].turns) for place in group)
            for batch in self.batches
            for group in self.groups(batch)
        )
        return (num_candidates + 1) * turns * len(self.modes) * self.repeats


def size_name(model: SpeculativeModel) -> str:
    """Name a model's draft vocabulary where it is all that its head has: of how many ids, and how many there are."""
    vocab = model.drafter.weights.embedding.shape[0]
    return f"full ({vocab:,})" if model.draft_vocab == vocab else f"all {model.draft_vocab:,} of {vocab:,}"


def cut_sizes(model: SpeculativeModel, sizes: Sequence[int | DraftVocab | None], head: str = "") -> list[Candidate]:
    """Return a candidate for each size: a number of rows, a `DraftVocab`, or None for all; equal ones are one."""
    everything = model.drafter.weights.draft_to_target
    found: list[Candidate] = []
    for size in sizes:
        cut = model.with_draft_vocab(size)
        ids = cut.drafter.weights.draft_to_target
        if any(torch.equal(ids, other.model.drafter.weights.draft_to_target) for other in found):
            continue
        name = size_name(cut) if torch.equal(ids, everything) else f"{cut.draft_vocab:,}"
        found.append(Candidate(name, cut, name, head))
    return found


def follow_each(
    cut: Candidate,
    follows: Sequence[str | None],
    rows: int,
    rank_order: NDArray[np.int64] | None = None,
) -> list[Candidate]:
    """Return a size once for each way to follow; a size that nothing can join as it is.

    ``rank_order``: target ids best first, as in `SpeculativeModel.with_follow`. Raises `UsageError` as that does.
    """
    found: list[Candidate] = []
    for follow in follows:
        if follow is None:
            found.append(cut)
            continue
        try:
            model = cut.model.with_follow(follow, rows, rank_order)
        except UsageError as error:
            if error.facts.get("missing") != "rows":
                raise
            continue
        name = f"{cut.size} + {follow}"
        found.append(replace(cut, label=name, model=model, size=name))
    return found or [cut]


def compare(
    candidates: Sequence[Candidate],
    plan: Plan,
    log: AnswerLog | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[Answer]:
    """Answer every prompt with every candidate and with plain decoding, in every mode; return the answers in order.

    Answers that ``log`` holds already are taken from it, and new ones are added. ``advance`` is called after each call
    of `generate` (`Plan.num_calls`). Later turns of a conversation follow plain decoding's answers. Ctrl-C leaves with
    `Interrupted`, which holds the answers so far. Raises `UsageError` for nothing to compare or a label given twice,
    `PromptError` for a turn without room.
    """
    if not (candidates and plan.prompts and plan.modes and plan.batches):
        raise UsageError(
            "There is nothing to compare. Give at least one size, one prompt and one mode.",
            sizes=len(candidates), prompts=len(plan.prompts), modes=len(plan.modes),
        )  # fmt: skip
    labels = [candidate.label for candidate in candidates]
    if len(set(labels)) != len(labels):
        raise UsageError(f"Each size is compared once; got {', '.join(labels)}.", found=labels)
    run = _Run(candidates, plan, log, advance)
    run.warm_up()
    try:
        for repeat in range(plan.repeats):
            for batch in plan.batches:
                for group in plan.groups(batch):
                    for mode in plan.modes:
                        run.answer_group(repeat, group, mode)
    except KeyboardInterrupt as stop:
        raise Interrupted(run.answers) from stop
    return run.answers


class Interrupted(KeyboardInterrupt):
    """A comparison was stopped by Ctrl-C; ``answers`` holds what there is."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers


class _Run:
    def __init__(
        self, candidates: Sequence[Candidate], plan: Plan, log: AnswerLog | None, advance: Callable[[], object]
    ) -> None:
        self.candidates, self.plan, self.log, self.advance = candidates, plan, log, advance
        self.model = candidates[0].model
        self.answers: list[Answer] = []

    def warm_up(self) -> None:
        # A prompt that does not fit the context is refused here, by its place, and not after hours.
        opening = [[*prompt.opening, _said("user", prompt.turns[0])] for prompt in self.plan.prompts]
        self.model.generate([self._encode(messages) for messages in opening], max_new_tokens=0)
        for candidate in self.candidates:
            for batch in self.plan.batches:
                # One-off work (allocation, packing) must not be timed with the first prompt.
                hello = self._encode([_said("user", "Hi")])
                candidate.model.generate([hello] * batch, max_new_tokens=2, max_slots=batch)

    def answer_group(self, repeat: int, group: tuple[int, ...], mode: Mode) -> None:
        """Let plain decoding and every candidate answer a group of prompts, turn by turn."""
        prompts = {place: self.plan.prompts[place] for place in group}
        talks: dict[int, list[dict[str, str]]] = {place: [*prompt.opening] for place, prompt in prompts.items()}
        categories = {_category(prompt) for prompt in prompts.values()}
        for turn in range(max(len(prompt.turns) for prompt in prompts.values())):
            asked = [place for place in group if turn < len(prompts[place].turns)]
            for place in dict.fromkeys(asked):
                talks[place].append(_said("user", prompts[place].turns[turn]))
            ids = [self._encode(talks[place]) for place in asked]
            plain: Answer | None = None
            for candidate in (None, *self.candidates):
                label = PLAIN if candidate is None else candidate.label
                key = AnswerKey(repeat, len(group), group[0], mode.name, turn, label)
                answer = None if self.log is None else self.log.answers.get(key)
                if answer is None:
                    output = self._generate(candidate, ids, mode, group, asked, turn)
                    answer = _answer(key, output, plain, next(iter(categories)) if len(categories) == 1 else None)
                    if self.log is not None:
                        self.log.append(answer)
                self.answers.append(answer)
                plain = plain or answer
                self.advance()
            assert plain is not None
            for place, text in zip(asked, plain.texts, strict=True):
                if talks[place][-1]["role"] == "user":
                    talks[place].append(_said("assistant", text))

    def _generate(
        self,
        candidate: Candidate | None,
        ids: Sequence[Any],
        mode: Mode,
        group: tuple[int, ...],
        asked: Sequence[int],
        turn: int,
    ) -> GenerationOutput:
        model = self.model if candidate is None else candidate.model
        try:
            return model.generate(
                ids,
                max_new_tokens=self.plan.max_new_tokens,
                max_slots=len(group),
                speculative=candidate is not None,
                time_phases=True,
                **mode.options,
            )
        except PromptError as error:
            place = asked[error.facts.get("prompt", 0)]
            reason = str(error).partition(" has ")[2]
            raise PromptError(
                f"Turn {turn + 1} of prompt {place}, with the conversation before it, has {reason}",
                **{**error.facts, "prompt": place, "turn": turn + 1},
            ) from error

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> Any:
        if self.plan.use_chat_template:
            return self.model.encode_chat(messages)
        return "\n".join(message["content"] for message in messages)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _category(prompt: Prompt) -> str:
    # Must not be mistaken for the row over all categories.
    return f"{ALL} (category)" if prompt.category == ALL else prompt.category


def _answer(key: AnswerKey, output: GenerationOutput, plain: Answer | None, category: str | None) -> Answer:
    tokens = tuple(tuple(row) for row in output.token_ids)
    stats = output.stats
    return Answer(
        key,
        category,
        len(tokens) if plain is None else sum(a == b for a, b in zip(tokens, plain.token_ids, strict=True)),
        stats.num_prompt_tokens,
        stats.accepted_lengths,
        stats.prefill_s,
        stats.total_s,
        tuple(tuple(step) for step in stats.steps),  # type: ignore[misc]
        tokens,
        tuple(text or "" for text in output.text),
        () if plain is None else tuple(result.stats.num_missed for result in output.results),
    )


def answer_coverage(rank_order: NDArray[np.int64], token_ids: Sequence[int]) -> CoverageCurve:
    """Measure the share of the given tokens that is among the first N ids of a ranking, for N from 64 to all ids."""
    rank = np.full(max(int(rank_order.max()), max(token_ids, default=0)) + 1, len(rank_order), dtype=np.int64)
    rank[rank_order] = np.arange(len(rank_order))
    ranks = np.sort(rank[np.asarray(token_ids, dtype=np.int64)])
    first = min(64, len(rank_order))
    sizes = np.unique(np.geomspace(first, len(rank_order), 48).round().astype(np.int64))
    covered = np.searchsorted(ranks, sizes, side="left") / max(len(ranks), 1)
    return CoverageCurve("these answers", tuple(sizes.tolist()), tuple(np.round(covered, 6).tolist()))
