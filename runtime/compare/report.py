"""From answers to figures: a row for every candidate, mode, batch size and category."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..requests.stats import AcceptedLengths
from .answers import Answer
from .candidates import PLAIN, Candidate, CoverageCurve
from .plan import Plan
from .statistics import Estimate, Measured, Timings, find_disturbed, measure, ratio

ALL = "all"


@dataclass(frozen=True)
class Row(AcceptedLengths):
    """One line of the table: a candidate, a mode, a batch size, and a category (or "all")."""

    candidate: Candidate
    mode: str
    batch: int
    category: str
    num_prompts: int
    """Prompts (groups of them in a batch) that the intervals are over."""
    num_answers: int
    num_identical: int
    """Answers equal to plain decoding's, token for token."""
    num_new_tokens: int
    num_missed: int
    """New tokens that the draft vocabulary did not hold; 0 for plain decoding, which drafts nothing."""
    accepted_lengths: Mapping[int, int]
    prefill_s: float
    total_s: float
    measured: Measured | None = None
    """None where no step was made: every answer ended with its first token."""
    speedup: Estimate | None = None
    """How many times faster than plain decoding."""
    is_exact: bool = False
    """Whether the target promised, for every answer, that drafting changes no token."""

    @property
    def label(self) -> str:
        """Name of the candidate."""
        return self.candidate.label

    @property
    def missed_rate(self) -> float:
        """Share of the new tokens that the draft vocabulary did not hold."""
        return self.num_missed / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, prompt processing left out; of all sequences of a batch together."""
        return self.measured.tokens_per_s.value if self.measured else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of one step: medians of drafting, verifying and host work."""
        return self.measured.step_s if self.measured else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the row's figures under their names; times in seconds, None where nothing was measured."""
        found = self.measured
        estimates: dict[str, Estimate | None] = {
            "mean_accepted_length": found.accepted_length if found else None,
            "tokens_per_s": found.tokens_per_s if found else None,
            "speedup": self.speedup,
        }
        names = (
            "mode", "batch", "category", "num_prompts", "num_answers", "num_identical", "is_exact", "num_new_tokens",
            "num_passes", "num_accepted_tokens", "num_missed",
        )  # fmt: skip
        times = {"step_s": "step_s", **{f"{part}_s_per_step": f"{part}_s" for part in ("draft", "verify", "host")}}
        return {
            **self.candidate.to_json(),
            **{name: getattr(self, name) for name in names},
            "missed_rate": round(self.missed_rate, 6) if self.num_new_tokens else None,
            **{name: _end(estimate, "value") for name, estimate in estimates.items()},
            **{f"{name}_{end}": _end(estimate, end) for name, estimate in estimates.items() for end in ("low", "high")},
            **{name: round(getattr(found, own), 6) if found else None for name, own in times.items()},
            "prefill_s": round(self.prefill_s, 4),
            "total_s": round(self.total_s, 4),
            "accepted_lengths": {str(length): count for length, count in sorted(self.accepted_lengths.items())},
        }


@dataclass(frozen=True)
class CompareReport:
    """Everything that was measured; `recommend` draws the conclusions."""

    rows: tuple[Row, ...]
    curves: tuple[CoverageCurve, ...]
    setup: dict[str, Any]
    remarks: tuple[str, ...] = ()
    """Disturbances of the measurement, as sentences."""
    is_complete: bool = True
    """Whether all answers that were planned are in."""

    def find(self, label: str, mode: str, category: str = ALL, batch: int | None = None) -> Row:
        """Return one row, of the first batch size unless one is given. Raises KeyError when it is not there."""
        for row in self.rows:
            if (row.label, row.mode, row.category) == (label, mode, category) and batch in (None, row.batch):
                return row
        raise KeyError((label, mode, category, batch))

    @property
    def modes(self) -> list[str]:
        """Names of the modes, in the order they were run."""
        return list(dict.fromkeys(row.mode for row in self.rows))

    @property
    def batches(self) -> list[int]:
        """Batch sizes, in the order they were run."""
        return list(dict.fromkeys(row.batch for row in self.rows))

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates, in the order given, without plain decoding."""
        return list(dict.fromkeys(row.candidate for row in self.rows if not row.candidate.is_plain))


def build_report(plan: Plan, answers: Sequence[Answer], curves: Iterable[CoverageCurve] = ()) -> CompareReport:
    """Work out the figures of every candidate, mode, batch size and category from answers, all of them or a part."""
    categories = list(dict.fromkeys(answer.category for answer in answers if answer.category is not None))
    shown = [ALL, *(categories if len(categories) > 1 else [])]
    rows: list[Row] = []
    remarks: list[str] = []
    for mode in plan.options.modes:
        for batch in plan.options.batches:
            run = [answer for answer in answers if (answer.key.mode, answer.key.batch) == (mode, batch)]
            for category in shown:
                chosen = _comparable([answer for answer in run if category in (ALL, answer.category)])
                if chosen:
                    found = _measure(plan.candidates, chosen)
                    rows += _rows(plan.candidates, chosen, found, (mode, batch, category))
                    if category == ALL:
                        remarks += _remarks(found, mode if batch == 1 else f"{mode}, batch {batch}")
    return CompareReport(
        tuple(rows), tuple(curves), plan.describe(), tuple(remarks), is_complete=len(answers) == plan.num_calls
    )


def _comparable(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers to turns that every candidate has answered that answered any: Ctrl-C may have come between.

    So that all figures of a table are of the same prompts, passes and misses too.
    """
    by_label = defaultdict[str, set[tuple[int, int, int]]](set)
    for answer in answers:
        by_label[answer.key.candidate].add(_turn(answer))
    complete = set.intersection(*by_label.values()) if by_label else set()
    return [answer for answer in answers if _turn(answer) in complete]


