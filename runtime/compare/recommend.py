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


@dataclass(frozen=True)
class Advice:
    """What to use in one mode at one batch size, and the reasons as complete sentences."""

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
    """Whether the intervals exclude, or show to be as fast, every other candidate."""
    as_fast: tuple[str, ...]
    """Candidates that may be the fastest, as far as this measurement shows, the one advised included."""
    more_prompts: int
    """About how many more prompts would decide; 0 where it is decided."""
    beats_plain: bool | None
    """Whether drafting is faster than plain decoding; None where the prompts do not say."""
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def recommend(report: CompareReport) -> list[Advice]:
    """Advise for each mode and batch size of a report."""
    return [_advise(report, mode, batch) for mode in report.modes for batch in report.batches]


def _advise(report: CompareReport, mode: str, batch: int) -> Advice:
    rows = [report.find(candidate.label, mode, batch=batch) for candidate in report.candidates]
    measured = [row for row in rows if row.measured is not None]
    where = mode if batch == 1 else f"{mode}, batch {batch}"
    if not measured:
        smallest = min(rows, key=_draft_bytes).candidate
        reason = (
            "No step was made: every answer ended with its first token. Give more prompts or more new tokens."
            if any(row.num_answers for row in rows) else "The comparison ended before anything was drafted."
        )  # fmt: skip
        return Advice(
            mode, batch, f"{where}: draft vocabulary not decided, no step was measured", smallest.label,
            smallest.draft_vocab, smallest.follow, False, (), 0, None, (reason,),
        )  # fmt: skip
    best = max(measured, key=lambda row: row.tokens_per_s)
    others = {row.label: _compare(row, best, len(measured) - 1) for row in measured if row is not best}
    same = [row for row in measured if row is best or _is_as_fast(others[row.label])]
    undecided = [row for row in measured if row not in same and not _is_slower(others[row.label])]
    close = [row for row in measured if row in same or row in undecided]
    chosen = min(close, key=lambda row: (_draft_bytes(row), -row.tokens_per_s))
    more = max(
        [prompts_needed(others[row.label], best.num_prompts, _MARGIN, len(measured) - 1) for row in undecided],
        default=0,
    )
    plain = report.find(PLAIN, mode, batch=batch)
    # Plain decoding must beat all that may be the fastest.
    verdicts = {_beats_plain(row, plain) for row in close}
    beats = False if verdicts == {False} else _beats_plain(chosen, plain) or None
    advised, more = (plain, 0) if beats is False else (chosen, more)
    reasons = [*_reasons(chosen, best, close, measured, others, plain), *_reasons_to_add(measured)]
    if missing := [row.label for row in rows if row.measured is None]:
        reasons.append(f"Not measured: {'; '.join(missing)}.")
    return Advice(
        mode, batch, f"{where}: {_headline(chosen, close, beats, more)}", advised.label, advised.candidate.draft_vocab,
        advised.candidate.follow, more == 0, tuple(row.label for row in close), more,
        beats, tuple(reasons),
    )  # fmt: skip


def _headline(chosen: Row, close: Sequence[Row], beats: bool | None, more: int) -> str:
    speed = "" if chosen.speedup is None else f" at {_interval(chosen.speedup)} times its speed"
    if beats is False:
        return f"plain decoding is faster here: drafting with {chosen.label} runs{speed}"
    begin = f"drafting beats plain decoding here: it runs{speed}"
    if beats is None:
        few = "" if chosen.speedup and chosen.speedup.says_something else ", too few to tell"
        number = _prompts(chosen.num_prompts, chosen.batch)
        begin = f"whether drafting beats plain decoding here is not decided by {number}{few}: it ran{speed}"
    if not more:
        return f"{begin}; best draft vocabulary: {chosen.label}"
    return (
        f"{begin}; draft vocabulary not decided, about {_prompts(more, chosen.batch, 'more ')} needed; of those that "
        f"may be fastest, {chosen.label} {_merit(chosen, close)}"
    )


def _prompts(number: int, batch: int, more: str = "") -> str:
    plural = "" if number == 1 else "s"
    return f"{number} {more}" + (f"prompt{plural}" if batch == 1 else f"group{plural} of {batch} prompts")


def _merit(chosen: Row, close: Sequence[Row]) -> str:
    """Say what the one chosen has before the others that may be the fastest."""
    alike = sum(_draft_bytes(row) == _draft_bytes(chosen) for row in close)
    if alike == 1:
        return "reads the fewest bytes"
    return "ran fastest" if alike == len(close) else "ran fastest of those that read the fewest bytes"


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


def _beats_plain(row: Row, plain: Row) -> bool | None:
    """Whether it is faster than plain decoding; None where the prompts do not tell.

    A step may take so long that the most tokens which its trees can give do not make up for it: then any prompts tell.
    """
    if row.step_s and row.batch * _most_tokens(row) < plain.tokens_per_s * row.step_s:
        return False
    return _beats(row.speedup)


def _most_tokens(row: Row) -> int:
    depth, _, nodes = row.candidate.tree
    return min(depth + 2, nodes)


def _reasons(
    chosen: Row, best: Row, close: Sequence[Row], measured: Sequence[Row], others: Mapping[str, Estimate], plain: Row
) -> list[str]:
    reasons = [f"{chosen.label}: {_cost(chosen)}."]
    if len(close) > 1:
        names = "; ".join(row.label for row in sorted(close, key=_draft_bytes, reverse=True))
        reasons.append(
            f"{names}: these prompts do not tell their speeds apart, or they differ by less than {_MARGIN:.0%}; "
            f"{chosen.label} {_merit(chosen, close)} ({_draft_bytes(chosen) / 1e6:,.1f} MB a tree)."
        )
    for row in measured:
        if row is not best and row not in close:
            reasons.append(f"{row.label} runs at {_interval(others[row.label])} of the speed of {best.label}.")
    if chosen.speedup is not None:
        beats = _beats_plain(chosen, plain)
        verdict = {True: "faster", False: "slower", None: "these prompts do not tell which is faster"}[beats]
        if beats != _beats(chosen.speedup):
            verdict = f"slower on any prompts, as a pass gives {_most_tokens(chosen)} tokens at most"
        reasons.append(
            f"Plain decoding gives {plain.tokens_per_s:.1f} tokens/s; {chosen.label} runs at "
            f"{_interval(chosen.speedup)} times that: {verdict}."
        )
        if beats is False:
            reasons.append("A step with a tree costs more here than the tokens it gives; a smaller tree may pay.")
    return reasons


def _reasons_to_add(measured: Sequence[Row]) -> list[str]:
    """Say of each size that follows the prompt what that gained or lost against it alone."""
    reasons = []
    for row in measured:
        for other in measured:
            own, base = row.candidate, other.candidate
            if own.size != f"{base.size} + prompt" or (own.head, own.tree) != (base.head, base.tree):
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
    ends = f" ({estimate.low:.2f} to {estimate.high:.2f})" if estimate.says_something else ""
    return f"{estimate.value:.2f}{ends}"
