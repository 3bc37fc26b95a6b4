"""`compare`: the same prompts answered with several draft vocabularies, heads and trees, and plainly.

Runs are interleaved: every candidate answers a prompt before the next prompt begins, so that a machine that slows down
or warms up does so for all. Every answer is compared with plain decoding of the same prompt (greedy, or sampled with
the same seed), and the report says how many were identical: all of them in fp32. Where the target promises it in every
type (`requests.exactness`), one that differs is an error. Times are of this device and do not carry over to another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..miss_log import MissLog, vocabulary_name
from ..model import SpeculativeModel
from ..requests.exactness import difference, exactness, first_difference
from ..requests.output import GenerationOutput
from .answers import Answer, AnswerKey, AnswerLog
from .candidates import PLAIN, Candidate, Say, find_candidates, rank_heads
from .options import CompareOptions
from .plan import Plan
from .prompt_file import Prompt
from .recommend import recommend
from .report import ALL, build_report
from .result import Comparison

Progress = Callable[[int, int], object]


def compare(
    models: SpeculativeModel | Sequence[SpeculativeModel],
    prompts: Sequence[Prompt],
    options: CompareOptions | None = None,
    *,
    answers_file: str | Path | None = None,
    progress: Progress = lambda done, total: None,
    say: Say = lambda message: None,
) -> Comparison:
    """Answer every prompt with every candidate and with plain decoding, and work out the figures and the advice.

    Args:
        models: one, or several heads over the same loaded target, from `SpeculativeModel.from_pretrained`.
        prompts: conversations, as `load_prompts` reads them. Later turns follow the answers of plain decoding.
        options: what to compare and how; None for the defaults.
        answers_file: each answer is kept here as it comes. Answers that are here already, of the same comparison, are
            not made again; `Comparison.write` takes the file into its folder.
        progress: called after each answer with how many there are and how many there will be.
        say: called with what a user may want to know before it begins.

    Returns:
        The comparison. Ctrl-C ends it early: then ``is_complete`` is false, and the figures are those of the answers so
        far.

    Raises:
        UsageError: the options fit neither models nor prompts, or the file holds answers of another comparison.
        EagleSlimError: an answer differs from plain decoding's where the target promises that none does.
        PromptError: a prompt has no room in the context; for a first turn this is found before anything is measured.
        KeyboardInterrupt: Ctrl-C before the first answer.
        VocabularyError, TokenizerError: the counts or the token map cannot be used for these heads.
    """
    options = options or CompareOptions()
    models = [models] if isinstance(models, SpeculativeModel) else models
    heads = rank_heads(models, options, say)
    candidates = find_candidates(heads, options, say)
    plan = Plan(prompts, (Candidate.plain(models[0]), *candidates), options)
    with ExitStack() as stack:
        log = None
        if answers_file is not None:
            log = stack.enter_context(AnswerLog(answers_file, plan.fingerprint()))
        answers = _Run(plan, log, progress).answer_all()
    tokens = [token for each in answers if each.key.candidate == PLAIN for row in each.token_ids for token in row]
    report = build_report(plan, answers, heads[0].curves(tokens))
    log_of_tokens = log_of_answers(MissLog.of(plan.model), plan, answers)
    return Comparison(report, recommend(report), answers, log_of_tokens, None if log is None else log.path)


class _Run:
    def __init__(self, plan: Plan, log: AnswerLog | None, progress: Progress) -> None:
        self.plan, self.log, self.progress = plan, log, progress
        self.answers: list[Answer] = []
        self.num_calls = plan.num_calls

    def answer_all(self) -> list[Answer]:
        """Return the answers in order; fewer than planned where Ctrl-C ended it."""
        options = self.plan.options
        if self.log is None or len(self.log.answers) < self.num_calls:
            self._warm_up()
        try:
            for repeat in range(options.repeats):
                for batch in options.batches:
                    for group in self.plan.groups(batch):
                        for mode in options.modes:
                            self._answer_group(repeat, group, mode)
        except KeyboardInterrupt:
            if not self.answers:
                raise
        return self.answers

    def _warm_up(self) -> None:
        # A prompt that does not fit the context is refused here, by its place, and not after hours.
        opening = [[*prompt.opening, _said("user", prompt.turns[0])] for prompt in self.plan.prompts]
        self.plan.model.generate([self._encode(messages) for messages in opening], max_new_tokens=0)
        hello = self._encode([_said("user", "Hi")])
        for candidate in self.plan.candidates[1:]:
            for batch in self.plan.options.batches:
                # One-off work (allocation, packing) must not be timed with the first prompt.
                candidate.model.generate([hello] * batch, max_new_tokens=2, max_slots=batch)

    def _answer_group(self, repeat: int, group: tuple[int, ...], mode: str) -> None:
        """Let plain decoding and every other candidate answer a group of prompts, turn by turn."""
        prompts = {place: self.plan.prompts[place] for place in group}
        talks: dict[int, list[dict[str, str]]] = {place: [*prompt.opening] for place, prompt in prompts.items()}
        categories = {_category(prompt) for prompt in prompts.values()}
        category = categories.pop() if len(categories) == 1 else None
        for turn in range(max(len(prompt.turns) for prompt in prompts.values())):
            asked = [place for place in group if turn < len(prompts[place].turns)]
            for place in dict.fromkeys(asked):
                talks[place].append(_said("user", prompts[place].turns[turn]))
            ids = [self._encode(talks[place]) for place in asked]
            plain: Answer | None = None
            for candidate in self.plan.candidates:
                key = AnswerKey(repeat, len(group), group[0], mode, turn, candidate.label)
                answer = None if self.log is None else self.log.answers.get(key)
                if answer is None:
                    output = self._generate(candidate, ids, key, asked)
                    answer = _answer(key, output, plain, category)
                    if plain is not None and answer.is_exact:
                        _prove(answer, plain, asked, exactness(output.stats))
                    if self.log is not None:
                        self.log.append(answer)
                self.answers.append(answer)
                plain = plain or answer
                self.progress(len(self.answers), self.num_calls)
            assert plain is not None
            for place, text in zip(asked, plain.texts, strict=True):
                if talks[place][-1]["role"] == "user":
                    talks[place].append(_said("assistant", text))

    def _generate(
        self, candidate: Candidate, ids: Sequence[Any], key: AnswerKey, asked: Sequence[int]
    ) -> GenerationOutput:
        options = self.plan.options
        ahead = None if candidate.is_plain else options.partial_verification
        try:
            return candidate.model.generate(
                ids, max_new_tokens=options.max_new_tokens, max_slots=key.batch, speculative=not candidate.is_plain,
                time_phases=True, partial_verification=ahead, **options.generation(key.mode),
            )  # fmt: skip
        except PromptError as error:
            place, turn = asked[error.facts.get("prompt", 0)], key.turn + 1
            reason = str(error).partition(" has ")[2]
            raise PromptError(
                f"Turn {turn} of prompt {place}, with the conversation before it, has {reason}",
                **{**error.facts, "prompt": place, "turn": turn},
            ) from error

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> Any:
        if self.plan.options.use_chat_template:
            return self.plan.model.encode_chat(messages)
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
        # In whole microseconds, as the file of answers has them: read again, they give the same report.
        tuple(tuple(round(seconds, 6) for seconds in step) for step in stats.steps),  # type: ignore[misc]
        tokens,
        tuple(text or "" for text in output.text),
        () if plain is None else tuple(result.stats.num_missed for result in output.results),
        exactness(stats) is not None,
    )


def _prove(answer: Answer, plain: Answer, asked: Sequence[int], proof: str | None) -> None:
    """Raise `EagleSlimError` at the first answer that differs from plain decoding's."""
    for place, ours, own in zip(asked, answer.token_ids, plain.token_ids, strict=True):
        first, key = first_difference(ours, own), answer.key
        if first is not None:
            how = f"{key.candidate}, {key.mode}, {key.batch} at a time"
            raise difference(f"{how}: turn {key.turn + 1} of prompt {place}", ours, own, first, str(proof))


