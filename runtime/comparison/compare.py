"""Accuracy against speed: the same prompts over several draft vocabularies and over plain decoding.

Runs are interleaved: every size answers a prompt before the next prompt begins, so that a machine that slows down or
warms up does so for all. Every answer is compared with plain decoding of the same prompt (greedy, or sampled with the
same seed), and the report says how many were identical: all of them in fp32.

A size's speed is its mean accepted length over its mean time per pass (draft, verify and host, without prefill). The
time is measured on this device and does not carry over to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PromptError, UsageError
from ..generation.output import GenerationOutput
from ..generation.stats import GenerationStats
from ..model import SpeculativeModel
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
class Size:
    """A draft vocabulary in the comparison: ``vocab`` None is all that the head has."""

    label: str
    vocab: DraftVocab | None


@dataclass(frozen=True)
class Row:
    """One line of the table: a size (or "plain"), a mode, and a category (or "all")."""

    size: str
    draft_vocab: int
    """0 for plain decoding."""
    mode: str
    category: str
    num_answers: int
    num_identical: int
    """Answers equal to plain decoding's, token for token."""
    stats: GenerationStats
    per_pass_s: tuple[float, ...] = ()
    """Decode seconds per pass of each repeat, over all prompts: the spread is the measurement's noise."""

    @property
    def seconds_per_pass(self) -> float:
        """Draft, verify and host time per target pass."""
        return self.stats.decode_s / self.stats.num_passes if self.stats.num_passes else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: mean accepted length over time per pass."""
        return self.stats.mean_accepted_length / self.seconds_per_pass if self.stats.num_passes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the row's figures under their names; times in seconds."""
        stats = self.stats
        passes = stats.num_passes or 1
        return {
            "size": self.size,
            "draft_vocab": self.draft_vocab,
            "mode": self.mode,
            "category": self.category,
            "num_answers": self.num_answers,
            "num_identical": self.num_identical,
            "num_new_tokens": stats.num_new_tokens,
            "num_passes": stats.num_passes,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "mean_accepted_length": round(stats.mean_accepted_length, 4),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "seconds_per_pass": round(self.seconds_per_pass, 6),
            "draft_s_per_pass": round(stats.draft_s / passes, 6),
            "verify_s_per_pass": round(stats.verify_s / passes, 6),
            "host_s_per_pass": round(stats.host_s / passes, 6),
            "prefill_s": round(stats.prefill_s, 4),
            "total_s": round(stats.total_s, 4),
            "accepted_lengths": {str(length): count for length, count in stats.accepted_lengths.items()},
        }


@dataclass(frozen=True)
class CoverageCurve:
    """Share of tokens inside a draft vocabulary, against its size: both sequences of one length."""

    name: str
    sizes: tuple[int, ...]
    covered: tuple[float, ...]


@dataclass(frozen=True)
class CompareReport:
    """Everything that was measured; `recommend` draws the conclusion."""

    rows: tuple[Row, ...]
    curves: tuple[CoverageCurve, ...]
    setup: dict[str, Any]

    def find(self, size: str, mode: str, category: str = ALL) -> Row:
        """Return one row. Raises KeyError when it is not in the report."""
        for row in self.rows:
            if (row.size, row.mode, row.category) == (size, mode, category):
                return row
        raise KeyError((size, mode, category))

    @property
    def modes(self) -> list[str]:
        """Names of the modes, in the order they were run."""
        return list(dict.fromkeys(row.mode for row in self.rows))

    @property
    def sizes(self) -> list[str]:
        """Labels of the sizes, largest first, without plain decoding."""
        return list(dict.fromkeys(row.size for row in self.rows if row.size != PLAIN))


