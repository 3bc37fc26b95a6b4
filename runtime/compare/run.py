"""`compare`: the same prompts answered with several draft vocabularies, heads and trees, and plainly.

Every candidate answers a prompt before the next prompt begins, so that a machine that slows down or warms up does so
for all. Their order is drawn anew for each prompt, so that no candidate gains by its place. Every answer is compared
with plain decoding of the same prompt (greedy, or sampled with the same seed), and identical ones are counted. Where
`GenerationStats.is_exact`, a difference is an error. Times are of this device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
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

    Args:
        models: one, or several heads over the same loaded target, from `SpeculativeModel.from_pretrained`.
        prompts: conversations, as `load_prompts` reads them. Later turns follow the answers of plain decoding.
        options: what to compare and how; None for the defaults.
        progress: called after each answer with how many there are and how many there will be.

    Ctrl-C ends it early: then ``is_complete`` is false, and the figures are those of the turns that every candidate has
    answered; before the first one it raises KeyboardInterrupt.

    Raises:
        UsageError: the options fit neither models nor prompts.
        EagleSlimError: an answer differs from plain decoding's where the target promises that none does.
        PromptError: a first turn has no room in the context; nothing is measured then. A later one without room, and
            any for which the memory does not suffice or logits are no numbers, is left out and told (`omissions`).
    """
    options = options or CompareOptions()
    models = [models] if isinstance(models, SpeculativeModel) else models
    drafted = find_candidates(models, options)
    if not prompts:
        raise UsageError("prompts: a comparison takes one or more; got none.")
    candidates = [Candidate(PLAIN, PLAIN, models[0]), *drafted]
    measurement = Measurement(prompts, candidates, options, progress)
    answers = measurement.answer_all()
    if not answers:
        raise EagleSlimError(f"No prompt was answered: {measurement.omissions[0]}")
    rows, is_complete = build_rows(candidates, options, answers), len(answers) == measurement.num_calls
    return Comparison(rows, measurement.setup(), recommend(rows), answers, is_complete, measurement.omissions)


def groups_of(count: int, size: int) -> list[tuple[int, ...]]:
    """Number prompts that are asked together, the last group filled up from the beginning."""
    return [tuple((first + i) % count for i in range(size)) for first in range(0, count, size)]


class Measurement:
    """The calls of one comparison; ``candidates`` begin with plain decoding, which the others are compared with."""

    def __init__(
        self, prompts: Sequence[Prompt], candidates: Sequence[Candidate], options: CompareOptions, progress: Progress
    ) -> None:
        self.prompts, self.candidates, self.options, self.progress = prompts, candidates, options, progress
        self.model = candidates[0].model
        self.answers, self.omissions = list[Answer](), list[Omission]()
        # The figures of each mode and batch are worked out by themselves.
        kinds = [(mode, batch) for mode in options.modes for batch in options.batches]
        self.random = {kind: np.random.default_rng([0, number]) for number, kind in enumerate(kinds)}
        groups = [group for batch in options.batches for group in groups_of(len(prompts), batch)]
        num_turns = sum(max(len(prompts[place].turns) for place in group) for group in groups)
        self.num_calls = len(candidates) * num_turns * len(options.modes)
        """How many calls of `generate` it takes."""

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
            "num_prompts": len(self.prompts),
            "modes": {mode: options.generation(mode) for mode in options.modes},
            "max_new_tokens": options.max_new_tokens,
            "partial_verification": options.partial_verification,
            "versions": {package: version(package) for package in ("eagle-slim", "torch", "transformers")},
        }

    def answer_all(self) -> list[Answer]:
        """Return the answers in the order they were made; fewer than planned where Ctrl-C ended it."""
        self._warm_up()
        try:
            for batch in self.options.batches:
                for group in groups_of(len(self.prompts), batch):
                    for mode in self.options.modes:
                        self._answer_group(group, mode)
        except KeyboardInterrupt:
            if not self.answers:
                raise
        return self.answers

    def _warm_up(self) -> None:
        # Refuse a prompt that does not fit the context now, not after hours.
        opening = [self.model.encode_chat([_said("user", prompt.turns[0])]) for prompt in self.prompts]
        self.model.generate(opening, max_new_tokens=0)
        hello = self.model.encode_chat([_said("user", "Hi")])
        for candidate in self.candidates:
            for batch in self.options.batches:
                # Keep one-off work (allocation, packing) out of the first prompt's times.
                candidate.model.generate(
                    [hello] * batch, max_new_tokens=2, max_slots=batch, speculative=not candidate.is_plain
                )

    def _answer_group(self, group: tuple[int, ...], mode: str) -> None:
        """Let every candidate answer a group of prompts, turn by turn."""
        prompts = {place: self.prompts[place] for place in group}
        talks: dict[int, list[dict[str, str]]] = {place: [] for place in prompts}
        categories = {prompt.category for prompt in prompts.values()}
        category = categories.pop() if len(categories) == 1 else None
        num_turns = max(len(prompt.turns) for prompt in prompts.values())
        for turn in range(num_turns):
            asked = [place for place in group if turn < len(prompts[place].turns)]
            for place in dict.fromkeys(asked):
                talks[place].append(_said("user", prompts[place].turns[turn]))
            ids, outputs = [self.model.encode_chat(talks[place]) for place in asked], dict[str, GenerationOutput]()
            for number in self.random[mode, len(group)].permutation(len(self.candidates)):
                candidate = self.candidates[number]
                try:
                    outputs[candidate.label] = self._generate(candidate, ids, mode, len(group))
                except (PromptError, DeviceMemoryError, LogitsError) as error:
                    # What was measured stays: the conversations of this group end here.
                    place = asked[error.prompt] if isinstance(error, PromptError) else group[0]
                    message = f"left out from turn {turn + 1} on, with the conversation before it: {error}"
                    self.omissions.append(Omission(candidate.label, message, len(group), place))
                    self.num_calls -= len(self.candidates) * (num_turns - turn)
                    return
                self.progress(len(self.answers) + len(outputs), self.num_calls)
            plain = outputs[PLAIN]
            for label, output in outputs.items():
                if label != PLAIN and output.stats.is_exact:
                    _prove(f"{label}, {mode}, batch {len(group)}: turn {turn + 1}", output, plain, asked)
            # A turn counts once every candidate has answered it: all figures are of the same turns.
            for label, output in outputs.items():
                num_identical = sum(map(eq, output.token_ids, plain.token_ids))
                answer = Answer(mode, len(group), group[0], label, category, num_identical, len(asked), output.stats)
                self.answers.append(answer)
            for place, text in zip(asked, plain.text, strict=True):
                if talks[place][-1]["role"] == "user":
                    talks[place].append(_said("assistant", text or ""))

    def _generate(self, candidate: Candidate, ids: Sequence[Any], mode: str, batch: int) -> GenerationOutput:
        output: GenerationOutput = candidate.model.generate(
            ids,
            max_new_tokens=self.options.max_new_tokens,
            max_slots=batch,
            speculative=not candidate.is_plain,
            time_phases=True,
            **self.options.generation(mode),
            partial_verification=None if candidate.is_plain else self.options.partial_verification,
        )
        return output


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _prove(what: str, output: GenerationOutput, plain: GenerationOutput, asked: Sequence[int]) -> None:
    """Raise `EagleSlimError` at the first answer that differs from plain decoding's."""
    for place, drafted, expected in zip(asked, output.token_ids, plain.token_ids, strict=True):
        first = first_difference(drafted, expected)
        if first is not None:
            raise difference(f"{what} of prompt {place}", drafted, expected, first, str(output.stats.exactness))