def _turn(answer: Answer) -> tuple[int, int, int]:
    return answer.key.repeat, answer.key.group, answer.key.turn


def _measure(candidates: Sequence[Candidate], answers: Sequence[Answer]) -> dict[str, Measured]:
    by_label = defaultdict[str, list[Answer]](list)
    for answer in answers:
        by_label[answer.key.candidate].append(answer)
    groups = {group: place for place, group in enumerate(sorted({answer.key.group for answer in answers}))}
    timings = {}
    for candidate in (each for each in candidates if each.label in by_label):
        used = by_label[candidate.label]
        steps = np.array([step for a in used for step in a.steps], dtype=np.float64).reshape(-1, 3)
        owners = [groups[a.key.group] for a in used for _ in a.steps]
        accepted, passes = np.zeros(len(groups)), np.zeros(len(groups))
        for a in used:
            passes[groups[a.key.group]] += sum(a.accepted_lengths.values())
            accepted[groups[a.key.group]] += sum(length * count for length, count in a.accepted_lengths.items())
        timings[candidate.label] = Timings(
            steps[:, 0], steps[:, 1], steps[:, 2], np.array(owners, dtype=np.int64), accepted, passes,
            nodes=candidate.tree[2],
        )  # fmt: skip
    return measure(timings)


def _rows(
    candidates: Sequence[Candidate],
    answers: Sequence[Answer],
    found: Mapping[str, Measured],
    place: tuple[str, int, str],
) -> Iterable[Row]:
    for candidate in candidates:
        label = candidate.label
        own = [answer for answer in answers if answer.key.candidate == label]
        lengths: Counter[int] = Counter()
        for answer in own:
            lengths.update(answer.accepted_lengths)
        num_prompts = len({answer.key.group for answer in own})
        speedup = ratio(found[label], found[PLAIN], num_prompts) if label in found and PLAIN in found else None
        yield Row(
            candidate,
            *place,
            num_prompts=num_prompts,
            num_answers=sum(answer.num_answers for answer in own),
            num_identical=sum(answer.num_identical for answer in own),
            num_new_tokens=sum(len(row) for answer in own for row in answer.token_ids),
            num_missed=sum(answer.num_missed for answer in own),
            accepted_lengths=dict(sorted(lengths.items())),
            prefill_s=sum(answer.prefill_s for answer in own),
            total_s=sum(answer.total_s for answer in own),
            measured=found.get(label),
            speedup=speedup,
            is_exact=bool(own) and all(answer.is_exact for answer in own),
        )


def _remarks(found: Mapping[str, Measured], where: str) -> Iterable[str]:
    for label in find_disturbed(found):
        own, pooled = found[label].own_verify_s, found[label].verify_s
        yield (
            f"{where}, {label}: verifying took {own * 1e3:.1f} ms a step, {pooled * 1e3:.1f} ms over all candidates, "
            "though the work is the same. The machine was busy with something else; measure again when it is quiet."
        )
    plain = found.get(PLAIN)
    slower = [each.verify_s for label, each in found.items() if label != PLAIN]
    if plain and slower and plain.verify_s > 1.25 * min(slower):
        yield (
            f"{where}: plain decoding took {plain.verify_s * 1e3:.1f} ms a step, longer than verifying a whole tree "
            f"({min(slower) * 1e3:.1f} ms), which is more work. The speed-ups are too high; measure again."
        )


def _end(estimate: Estimate | None, end: str) -> float | None:
    """Return an estimate's value, or an end of its interval, for JSON: None where there is none."""
    value = math.inf if estimate is None else getattr(estimate, end)
    return round(value, 4) if math.isfinite(value) else None
