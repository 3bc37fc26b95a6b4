"""From answers to figures, a row for every candidate, mode, batch and category, as text, JSON and an HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from eagle_slim.convert.atomic import atomic_directory
from eagle_slim.vocab_tools.coverage import aligned

from ..api.stats import GenerationStats
from .candidates import Candidate
from .comparison_options import MARKER, CompareOptions
from .statistics import Estimate, Measured, Timings, measure, ratio

ALL = "all"
_DATA_MARK = "/*DATA*/null"


@dataclass(frozen=True)
class Answer:
    """One call of `generate`.

    ``group``: the number of its first prompt; ``turn``: from 0. ``category`` is None for a batch of several.
    ``num_identical``: answers equal to plain decoding's, token for token, of ``num_answers``.
    """

    mode: str
    batch: int
    group: int
    turn: int
    candidate: str
    category: str | None
    num_identical: int
    num_answers: int
    stats: GenerationStats


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the table: a candidate, a mode, a batch, and a category (or "all").

    ``num_prompts``: prompts (groups of them in a batch) that the intervals are over. ``measured``: None where no step
    was made. ``is_compared``: false where a candidate failed at so many turns that its figures are of others.
    """

    candidate: Candidate
    mode: str
    batch: int
    category: str
    num_prompts: int
    num_answers: int
    num_identical: int
    stats: GenerationStats
    measured: Measured | None = None
    speedup: Estimate | None = None
    is_compared: bool = True

    @property
    def label(self) -> str:
        """Name of the candidate."""
        return self.candidate.label

    @property
    def tokens_per_s(self) -> float:
        """Speed of all sequences of a batch together, prompt processing left out."""
        return self.measured.tokens_per_s.value if self.measured else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the row's figures under their names; times in seconds, None where nothing was measured."""
        measured, stats = self.measured, self.stats
        estimates = {
            "mean_accepted_length": measured.accepted_length if measured and stats.num_passes else None,
            "tokens_per_s": measured.tokens_per_s if measured else None,
            "speedup": self.speedup,
        }
        names = ("mode", "batch", "category", "num_prompts", "num_answers", "num_identical", "is_compared")
        counts = ("is_exact", "num_new_tokens", "num_passes", "num_accepted_tokens", "num_missed")
        times = {"step_s": "step_s", **{f"{phase}_s_per_step": f"{phase}_s" for phase in ("draft", "verify", "host")}}
        return {
            **self.candidate.to_json(),
            **{name: getattr(self, name) for name in names},
            **{name: getattr(stats, name) for name in counts},
            "missed_rate": None if self.candidate.is_plain or not stats.num_new_tokens else round(stats.missed_rate, 6),
            **{name: _end(estimate, "value") for name, estimate in estimates.items()},
            **{f"{name}_{end}": _end(estimate, end) for name, estimate in estimates.items() for end in ("low", "high")},
            **{name: round(getattr(measured, of), 6) if measured else None for name, of in times.items()},
            "total_s": round(stats.total_s, 4),
            "accepted_lengths": {str(length): count for length, count in stats.accepted_lengths.items()},
        }

    def cells(self) -> dict[str, str]:
        """Return the row of the table by its headings, "-" where nothing was measured."""
        measured, stats = self.measured, self.stats
        equal = f"{self.num_identical}/{self.num_answers}" if self.num_answers else "-"
        return {
            "size": self.label,
            "mode": self.mode,
            "batch": str(self.batch),
            "category": self.category,
            "accepted length": f"{measured.accepted_length.value:.3f}" if measured and stats.num_passes else "-",
            "missed": "-" if self.candidate.is_plain or not stats.num_new_tokens else f"{stats.missed_rate:.1%}",
            "tokens/s": _with_range(measured.tokens_per_s if measured else None, 1),
            "speed-up": _with_range(self.speedup, 2),
            "ms/step": f"{measured.step_s * 1e3:.1f}" if measured else "-",
            "passes": str(stats.num_passes) if self.num_answers else "-",
            "exact": "equal" if stats.is_exact else equal,
        }


@dataclass(frozen=True)
class Advice:
    """Recommend a candidate for one mode and batch.

    ``candidate``: the fastest; of several that may be, the one that reads the fewest bytes; "plain" where that beats
    them all. ``is_decided``: whether every other candidate is significantly slower, or shown to be as fast.
    ``as_fast``: candidates without a significant difference from the fastest, that one included. ``beats_plain`` is
    None without a significant difference.
    """

    mode: str
    batch: int
    headline: str
    candidate: str
    draft_vocab: int
    is_decided: bool
    as_fast: tuple[str, ...]
    beats_plain: bool | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Omission:
    """Answers that are in no figure, and why; ``prompt`` is the first of the group.

    ``candidate``: the first whose, "plain" if plain decoding's, too. ``is_fault``: neither prompt nor memory is why.
    """

    candidate: str
    message: str
    batch: int
    prompt: int
    is_fault: bool
    num_times: int = 0

    def __str__(self) -> str:
        times = f" ({self.num_times} times)" if self.num_times > 1 else ""
        return f"{self.candidate}, batch {self.batch}, prompt {self.prompt}{times}: {self.message}"


