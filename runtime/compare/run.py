"""`compare`: the same prompts answered with several draft vocabularies, heads and trees, and plainly.

Every candidate answers a prompt before the next prompt begins, so that a machine that slows down or warms up does so
for all. Their order is drawn anew for each turn and balanced (`balanced_orders`): none gains by its place or by the one
before it. Answers that equal plain decoding's (with the same seed) are counted. Where `GenerationStats.is_exact`, a
difference is a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from operator import eq
from typing import Any

import numpy as np
import torch

from ..api.output import GenerationOutput, difference, first_difference
from ..errors import DeviceMemoryError, EagleSlimError, LogitsError, PromptError, UsageError
from ..model import SpeculativeModel
from .candidates import PLAIN, Candidate, find_candidates
from .comparison_options import CompareOptions
from .prompts import Prompt
from .recommend import recommend
from .report import Answer, Comparison, Omission, build_rows

Progress = Callable[[int, int], object]


def compare(
    models: SpeculativeModel | Sequence[SpeculativeModel],
    prompts: Sequence[Prompt],
    options: CompareOptions | None = None,
    *,
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Answer every prompt with every candidate and with plain decoding, and work out the figures and the advice.

    ``models``: one, or several heads over the same loaded target. ``prompts``: later turns of each follow the answers
    of plain decoding. ``progress`` is called after each answer with how many there are and how many there will be.

    What was measured is kept. A candidate that fails at a turn lacks that turn; where plain decoding fails or the
    prompt cannot be asked, the conversation ends; Ctrl-C ends all. The ``omissions`` of the result tell of it.

    Raises `UsageError` for options that fit neither models nor prompts; `PromptError` for a first turn without room in
    the context, before anything is measured; `EagleSlimError` where no drafted answer could be measured;
    `KeyboardInterrupt` before the first turn was answered.
    """
    options = options or CompareOptions()
    models = [models] if isinstance(models, SpeculativeModel) else models
    drafted = find_candidates(models, options)
    if not prompts:
        raise UsageError("prompts: a comparison takes one or more; got none.")
    candidates = [Candidate(PLAIN, PLAIN, models[0]), *drafted]
    measurement = Measurement(prompts, candidates, options, progress)
    answers, omissions = measurement.answer_all(), list(measurement.omissions.values())
    if all(answer.candidate == PLAIN for answer in answers):
        raise EagleSlimError(f"No drafted answer was measured: {max(omissions, key=lambda each: each.is_fault)}")
    rows = build_rows(candidates, options, answers)
    return Comparison(rows, measurement.setup(), recommend(rows), answers, measurement.is_complete, omissions)


