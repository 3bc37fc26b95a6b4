"""Recommend a draft vocabulary for each mode and batch, as far as the measurement tells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from .report import ALL, Advice, ComparisonRow
from .statistics import ENOUGH_PROMPTS, Estimate, ratio

# A smaller difference in speed counts as none: two runs of the same work differ by as much on a quiet machine.
_MARGIN = 0.02
Rows = Sequence[ComparisonRow]


def recommend(rows: Rows) -> list[Advice]:
    """Advise for each mode and batch; the rows of each stand together, plain decoding first."""
    groups = groupby((row for row in rows if row.category == ALL), key=lambda row: (row.mode, row.batch))
    return [_advise(mode, batch, *group) for (mode, batch), group in groups]


def _advise(mode: str, batch: int, plain: ComparisonRow, *rows: ComparisonRow) -> Advice:
    measured = [row for row in rows if row.measured is not None and row.is_compared]
    where = mode if batch == 1 else f"{mode}, batch {batch}"
    failed = [f"{row.label} is not compared, as it failed too often." for row in rows if not row.is_compared]
    if not measured:
        reasons = ("Answers ended with their first token: give more prompts or more new tokens.", *failed)
        return Advice(mode, batch, f"{where}: no step was measured.", plain.label, 0, False, (), None, reasons)
    best = max(measured, key=lambda row: row.tokens_per_s)
    figures, comparisons = {row.label: row.measured for row in measured if row.measured}, max(1, len(measured) - 1)
    fastest = figures.pop(best.label)
    others = {label: ratio(each, fastest, best.num_prompts, comparisons) for label, each in figures.items()}
    slower = {label for label, speed in others.items() if speed.high < 1 and speed.value < 1 - _MARGIN}
    close = [row for row in measured if row.label not in slower]
    chosen = min(close, key=lambda row: (row.candidate.draft_bytes, -row.tokens_per_s))
    # Plain decoding must beat all that may be the fastest.
    verdicts = {_beats(row.speedup) for row in close}
    beats = False if verdicts == {False} else _beats(chosen.speedup) or None
    advised = plain if beats is False else chosen
    speeds = [speed for label, speed in others.items() if label not in slower]
    are_as_fast = all(speed.value >= 1 - _MARGIN and speed.low >= 1 - 2 * _MARGIN for speed in speeds)
    is_decided = beats is False or (are_as_fast and best.num_prompts >= ENOUGH_PROMPTS)
    headline, size = f"{where}: {_headline(chosen, beats)}", advised.candidate.draft_vocab
    as_fast, reasons = tuple(row.label for row in close), (*_reasons(chosen, best, close, measured, others), *failed)
    return Advice(mode, batch, headline, advised.label, size, is_decided, as_fast, beats, reasons)


def _headline(chosen: ComparisonRow, beats: bool | None) -> str:
    speed = "" if chosen.speedup is None else f"{_interval(chosen.speedup)} times"
    if beats:
        return f"{chosen.label} beats plain decoding, at {speed} its speed."
    if beats is False:
        return f"plain decoding is faster: {chosen.label} runs at {speed} its speed."
    if chosen.num_prompts < ENOUGH_PROMPTS:
        return f"too few prompts to compare, {ENOUGH_PROMPTS * chosen.batch} are enough."
    return f"no significant difference: {chosen.label} ran at {speed} the speed of plain decoding."


def _beats(speedup: Estimate | None) -> bool | None:
    if speedup is None or speedup.low <= 1 <= speedup.high:
        return None
    return speedup.value > 1


def _reasons(
    chosen: ComparisonRow, best: ComparisonRow, close: Rows, measured: Rows, others: Mapping[str, Estimate]
) -> list[str]:
    figures = chosen.measured
    assert figures is not None
    phases = figures.draft_s, figures.verify_s, figures.host_s, figures.step_s
    draft, verify, host, step = (f"{each * 1e3:.1f}" for each in phases)
    length = f"{chosen.label}: accepted length {figures.accepted_length.value:.2f}"
    times = f"{step} ms a step (draft {draft}, verify {verify}, host {host})"
    reasons = [f"{length}, {times} = {chosen.tokens_per_s:.1f} tokens/s."]
    is_enough = chosen.num_prompts >= ENOUGH_PROMPTS
    if chosen.speedup and not is_enough:
        reasons.append(f"{chosen.label} ran at {_interval(chosen.speedup)} times the speed of plain decoding.")
    for row in measured:
        if row is not best:
            how = ": no significant difference" if row in close else ": slower"
            speed = f"{_interval(others[row.label])} of the speed of {best.label}"
            reasons.append(f"{row.label} runs at {speed}{how if is_enough else ''}.")
    if is_enough and len({row.candidate.draft_bytes for row in close}) > 1:
        reasons.append(f"Of those without a significant difference, {chosen.label} reads the fewest bytes.")
    return reasons


def _interval(estimate: Estimate) -> str:
    ends = f" ({estimate.low:.2f} to {estimate.high:.2f})" if math.isfinite(estimate.high) else ""
    return f"{estimate.value:.2f}{ends}"
