"""Which draft vocabulary to use on this device, as far as the measurement decides it, for each mode and batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compare import PLAIN
from .report import CompareReport, Row
from .statistics import Estimate, prompts_needed, ratio

# A difference in speed below this is none: two runs of the same work differ as much on a quiet machine.
_MARGIN = 0.02
_FEWEST_PROMPTS = 5


@dataclass(frozen=True)
class Advice:
    """What to use in one mode at one batch size, and the reasons as complete sentences."""

    mode: str
    batch: int
    candidate: str
    """The fastest; among those that nothing tells apart, the one that reads the fewest bytes."""
    draft_vocab: int
    follow: str | None
    """Whose ids join it: "prompt", "text", or None."""
    is_decided: bool
    """Whether the intervals exclude, or show to be as fast, every other candidate."""
    as_fast: tuple[str, ...]
    """Candidates that this measurement does not tell apart from the fastest, the one advised included."""
    more_prompts: int
    """About how many more prompts would decide; 0 where it is decided."""
    beats_plain: bool | None
    """Whether decoding with it was faster than plain decoding; None where the interval does not say."""
    reasons: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The advice in one line."""
        where = self.mode if self.batch == 1 else f"{self.mode}, batch {self.batch}"
        begin = f"recommended draft vocabulary on this device, {where}: "
        if not self.more_prompts and not self.as_fast:
            return f"{begin}not decided, no step was measured"
        plain = {True: "", None: "", False: "; but plain decoding is faster here"}[self.beats_plain]
        if self.is_decided:
            return f"{begin}{self.candidate}{plain}"
        plural = "" if self.more_prompts == 1 else "s"
        return (
            f"{begin}not decided, about {self.more_prompts} more prompt{plural} needed; of those not told apart "
            f"{self.candidate} reads the fewest bytes{plain}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "mode": self.mode,
            "batch": self.batch,
            "candidate": self.candidate,
            "draft_vocab": self.draft_vocab,
            "follow": self.follow,
            "is_decided": self.is_decided,
            "as_fast": list(self.as_fast),
            "more_prompts": self.more_prompts,
            "beats_plain": self.beats_plain,
            "headline": self.headline,
            "reasons": list(self.reasons),
        }


def recommend(report: CompareReport) -> list[Advice]:
    """Advise for each mode and batch size of a report."""
    return [_advise(report, mode, batch) for mode in report.modes for batch in report.batches]


def _advise(report: CompareReport, mode: str, batch: int) -> Advice:
    rows = [report.find(candidate, mode, batch=batch) for candidate in report.candidates]
    measured = [row for row in rows if row.measured is not None]
    if not measured:
        smallest = min(rows, key=lambda row: row.draft_bytes)
        reason = "No step was made: every answer ended with its first token. Give more prompts or more new tokens."
        return Advice(
            mode, batch, smallest.candidate, smallest.draft_vocab, smallest.follow, False, (), 0, None, (reason,)
        )
    best = max(measured, key=lambda row: row.tokens_per_s)
    others = {row.candidate: _compare(row, best, len(measured) - 1) for row in measured if row is not best}
    same = [row for row in measured if row is best or _is_as_fast(others[row.candidate])]
    open_ones = [
        row for row in measured
        if row not in same and not (others[row.candidate].high < 1 and others[row.candidate].value < 1 - _MARGIN)
    ]  # fmt: skip
    close = [row for row in measured if row in same or row in open_ones]
    chosen = min(close, key=lambda row: row.draft_bytes)
    too_few = best.num_prompts < _FEWEST_PROMPTS and len(measured) > 1
    more = max(
        [prompts_needed(others[row.candidate], best.num_prompts, _MARGIN, len(measured) - 1) for row in open_ones],
        default=0,
    )
    if too_few:
        more = max(more, _FEWEST_PROMPTS - best.num_prompts)
    plain = report.find(PLAIN, mode, batch=batch)
    return Advice(
        mode, batch, chosen.candidate, chosen.draft_vocab, chosen.follow, more == 0,
        tuple(row.candidate for row in close), more, _beats(chosen.speedup),
        (*_reasons(chosen, best, close, measured, others, plain), *_reasons_to_follow(measured)),
    )  # fmt: skip


def _compare(row: Row, best: Row, comparisons: int) -> Estimate:
    assert row.measured is not None
    assert best.measured is not None
    return ratio(row.measured, best.measured, best.num_prompts, max(1, comparisons))


def _is_as_fast(speed: Estimate) -> bool:
    return speed.value >= 1 - _MARGIN and speed.low >= 1 - 2 * _MARGIN


def _beats(speedup: Estimate | None) -> bool | None:
    if speedup is None or speedup.low <= 1 <= speedup.high:
        return None
    return speedup.value > 1


def _reasons(
    chosen: Row,
    best: Row,
    close: Sequence[Row],
    measured: Sequence[Row],
    others: Mapping[str, Estimate],
    plain: Row,
) -> list[str]:
    reasons = [f"{chosen.candidate}: {_cost(chosen)}."]
    if len(close) > 1:
        names = "; ".join(row.candidate for row in sorted(close, key=lambda row: -row.draft_bytes))
        reasons.append(
            f"{names}: these prompts do not tell their speeds apart by more than {_MARGIN:.0%}; of them "
            f"{chosen.candidate} reads the fewest bytes ({chosen.draft_bytes / 1e6:,.1f} MB a tree)."
        )
    for row in measured:
        if row is not best and row not in close:
            speed = others[row.candidate]
            reasons.append(f"{row.candidate} runs at {_interval(speed)} of the speed of {best.candidate}.")
    if chosen.speedup is not None:
        verdict = {True: "faster", False: "slower", None: "not told apart from it"}[_beats(chosen.speedup)]
        reasons.append(
            f"Plain decoding gives {plain.tokens_per_s:.1f} tokens/s; {chosen.candidate} runs at "
            f"{_interval(chosen.speedup)} times that: {verdict}."
        )
        if _beats(chosen.speedup) is False:
            reasons.append("A step with a tree costs more here than the tokens it gives; a smaller tree may pay.")
    return reasons


def _reasons_to_follow(measured: Sequence[Row]) -> list[str]:
    """Say of each size that follows a text what that gained or lost against the same size as it is."""
    reasons = []
    for row in measured:
        for other in measured:
            is_base = (f"{other.size} + {row.follow}", other.head, other.tree) == (row.size, row.head, row.tree)
            if row.follow is None or other.follow is not None or not is_base:
                continue
            assert row.measured is not None
            assert other.measured is not None
            speed = ratio(row.measured, other.measured, row.num_prompts)
            verdict = {True: "it pays", False: "it costs more than it gives", None: "not told apart"}[_beats(speed)]
            lengths = row.measured.accepted_length.value, other.measured.accepted_length.value
            reasons.append(
                f"{row.candidate}: {lengths[0]:.2f} tokens per pass where {other.candidate} has {lengths[1]:.2f}, at "
                f"{_interval(speed)} times its speed: {verdict}."
            )
    return reasons


def _cost(row: Row) -> str:
    assert row.measured is not None
    found = row.measured
    return (
        f"{found.accepted_length.value:.2f} tokens per pass, {found.step_s * 1e3:.1f} ms a step (draft "
        f"{found.draft_s * 1e3:.1f}, verify {found.verify_s * 1e3:.1f}, host {found.host_s * 1e3:.1f}) = "
        f"{row.tokens_per_s:.1f} tokens/s"
    )


def _interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.high):
        return f"{estimate.value:.2f} (one prompt gives no interval)"
    if estimate.error is None:
        return f"{estimate.value:.2f} (so few prompts give no interval)"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"