def balanced_orders(count: int, random: np.random.Generator) -> Iterator[list[int]]:
    """Yield orders of ``count`` things without end: the rows of Williams' designs, each shuffled over a new draw.

    Once all its rows are used, each thing stood equally often in each place, and directly after each other thing.
    Williams (1949), "Experimental designs balanced for the estimation of residual effects of treatments". For four
    things: 0 1 3 2, 1 2 0 3, 2 3 1 0, 3 0 2 1; for an odd number the reversed rows too.
    """
    first = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    rows = [[(each + shift) % count for each in first] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    while True:
        things = random.permutation(count)
        for number in random.permutation(len(rows)):
            yield [int(things[place]) for place in rows[number]]


def groups_of(count: int, size: int) -> list[tuple[int, ...]]:
    """List the numbers of prompts that are asked together, the last group filled up from the beginning."""
    return [tuple((first + i) % count for i in range(size)) for first in range(0, count, size)]


class Measurement:
    """The calls of one comparison; ``candidates`` begin with plain decoding, which the others are compared with."""

    def __init__(
        self, prompts: Sequence[Prompt], candidates: Sequence[Candidate], options: CompareOptions, progress: Progress
    ) -> None:
        self.prompts, self.candidates, self.options, self.progress = prompts, candidates, options, progress
        self.model = candidates[0].model
        self.answers, self.is_complete, self.num_done = list[Answer](), True, 0
        self.omissions = dict[tuple[int, str], Omission]()
        # The figures of each mode and batch are worked out by themselves.
        kinds, count = product(options.modes, options.batches), len(candidates)
        self.orders = {
            kind: balanced_orders(count, np.random.default_rng([0, number])) for number, kind in enumerate(kinds)
        }
        groups = [group for batch in options.batches for group in groups_of(len(prompts), batch)]
        num_turns = sum(max(len(prompts[number].turns) for number in group) for group in groups)
        self.num_calls = len(candidates) * num_turns * len(options.modes)

    def setup(self) -> dict[str, Any]:
        """Return what is compared, on which device and how, as plain values."""
        model, drafted, options = self.model, self.candidates[1:], self.options
        device, threads = model.target.device, torch.get_num_threads()
        cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return {
            "target": (model.opened.target_name if model.opened else None) or type(model.target.model).__name__,
            "heads": list(dict.fromkeys(candidate.head for candidate in drafted)),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            "dtype": str(model.target.dtype).removeprefix("torch."),
            "drafter": model.drafter.name,
            "draft_weights": model.draft_weights,
            "trees": list(dict.fromkeys(candidate.tree_words for candidate in drafted)),
            "draft_windows": list(dict.fromkeys(candidate.draft_window for candidate in drafted)),
            "num_prompts": len(self.prompts),
            "modes": {mode: options.generation(mode) for mode in options.modes},
            "max_new_tokens": options.max_new_tokens,
            "partial_verification": options.partial_verification,
            "versions": {package: version(package) for package in ("eagle-slim", "torch", "transformers")},
        }

    def answer_all(self) -> list[Answer]:
        """Return the answers in the order they were made."""
        self._warm_up()
        try:
            for batch in self.options.batches:
                for group in groups_of(len(self.prompts), batch):
                    for mode in self.options.modes:
                        self._answer_group(group, mode)
        except KeyboardInterrupt:
            if not self.answers:
                raise
            self.is_complete = False
        return self.answers

    def _warm_up(self) -> None:
        # Refuse a prompt that does not fit the context now, not after hours.
        opening = [self.model.encode_chat([_said("user", prompt.turns[0])]) for prompt in self.prompts]
        self.model.generate(opening, max_new_tokens=0)
        hello = self.model.encode_chat([_said("user", "Hi")])
        failed, num_batches = Counter[bool](), len(self.options.batches)
        for batch, candidate in product(self.options.batches, self.candidates):
            try:
                # Keep one-off work (allocation, packing) out of the first prompt's times.
                model, drafts = candidate.model, not candidate.is_plain
                model.generate([hello] * batch, max_new_tokens=2, max_slots=batch, speculative=drafts)
            except Exception:
                # It fails again when it is asked, unless nothing is left that could be compared.
                failed[candidate.is_plain] += 1
                if failed[True] == num_batches or failed[False] == num_batches * (len(self.candidates) - 1):
                    raise

    def _answer_group(self, group: tuple[int, ...], mode: str) -> None:
        talks: dict[int, list[dict[str, str]]] = {number: [] for number in group}
        num_turns = max(len(self.prompts[number].turns) for number in group)
        ended = self.num_done + len(self.candidates) * num_turns
        for turn in range(num_turns):
            asked = [number for number in group if turn < len(self.prompts[number].turns)]
            for number in dict.fromkeys(asked):
                talks[number].append(_said("user", self.prompts[number].turns[turn]))
            plain = self._answer_turn(mode, group, turn, asked, talks)
            if plain is None:
                # Nothing is known that the next turn could follow.
                self._move_on(ended - self.num_done)
                return
            for number, text in zip(asked, plain.text, strict=True):
                if talks[number][-1]["role"] == "user":
                    talks[number].append(_said("assistant", text or ""))

    def _answer_turn(
        self, mode: str, group: tuple[int, ...], turn: int, asked: Sequence[int], talks: Mapping[int, Any]
    ) -> GenerationOutput | None:
        """Keep what the candidates answer to a turn; return plain decoding's, None where there is none."""
        outputs, of_turn = dict[str, GenerationOutput](), (mode, len(group), group[0], turn)
        try:
            ids = [self.model.encode_chat(talks[number]) for number in asked]
        except Exception as error:
            self._leave_out(PLAIN, of_turn, error)
            return None
        for number in next(self.orders[mode, len(group)]):
            candidate = self.candidates[number]
            try:
                outputs[candidate.label] = self._generate(candidate, ids, mode, len(group))
            except Exception as error:
                self._leave_out(candidate.label, of_turn, error)
                if candidate.is_plain:
                    return None
            self._move_on(1)
        plain, categories = outputs[PLAIN], {self.prompts[number].category for number in group}
        for label, output in outputs.items():
            try:
                if label != PLAIN and output.stats.is_exact:
                    _prove(f"{mode}: turn {turn + 1}", output, plain, asked)
            except EagleSlimError as error:
                self._leave_out(label, of_turn, error)
                continue
            category = next(iter(categories)) if len(categories) == 1 else None
            num_identical = sum(map(eq, output.token_ids, plain.token_ids))
            self.answers.append(Answer(*of_turn, label, category, num_identical, len(asked), output.stats))
        return plain

    def _move_on(self, num_calls: int) -> None:
        self.num_done += num_calls
        self.progress(self.num_done, self.num_calls)

    def _leave_out(self, candidate: str, of_turn: tuple[str, int, int, int], error: Exception) -> None:
        """Tell an error once, however often it comes; of plain decoding, as without its answer there is no other."""
        _, batch, prompt, turn = of_turn
        is_fault = not isinstance(error, (PromptError, UsageError, DeviceMemoryError, LogitsError))
        kind = "" if isinstance(error, EagleSlimError) else f"{type(error).__name__}: "
        message = f"turn {turn + 1} left out: {kind}{' '.join(str(error).split())}"
        first = self.omissions.get((batch, message), Omission(candidate, message, batch, prompt, is_fault))
        name = PLAIN if candidate == PLAIN else first.candidate
        self.omissions[batch, message] = replace(first, candidate=name, num_times=first.num_times + 1)

    def _generate(self, candidate: Candidate, ids: Sequence[Any], mode: str, batch: int) -> GenerationOutput:
        ahead = None if candidate.is_plain else self.options.partial_verification
        how: dict[str, Any] = {"max_slots": batch, "time_phases": True, **self.options.generation(mode)}
        how |= {"max_new_tokens": self.options.max_new_tokens, "partial_verification": ahead}
        return candidate.model.generate(ids, speculative=not candidate.is_plain, **how)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _prove(what: str, output: GenerationOutput, plain: GenerationOutput, asked: Sequence[int]) -> None:
    for prompt, drafted, expected in zip(asked, output.token_ids, plain.token_ids, strict=True):
        first = first_difference(drafted, expected)
        if first is not None:
            raise difference(f"{what} of prompt {prompt}", drafted, expected, first, str(output.stats.exactness))
