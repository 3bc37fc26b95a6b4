"""From answers to figures, a row for every candidate, mode, batch size and category, as text, JSON and an HTML page."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from eagle_slim.convert.atomic import atomic_directory
from eagle_slim.vocab_tools.coverage import aligned

from ..api.output import GenerationOutput
from ..api.stats import AcceptedLengths
from .candidates import PLAIN, Candidate, CoverageCurve
from .options import MARKER, CompareOptions
from .statistics import Estimate, Measured, Timings, measure, ratio

ALL = "all"
_DATA_MARK = "/*DATA*/null"
_NUM_NAMES = 4
"""Columns of the table that hold names and stand on the left."""


class Place(NamedTuple):
    """Place of an answer in a comparison; ``group`` is the number of the first prompt, ``turn`` counts from 0."""

    repeat: int
    batch: int
    group: int
    mode: str
    turn: int


@dataclass(frozen=True)
class Answer:
    """Results and times of one call of `generate`.

    ``category`` is None for a batch of several categories. ``num_identical``: answers equal to plain decoding's, token
    for token. ``steps``: draft, verify and host seconds of each step. ``token_ids`` by prompt answered. ``num_missed``:
    tokens outside the draft vocabulary, 0 for plain decoding. ``is_exact``: whether the target promises that drafting
    changes no token.
    """

    place: Place
    candidate: str
    category: str | None
    num_identical: int
    accepted_lengths: Mapping[int, int]
    total_s: float
    steps: tuple[tuple[float, float, float], ...]
    token_ids: tuple[tuple[int, ...], ...]
    num_missed: int = 0
    is_exact: bool = False

    @classmethod
    def of(
        cls, place: Place, label: str, category: str | None, output: GenerationOutput, plain: GenerationOutput
    ) -> Answer:
        """Take what a call returned; ``plain``: what plain decoding of the same prompts returned."""
        stats = output.stats
        tokens = tuple(tuple(row) for row in output.token_ids)
        num_identical = sum(ours == own for ours, own in zip(output.token_ids, plain.token_ids, strict=True))
        return cls(
            place, label, category, num_identical, stats.accepted_lengths, stats.total_s, stats.steps,
            tokens, stats.num_missed, stats.exactness is not None,
        )  # fmt: skip


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
    """New tokens outside the draft vocabulary; 0 for plain decoding, which drafts nothing."""
    accepted_lengths: Mapping[int, int]
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
            "total_s": round(self.total_s, 4),
            "accepted_lengths": {str(length): count for length, count in sorted(self.accepted_lengths.items())},
        }


@dataclass(frozen=True)
class CompareReport:
    """Everything that was measured; `recommend` draws the conclusions."""

    rows: tuple[Row, ...]
    curves: tuple[CoverageCurve, ...]
    setup: dict[str, Any]
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


def build_report(
    candidates: Sequence[Candidate], options: CompareOptions, answers: Sequence[Answer],
    curves: Iterable[CoverageCurve], setup: dict[str, Any], is_complete: bool = True,
) -> CompareReport:  # fmt: skip
    """Work out the figures of every candidate, mode, batch size and category from answers, all of them or a part."""
    categories = list(dict.fromkeys(answer.category for answer in answers if answer.category is not None))
    shown = [ALL, *(categories if len(categories) > 1 else [])]
    rows: list[Row] = []
    for mode in options.modes:
        for batch in options.batches:
            run = [answer for answer in answers if (answer.place.mode, answer.place.batch) == (mode, batch)]
            for category in shown:
                chosen = [answer for answer in run if category in (ALL, answer.category)]
                if chosen:
                    rows += _rows(candidates, chosen, (mode, batch, category))
    return CompareReport(tuple(rows), tuple(curves), setup, is_complete)


def _rows(candidates: Sequence[Candidate], answers: Sequence[Answer], names: tuple[str, int, str]) -> Iterable[Row]:
    by_label = defaultdict[str, list[Answer]](list)
    for answer in answers:
        by_label[answer.candidate].append(answer)
    groups = {group: place for place, group in enumerate(sorted({answer.place.group for answer in answers}))}
    found = measure({each.label: _timings(by_label[each.label], groups, each.tree[2]) for each in candidates})
    for candidate in candidates:
        own = by_label[candidate.label]
        lengths: Counter[int] = Counter()
        for answer in own:
            lengths.update(answer.accepted_lengths)
        measured, plain = found.get(candidate.label), found.get(PLAIN)
        yield Row(
            candidate,
            *names,
            num_prompts=len(groups),
            num_answers=sum(len(answer.token_ids) for answer in own),
            num_identical=sum(answer.num_identical for answer in own),
            num_new_tokens=sum(len(row) for answer in own for row in answer.token_ids),
            num_missed=sum(answer.num_missed for answer in own),
            accepted_lengths=dict(sorted(lengths.items())),
            total_s=sum(answer.total_s for answer in own),
            measured=measured,
            speedup=ratio(measured, plain, len(groups)) if measured and plain else None,
            is_exact=bool(own) and all(answer.is_exact for answer in own),
        )


def _timings(answers: Sequence[Answer], groups: Mapping[int, int], nodes: int) -> Timings:
    steps = np.array([step for answer in answers for step in answer.steps], dtype=np.float64).reshape(-1, 3)
    owners = [groups[answer.place.group] for answer in answers for _ in answer.steps]
    accepted, passes = np.zeros(len(groups)), np.zeros(len(groups))
    for answer in answers:
        place = groups[answer.place.group]
        passes[place] += sum(answer.accepted_lengths.values())
        accepted[place] += sum(length * count for length, count in answer.accepted_lengths.items())
    draft_s, verify_s, host_s = steps.T
    return Timings(draft_s, verify_s, host_s, np.array(owners, dtype=np.int64), accepted, passes, nodes)


def write_report(folder: str | Path, data: Mapping[str, Any], force: bool = False) -> None:
    """Write a comparison's JSON and its page into a folder, both or none. Raises as `atomic_directory`."""
    with atomic_directory(folder, force=force, marker=MARKER) as inside:
        (inside / MARKER).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (inside / "compare.html").write_text(html_page(data), encoding="utf-8")


