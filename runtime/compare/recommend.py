"""Which draft vocabulary to use on this device, as far as the measurement decides it, for each mode and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .candidates import PLAIN
from .report import CompareReport, Row
from .statistics import Estimate, prompts_needed, ratio

# A smaller difference in speed counts as none: two runs of the same work differ by as much on a quiet machine.
_MARGIN = 0.02
_FEWEST_PROMPTS = 5


@dataclass(frozen=True)
class Advice:
    """What to use in one mode at one batch size, and the reasons as complete sentences."""

    mode: str
    batch: int
    candidate: str
    """The fastest; of several that may be, the one that reads the fewest bytes."""
    draft_vocab: int
    follow: str | None
    """"prompt" where ids of the prompt join it."""
    is_decided: bool
    """Whether the intervals exclude, or show to be as fast, every other candidate."""
    as_fast: tuple[str, ...]
    """Candidates that may be the fastest, as far as this measurement shows, the one advised included."""
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
            f"{begin}not decided, about {self.more_prompts} more prompt{plural} needed; of those that may be fastest, "
            f"{self.candidate} reads the fewest bytes{plain}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self) | {"headline": self.headline}


def recommend(report: CompareReport) -> list[Advice]:
    """Advise for each mode and batch size of a report."""
    return [_advise(report, mode, batch) for mode in report.modes for batch in report.batches]


def _advise(report: CompareReport, mode: str, batch: int) -> Advice:
    rows = [report.find(candidate.label, mode, batch=batch) for candidate in report.candidates]
    measured = [row for row in rows if row.measured is not None]
    if not measured:
        smallest = min(rows, key=_draft_bytes).candidate
        reason = "No step was made: every answer ended with its first token. Give more prompts or more new tokens."
        return Advice(mode, batch, smallest.label, smallest.draft_vocab, smallest.follow, False, (), 0, None, (reason,))
    best = max(measured, key=lambda row: row.tokens_per_s)
    others = {row.label: _compare(row, best, len(measured) - 1) for row in measured if row is not best}
    same = [row for row in measured if row is best or _is_as_fast(others[row.label])]
    undecided = [row for row in measured if row not in same and not _is_slower(others[row.label])]
    close = [row for row in measured if row in same or row in undecided]
    chosen = min(close, key=_draft_bytes)
    more = max(
        [prompts_needed(others[row.label], best.num_prompts, _MARGIN, len(measured) - 1) for row in undecided],
        default=0,
    )
    if len(measured) > 1:
        more = max(more, _FEWEST_PROMPTS - best.num_prompts)
    plain = report.find(PLAIN, mode, batch=batch)
    return Advice(
        mode, batch, chosen.label, chosen.candidate.draft_vocab, chosen.candidate.follow, more == 0,
        tuple(row.label for row in close), more, _beats(chosen.speedup),
        (*_reasons(chosen, best, close, measured, others, plain), *_reasons_to_follow(measured)),
    )  # fmt: skip


def _draft_bytes(row: Row) -> int:
    return row.candidate.draft_bytes


def _compare(row: Row, best: Row, comparisons: int) -> Estimate:
    assert row.measured is not None
    assert best.measured is not None
    return ratio(row.measured, best.measured, best.num_prompts, max(1, comparisons))


def _is_as_fast(speed: Estimate) -> bool:
    return speed.value >= 1 - _MARGIN and speed.low >= 1 - 2 * _MARGIN


def _is_slower(speed: Estimate) -> bool:
    return speed.high < 1 and speed.value < 1 - _MARGIN


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
    reasons = [f"{chosen.label}: {_cost(chosen)}."]
    if len(close) > 1:
        names = "; ".join(row.label for row in sorted(close, key=_draft_bytes, reverse=True))
        reasons.append(
            f"{names}: on these prompts their speeds differ by less than {_MARGIN:.0%}, or by too little to tell; "
            f"{chosen.label} reads the fewest bytes of them ({_draft_bytes(chosen) / 1e6:,.1f} MB a tree)."
        )
    for row in measured:
        if row is not best and row not in close:
            reasons.append(f"{row.label} runs at {_interval(others[row.label])} of the speed of {best.label}.")
    if chosen.speedup is not None:
        beats = _beats(chosen.speedup)
        verdict = {True: "faster", False: "slower", None: "these prompts do not tell which is faster"}[beats]
        reasons.append(
            f"Plain decoding gives {plain.tokens_per_s:.1f} tokens/s; {chosen.label} runs at "
            f"{_interval(chosen.speedup)} times that: {verdict}."
        )
        if beats is False:
            reasons.append("A step with a tree costs more here than the tokens it gives; a smaller tree may pay.")
    return reasons


def _reasons_to_follow(measured: Sequence[Row]) -> list[str]:
    """Say of each size that follows the prompt what that gained or lost against the same size as it is."""
    reasons = []
    for row in measured:
        for other in measured:
            own, base = row.candidate, other.candidate
            if not own.follow or (own.size, own.head, own.tree) != (f"{base.size} + prompt", base.head, base.tree):
                continue
            assert row.measured is not None
            assert other.measured is not None
            speed = ratio(row.measured, other.measured, row.num_prompts)
            verdict = {True: "it pays", False: "it costs more than it gives", None: "too close to tell"}[_beats(speed)]
            lengths = row.measured.accepted_length.value, other.measured.accepted_length.value
            reasons.append(
                f"{row.label}: {lengths[0]:.2f} tokens per pass where {other.label} has {lengths[1]:.2f}, at "
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
    if estimate.error is None:
        return f"{estimate.value:.2f} (too few prompts for an interval)"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"