def compare(
    model: SpeculativeModel,
    sizes: Sequence[Size],
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    max_new_tokens: int,
    repeats: int = 1,
    use_chat_template: bool = True,
    rank_order: NDArray[np.int64] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> CompareReport:
    """Answer every prompt with every size and with plain decoding, in every mode.

    ``rank_order``: target ids, best first, for the coverage curve over the answers; ``advance`` is called after each
    answer (`num_answers` says how many there will be). Later turns of a conversation follow plain decoding's answers.
    Raises `UsageError` for nothing to compare or a size given twice, `PromptError` for a turn without room.
    """
    if not (sizes and prompts and modes):
        raise UsageError(
            "There is nothing to compare. Give at least one size, one prompt and one mode.",
            sizes=len(sizes), prompts=len(prompts), modes=len(modes),
        )  # fmt: skip
    labels = [size.label for size in sizes]
    if len(set(labels)) != len(labels):
        raise UsageError(f"Each size is compared once; got {', '.join(labels)}.", found=labels)
    # A prompt that does not fit the context is refused here, by its place, and not after hours.
    first = [_encode(model, [{"role": "user", "content": prompt.turns[0]}], use_chat_template) for prompt in prompts]
    model.generate(first, max_new_tokens=0)
    models = {size.label: model.with_draft_vocab(size.vocab) for size in sizes}
    for sized in models.values():
        # One-off work (allocation, packing) must not be timed with the first prompt.
        sized.generate(_encode(model, [{"role": "user", "content": "Hi"}], use_chat_template), max_new_tokens=2)

    collected: dict[tuple[str, str, str], list[_Answer]] = {}
    answers: list[int] = []
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            # Must not be mistaken for the row over all categories.
            category = f"{ALL} (category)" if prompt.category == ALL else prompt.category
            for mode in modes:
                messages: list[dict[str, str]] = []
                for number, turn in enumerate(prompt.turns, 1):
                    messages.append({"role": "user", "content": turn})
                    ids = _encode(model, messages, use_chat_template)
                    options = {"max_new_tokens": max_new_tokens, **mode.options}
                    try:
                        plain = model.generate(ids, speculative=False, **options)
                    except PromptError as error:
                        reason = str(error).removeprefix("Prompt 0 ")
                        raise PromptError(
                            f"Turn {number} of prompt {place}, with the conversation before it, {reason}",
                            **{**error.facts, "prompt": place, "turn": number},
                        ) from error
                    advance()
                    runs = {PLAIN: plain}
                    for label, sized in models.items():
                        runs[label] = sized.generate(ids, **options)
                        advance()
                    for label, output in runs.items():
                        answer = _Answer(output, output.token_ids == plain.token_ids, repeat)
                        collected.setdefault((label, mode.name, category), []).append(answer)
                    if repeat == 0:
                        answers += plain.token_ids[0]
                    messages.append({"role": "assistant", "content": plain.text[0] or ""})
    rows = _rows(collected, {label: sized.draft_vocab for label, sized in models.items()}, modes)
    curves = [] if rank_order is None else [answer_coverage(rank_order, answers)]
    return CompareReport(tuple(rows), tuple(curves), _setup(model, prompts, modes, max_new_tokens, repeats))


def num_answers(sizes: Sequence[Size], prompts: Sequence[Prompt], modes: Sequence[Mode], repeats: int) -> int:
    """Return how many answers `compare` will generate."""
    return (len(sizes) + 1) * sum(len(prompt.turns) for prompt in prompts) * len(modes) * repeats


def answer_coverage(rank_order: NDArray[np.int64], token_ids: Sequence[int]) -> CoverageCurve:
    """Measure the share of the given tokens that is among the first N ids of a ranking, for N from 64 to all ids."""
    rank = np.full(max(int(rank_order.max()), max(token_ids, default=0)) + 1, len(rank_order), dtype=np.int64)
    rank[rank_order] = np.arange(len(rank_order))
    ranks = np.sort(rank[np.asarray(token_ids, dtype=np.int64)])
    first = min(64, len(rank_order))
    sizes = np.unique(np.geomspace(first, len(rank_order), 48).round().astype(np.int64))
    covered = np.searchsorted(ranks, sizes, side="left") / max(len(ranks), 1)
    return CoverageCurve("these answers", tuple(sizes.tolist()), tuple(np.round(covered, 6).tolist()))


@dataclass(frozen=True)
class _Answer:
    output: GenerationOutput
    is_identical: bool
    repeat: int


def _rows(
    collected: dict[tuple[str, str, str], list[_Answer]], draft_vocabs: dict[str, int], modes: Sequence[Mode]
) -> Iterable[Row]:
    categories = list(dict.fromkeys(category for _, _, category in collected))
    for mode in modes:
        for category in [ALL, *categories]:
            for label in [PLAIN, *draft_vocabs]:
                chosen = categories if category == ALL else [category]
                answers = [answer for name in chosen for answer in collected.get((label, mode.name, name), [])]
                repeats = sorted({answer.repeat for answer in answers})
                by_repeat = [
                    GenerationStats.sum(answer.output.stats for answer in answers if answer.repeat == repeat)
                    for repeat in repeats
                ]
                yield Row(
                    label,
                    draft_vocabs.get(label, 0),
                    mode.name,
                    category,
                    len(answers),
                    sum(answer.is_identical for answer in answers),
                    GenerationStats.sum(answer.output.stats for answer in answers),
                    tuple(stats.decode_s / stats.num_passes for stats in by_repeat if stats.num_passes),
                )


def _encode(model: SpeculativeModel, messages: list[dict[str, str]], use_chat_template: bool) -> Any:
    if use_chat_template:
        return model.encode_chat(messages)
    return "\n".join(message["content"] for message in messages)


def _setup(
    model: SpeculativeModel, prompts: Sequence[Prompt], modes: Sequence[Mode], max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    device = model.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    tree = model.drafter.tree
    return {
        "target": (model.opened.target_name if model.opened else None) or type(model.target.model).__name__,
        "head": model.opened.head.location if model.opened else "",
        "target_vocab": int(model.target.text_config.vocab_size),
        "device": name,
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "drafter": model.drafter_kind if isinstance(model.drafter_kind, str) else type(model.drafter).__name__,
        "depth": tree.depth,
        "top_k": tree.top_k,
        "total_tokens": tree.total_tokens,
        "num_prompts": len(prompts),
        "num_turns": sum(len(prompt.turns) for prompt in prompts),
        "modes": {mode.name: mode.options for mode in modes},
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "versions": {package: version(package) for package in ("eagle-slim", "torch", "transformers")},
    }