@dataclass(frozen=True)
class Comparison:
    """Hold everything that `compare` measured; ``answers`` in the order in which they were made."""

    rows: Sequence[ComparisonRow]
    setup: Mapping[str, Any]
    recommendations: Sequence[Advice]
    answers: Sequence[Answer]
    is_complete: bool = True
    omissions: Sequence[Omission] = ()

    def write(self, folder: str | Path, force: bool = False) -> None:
        """Write compare.json and compare.html into a folder, both or none. Raises as `atomic_directory`."""
        with atomic_directory(folder, force=force, marker=MARKER) as inside:
            (inside / MARKER).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            (inside / "compare.html").write_bytes(self.to_html().encode(errors="backslashreplace"))

    def to_json(self) -> dict[str, Any]:
        """Return everything but the answers as plain values: setup, rows, advice."""
        return {
            "setup": self.setup,
            "is_complete": self.is_complete,
            "rows": [row.to_json() for row in self.rows],
            "recommendations": [asdict(each) for each in self.recommendations],
            "omissions": [{**asdict(each), "text": str(each)} for each in self.omissions],
        }

    def to_text(self) -> str:
        """Return an aligned table and the advice.

        Ranges are 95% intervals over prompts. Times are in milliseconds a step; ``missed`` is the share of tokens
        outside the draft vocabulary; ``exact``: answers equal to plain decoding's, of all; "equal" where the target
        promises that for every type of weights, and no answer broke the promise. "-": not measured.
        """
        cells = [row.cells() for row in self.rows]
        table = aligned([[*cells[0]], *([*each.values()] for each in cells)], 4)
        return "\n\n".join([table, *("\n  ".join([each.headline, *each.reasons]) for each in self.recommendations)])

    def to_html(self) -> str:
        """Return one HTML page with charts, table and hover; it fetches nothing."""
        template = files("eagle_slim.runtime.compare").joinpath("page.html").read_text(encoding="utf-8")
        # Inside a script element only "</" and "<!--" could end the data or change how it is read.
        return template.replace(_DATA_MARK, json.dumps(self.to_json(), ensure_ascii=False).replace("<", "\\u003c"))


def build_rows(
    candidates: Sequence[Candidate], options: CompareOptions, answers: Sequence[Answer]
) -> list[ComparisonRow]:
    """Work out the figures of every candidate, mode, batch and category."""
    categories = list(dict.fromkeys(answer.category for answer in answers if answer.category is not None))
    rows: list[ComparisonRow] = []
    for mode, batch in product(options.modes, options.batches):
        of_both = [answer for answer in answers if (answer.mode, answer.batch) == (mode, batch)]
        for category in (None, *(categories if len(categories) > 1 else ())):
            if chosen := [answer for answer in of_both if category in (None, answer.category)]:
                # In quotes, a category of this name is not taken for all of them.
                name = ALL if category is None else f'"{ALL}"' if category == ALL else category
                rows += _rows(candidates, chosen, (mode, batch, name))
    return rows


def _rows(
    candidates: Sequence[Candidate], answers: Sequence[Answer], names: tuple[str, int, str]
) -> Iterator[ComparisonRow]:
    plain = candidates[0]
    given: dict[str, dict[tuple[int, int], Answer]] = {each.label: {} for each in candidates}
    for answer in answers:
        given[answer.candidate][answer.group, answer.turn] = answer
    # Figures are of the turns that all have answered, but for candidates that failed so often that hardly any are left.
    turns: Set[tuple[int, int]] = given[plain.label].keys()
    compared = list[Candidate]()
    for each in sorted(candidates, key=lambda each: -len(given[each.label])):
        shared = turns & given[each.label].keys()
        if 2 * len(shared) > len(given[plain.label]):
            turns = shared
            compared.append(each)
    joint = _measured(compared, given, turns)
    for each in candidates:
        is_compared = each in compared
        its_turns = turns if is_compared else given[each.label].keys()
        figures = joint if is_compared else _measured([plain, each], given, its_turns)
        chosen = [answer for turn, answer in given[each.label].items() if turn in its_turns]
        measured, base = figures.get(each.label), figures.get(plain.label)
        num_groups, stats = len({group for group, _ in its_turns}), GenerationStats.sum(each.stats for each in chosen)
        num_answers = sum(answer.num_answers for answer in chosen)
        num_identical = sum(answer.num_identical for answer in chosen)
        speedup = ratio(measured, base, num_groups) if measured and base else None
        counts = num_groups, num_answers, num_identical
        yield ComparisonRow(each, *names, *counts, stats, measured, speedup, is_compared)


def _measured(
    candidates: Sequence[Candidate], given: Mapping[str, Mapping[tuple[int, int], Answer]], turns: Set[tuple[int, int]]
) -> dict[str, Measured]:
    groups = {group: number for number, group in enumerate(sorted({group for group, _ in turns}))}
    answers = {
        each.label: [answer for turn, answer in given[each.label].items() if turn in turns] for each in candidates
    }
    return measure({each.label: _timings(each, answers[each.label], groups) for each in candidates})


def _timings(candidate: Candidate, answers: Sequence[Answer], groups: Mapping[int, int]) -> Timings:
    times_s = np.array([step for answer in answers for step in answer.stats.steps], dtype=np.float64).reshape(-1, 3)
    prompts = [groups[answer.group] for answer in answers for _ in answer.stats.steps]
    accepted, passes = np.zeros(len(groups)), np.zeros(len(groups))
    for answer in answers:
        passes[groups[answer.group]] += answer.stats.num_passes
        accepted[groups[answer.group]] += answer.stats.num_accepted_tokens
    return Timings(times_s, np.array(prompts, dtype=np.int64), accepted, passes, candidate.tree[2])


def _with_range(estimate: Estimate | None, digits: int) -> str:
    if estimate is None:
        return "-"
    ends = [f"{end:.{digits}f}" for end in (estimate.value, estimate.low, estimate.high)]
    return "{} ({} to {})".format(*ends) if math.isfinite(estimate.high) and len(set(ends)) > 1 else ends[0]


def _end(estimate: Estimate | None, end: str) -> float | None:
    value = math.inf if estimate is None else getattr(estimate, end)
    return round(value, 4) if math.isfinite(value) else None