def log_of_answers(log: MissLog, plan: Plan, answers: Sequence[Answer]) -> MissLog:
    """Count plain decoding's answers into a log, each text once: those of the first repeat and batch size.

    The provenance says of each draft vocabulary what it missed in its own answers to the same prompts, each once.
    """
    batch, names = plan.options.batches[0], _names(plan)
    groups = {group[0]: group for group in plan.groups(batch)}
    texts = defaultdict[str, list[Sequence[int]]](list)
    missed = defaultdict[str, dict[int | str, tuple[int, int]]](dict)
    counted = set[tuple[str | None, str, int, int]]()
    for answer in answers:
        key = answer.key
        if (key.repeat, key.batch) != (0, batch):
            continue
        name = names[key.candidate]
        places = [place for place in groups[key.group] if key.turn < len(plan.prompts[place].turns)]
        missed_of = answer.missed or (0,) * len(places)
        for place, row, num_missed in zip(places, answer.token_ids, missed_of, strict=True):
            # A group that is filled up holds prompts that were answered before, or a prompt several times; and one
            # draft vocabulary may be compared with several trees.
            if (name, key.mode, key.turn, place) in counted:
                continue
            counted.add((name, key.mode, key.turn, place))
            category = plan.prompts[place].category
            if name is None:
                texts[category].append(row)
            else:
                tokens, before = missed[category].get(name, (0, 0))
                missed[category][name] = (tokens + len(row), before + num_missed)
    for category in {**texts, **missed}:
        log.add_tokens(texts[category], missed[category], category)
    return log


def _names(plan: Plan) -> dict[str, str | None]:
    """Name each candidate's draft vocabulary, None for plain decoding; those of one name are one vocabulary."""
    plain, *drafted = plan.candidates
    names, sizes = dict[str, str | None]({plain.label: None}), dict[str, str]()
    for each in drafted:
        name = vocabulary_name(each.draft_vocab, each.follow)
        name = name if each.head == drafted[0].head else f"{each.head}: {name}"
        # An artifact's own ids, and as many by another ranking.
        is_other = sizes.setdefault(name, each.size) != each.size
        names[each.label] = f"{name} ({each.size})" if is_other else name
    return names
