"""Which draft vocabulary or server to use, as far as the measurement tells, for each mode and batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from .report import ALL, Advice, Row
from .statistics import Estimate, ratio

# A smaller difference in speed counts as none: two runs of the same work differ by as much on a quiet machine.
_MARGIN = 0.02


def recommend(rows: Sequence[Row]) -> list[Advice]:
    """Advise for each mode and batch size; the rows of each stand together, plain decoding or server 1 first."""
    places = groupby((row for row in rows if row.category == ALL), key=lambda row: (row.mode, row.batch))
    return [_advise(mode, batch, *place) for (mode, batch), place in places]


def _advise(mode: str, batch: int, plain: Row, *rows: Row) -> Advice:
    measured = [row for row in rows if row.measured is not None]
    where = mode if batch == 1 else f"{mode}, batch {batch}"
    if not measured:
        reason = "Every answer ended with its first token. Give more prompts or more new tokens."
        return Advice(mode, batch, f"{where}: no step was measured", plain.label, 0, False, (), None, (reason,))
    best = max(measured, key=lambda row: row.tokens_per_s)
    figures, comparisons = {row.label: row.measured for row in measured if row.measured}, max(1, len(measured) - 1)
    others = {
        label: ratio(found, figures[best.label], best.num_prompts, comparisons)
        for label, found in figures.items()
        if label != best.label
    }
    slower = {label for label, speed in others.items() if speed.high < 1 and speed.value < 1 - _MARGIN}
    close = [row for row in measured if row.label not in slower]
    chosen = min(close, key=lambda row: (row.candidate.draft_bytes, -row.tokens_per_s))
    # Plain decoding must beat all that may be the fastest.
    verdicts = {_beats(row.speedup) for row in close}
    beats = False if verdicts == {False} else _beats(chosen.speedup) or None
    advised = plain if beats is False else chosen
    speeds = [speed for label, speed in others.items() if label not in slower]
    are_as_fast = all(speed.value >= 1 - _MARGIN and speed.low >= 1 - 2 * _MARGIN for speed in speeds)
    reasons = tuple(_reasons(chosen, best, close, measured, others))
    return Advice(
        mode,
        batch,
        f"{where}: {_headline(plain, chosen, close, beats)}",
        advised.label,
        advised.candidate.draft_vocab,
        beats is False or are_as_fast,
        tuple(row.label for row in close),
        beats,
        reasons,
    )


def _headline(plain: Row, chosen: Row, close: Sequence[Row], beats: bool | None) -> str:
    base = plain.label if chosen.candidate.is_server else "plain decoding"
    speed = "" if chosen.speedup is None else f" at {_interval(chosen.speedup)} times its speed"
    if beats is False:
        return f"{base} is faster here: {chosen.label} runs{speed}"
    begin = f"{chosen.label} beats {base} here: it runs{speed}"
    if beats is None:
        begin = f"no significant difference from {base}: {chosen.label} ran{speed}"
    if len(close) == 1:
        return begin
    names = "; ".join(row.label for row in close)
    is_smaller = len({row.candidate.draft_bytes for row in close}) > 1
    merit = f", of which {chosen.label} reads the fewest bytes" if is_smaller else ""
    return f"{begin}; no significant difference between {names}{merit}"


def _beats(speedup: Estimate | None) -> bool | None:
    if speedup is None or speedup.low <= 1 <= speedup.high:
        return None
    return speedup.value > 1


def _reasons(
    chosen: Row, best: Row, close: Sequence[Row], measured: Sequence[Row], others: Mapping[str, Estimate]
) -> list[str]:
    found = chosen.measured
    assert found is not None
    length = f"{found.accepted_length.value:.2f} tokens per pass, " if chosen.stats.num_passes else ""
    draft, verify, host, step = (
        f"{each * 1e3:.1f}" for each in (found.draft_s, found.verify_s, found.host_s, found.step_s)
    )
    times = f"{step} ms a step (draft {draft}, verify {verify}, host {host}) ="
    if chosen.candidate.is_server:
        times = f"{draft} ms to the first token,"
    reasons = [f"{chosen.label}: {length}{times} {chosen.tokens_per_s:.1f} tokens/s."]
    for row in measured:
        if row is not best:
            how = "no significant difference" if row in close else "slower"
            reasons.append(f"{row.label} runs at {_interval(others[row.label])} of the speed of {best.label}: {how}.")
    return reasons


def _interval(estimate: Estimate) -> str:
    ends = f" ({estimate.low:.2f} to {estimate.high:.2f})" if math.isfinite(estimate.high) else ""
    return f"{estimate.value:.2f}{ends}"