def html_page(data: Mapping[str, Any]) -> str:
    """Return the page with charts, table and hover for a comparison's JSON: one file, which fetches nothing."""
    template = files("eagle_slim.runtime.compare").joinpath("page.html").read_text(encoding="utf-8")
    # Inside a script element only "</" and "<!--" could end the data or change how it is read.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    assert _DATA_MARK in template
    return template.replace(_DATA_MARK, text)


def table(report: CompareReport) -> str:
    """Return the rows as an aligned table."""
    return aligned(list(_cells(report)), _NUM_NAMES)


def _cells(report: CompareReport) -> Iterator[list[str]]:
    yield [
        "size", "mode", "batch", "category", "accepted", "missed", "tokens/s", "speed-up", "ms/step", "draft", "verify",
        "host", "passes", "exact",
    ]  # fmt: skip
    for row in report.rows:
        found = row.measured
        times = (found.step_s, found.draft_s, found.verify_s, found.host_s) if found else ()
        yield [
            row.label,
            row.mode,
            str(row.batch),
            row.category,
            f"{found.accepted_length.value:.3f}" if found else "-",
            "-" if row.candidate.is_plain or not row.num_new_tokens else f"{row.missed_rate:.1%}",
            _with_range(found.tokens_per_s if found else None, 1),
            _with_range(row.speedup, 2),
            *([f"{seconds * 1e3:.1f}" for seconds in times] or ["-"] * 4),
            str(row.num_passes) if row.num_answers else "-",
            "equal" if row.is_exact else f"{row.num_identical}/{row.num_answers}" if row.num_answers else "-",
        ]


def _with_range(estimate: Estimate | None, digits: int) -> str:
    """Format a value with its interval, unless that says nothing, or is none."""
    if estimate is None:
        return "-"
    ends = [f"{end:.{digits}f}" for end in (estimate.value, estimate.low, estimate.high)]
    return "{} ({} to {})".format(*ends) if estimate.says_something and len(set(ends)) > 1 else ends[0]


def _end(estimate: Estimate | None, end: str) -> float | None:
    """Return an estimate's value, or an end of its interval, for JSON: None where there is none."""
    value = math.inf if estimate is None else getattr(estimate, end)
    return round(value, 4) if math.isfinite(value) else None
