"""Which draft vocabulary to use on this device, as far as the measurement tells, for each mode and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .candidates import PLAIN
from .report import Answer, CompareReport, Row, html_page, table, write_report
from .statistics import Estimate, ratio

# A smaller difference in speed counts as none: two runs of the same work differ by as much on a quiet machine.
_MARGIN = 0.02


@dataclass(frozen=True)
class Advice:
    """Recommend a candidate for one mode and batch size, with the reasons as complete sentences."""

    mode: str
    batch: int
    headline: str
    """Whether drafting beats plain decoding here, and what to draft with, in one line."""
    candidate: str
    """The fastest; of several that may be, the one that reads the fewest bytes; "plain" where that beats them all."""
    draft_vocab: int
    follow: str | None
    """"prompt" where ids of the prompt join it."""
    is_decided: bool
    """Whether every other candidate is significantly slower, or shown to be as fast."""
    as_fast: tuple[str, ...]
    """Candidates without a significant difference from the fastest, that one included."""
    beats_plain: bool | None
    """Whether drafting is faster than plain decoding; None without a significant difference."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that `compare` found."""

    report: CompareReport
    """The figures: a row for each candidate, mode, batch size and category."""
    recommendations: Sequence[Advice]
    """Which draft vocabulary to use on this device, for each mode and batch size."""
    answers: Sequence[Answer]
    """Every answer, in the order in which they were made."""

    @property
    def is_complete(self) -> bool:
        """Whether all answers that were planned are in."""
        return self.report.is_complete

    def write(self, folder: str | Path, force: bool = False) -> None:
        """Write compare.json and compare.html into a folder, both or none.

        Raises `OutputExistsError` for a folder that exists, unless ``force`` is given and a comparison wrote it;
        `OutputError` where it cannot be written.
        """
        write_report(folder, self.to_json(), force)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the answers as plain values: setup, rows, coverage curves, advice."""
        return {
            "setup": self.report.setup,
            "is_complete": self.is_complete,
            "rows": [row.to_json() for row in self.report.rows],
            "coverage": [
                {"name": curve.name, "sizes": list(curve.sizes), "covered": list(curve.covered)}
                for curve in self.report.curves
            ],
            "recommendations": [asdict(each) for each in self.recommendations],
        }

    def to_text(self) -> str:
        """Return an aligned table and the advice.

        Ranges are 95% intervals over prompts. Times are in milliseconds a step; ``missed`` is the share of tokens
        outside the draft vocabulary; ``exact``: answers equal to plain decoding's, of all; "equal" where the target
        promises that for every type of weights, and no answer broke the promise. "-": not measured.
        """
        advice = ["\n  ".join([each.headline, *each.reasons]) for each in self.recommendations]
        return "\n\n".join([table(self.report), *advice])

    def to_html(self) -> str:
        """Return one HTML page with charts, table and hover; it fetches nothing."""
        return html_page(self.to_json())


def recommend(report: CompareReport) -> list[Advice]:
    """Advise for each mode and batch size of a report."""
    return [_advise(report, mode, batch) for mode in report.modes for batch in report.batches]


def _advise(report: CompareReport, mode: str, batch: int) -> Advice:
    rows = [report.find(candidate.label, mode, batch=batch) for candidate in report.candidates]
    measured = [row for row in rows if row.measured is not None]
    where = mode if batch == 1 else f"{mode}, batch {batch}"
    if not measured:
        smallest = min((row.candidate for row in rows), key=lambda each: each.draft_bytes)
        return Advice(
            mode, batch, f"{where}: no step was measured", smallest.label, smallest.draft_vocab, smallest.follow, False,
            (), None, ("Every answer ended with its first token. Give more prompts or more new tokens.",),
        )  # fmt: skip
    best = max(measured, key=lambda row: row.tokens_per_s)
    others = {row.label: _compare(row, best, len(measured) - 1) for row in measured if row is not best}
    close = [row for row in measured if row is best or not _is_slower(others[row.label])]
    chosen = min(close, key=lambda row: (row.candidate.draft_bytes, -row.tokens_per_s))
    plain = report.find(PLAIN, mode, batch=batch)
    # Plain decoding must beat all that may be the fastest.
    verdicts = {_beats(row.speedup) for row in close}
    beats = False if verdicts == {False} else _beats(chosen.speedup) or None
    advised = plain if beats is False else chosen
    is_decided = beats is False or all(row is best or _is_as_fast(others[row.label]) for row in close)
    reasons = [*_reasons(chosen, best, close, measured, others, plain), *_reasons_to_follow(measured)]
    if missing := [row.label for row in rows if row.measured is None]:
        reasons.append(f"Not measured: {'; '.join(missing)}.")
    return Advice(
        mode, batch, f"{where}: {_headline(chosen, close, measured, beats)}", advised.label,
        advised.candidate.draft_vocab, advised.candidate.follow, is_decided, tuple(row.label for row in close), beats,
        tuple(reasons),
    )  # fmt: skip


def _headline(chosen: Row, close: Sequence[Row], measured: Sequence[Row], beats: bool | None) -> str:
    speed = "" if chosen.speedup is None else f" at {_interval(chosen.speedup)} times its speed"
    if beats is False:
        return f"plain decoding is faster here: drafting with {chosen.label} runs{speed}"
    begin = f"drafting beats plain decoding here: it runs{speed}"
    if beats is None:
        begin = f"no significant difference from plain decoding: drafting ran{speed}"
    if len(measured) == 1:
        return f"{begin}; only {chosen.label} was compared"
    if len(close) == 1:
        return f"{begin}; best draft vocabulary: {chosen.label}"
    names = "; ".join(row.label for row in close)
    is_smaller = len({row.candidate.draft_bytes for row in close}) > 1
    merit = f", of which {chosen.label} reads the fewest bytes" if is_smaller else ""
    return f"{begin}; no significant difference between {names}{merit}"


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
    chosen: Row, best: Row, close: Sequence[Row], measured: Sequence[Row], others: Mapping[str, Estimate], plain: Row
) -> list[str]:
    reasons = [f"{chosen.label}: {_cost(chosen)}."]
    for row in measured:
        if row is not best:
            how = "no significant difference" if row in close else "slower"
            reasons.append(f"{row.label} runs at {_interval(others[row.label])} of the speed of {best.label}: {how}.")
    if chosen.speedup is not None:
        verdict = {True: "faster", False: "slower", None: "no significant difference"}[_beats(chosen.speedup)]
        reasons.append(
            f"Plain decoding gives {plain.tokens_per_s:.1f} tokens/s; {chosen.label} runs at "
            f"{_interval(chosen.speedup)} times that: {verdict}."
        )
    return reasons


def _reasons_to_follow(measured: Sequence[Row]) -> list[str]:
    """Say of each size that follows the prompt how it compares with the same size alone."""
    reasons = []
    for row in measured:
        for other in measured:
            own, base = row.candidate, other.candidate
            if own.size != f"{base.size} + prompt" or (own.head, own.tree) != (base.head, base.tree):
                continue
            assert row.measured is not None
            assert other.measured is not None
            speed = ratio(row.measured, other.measured, row.num_prompts)
            verdict = {True: "it pays", False: "it does not pay", None: "no significant difference"}[_beats(speed)]
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
    ends = f" ({estimate.low:.2f} to {estimate.high:.2f})" if estimate.says_something else ""
    return f"{estimate.value:.2f}{ends}"
