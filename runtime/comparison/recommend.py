"""Which draft vocabulary to use on this device, and why: measured cost per pass against accepted length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .compare import PLAIN, CompareReport, Row

# Two runs of the same work differ by about this much on a quiet machine; repeats that differ more widen it.
_NOISE = 0.02


@dataclass(frozen=True)
class Recommendation:
    """A size, whether it pays, and the reasons as complete sentences."""

    size: str
    draft_vocab: int
    beats_plain: bool
    """Whether decoding with it was faster here than plain decoding."""
    reasons: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The recommendation in one line."""
        caveat = "" if self.beats_plain else "; but plain decoding is faster on this device"
        return f"recommended draft vocabulary for this pair on this device: {self.size}{caveat}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "size": self.size,
            "draft_vocab": self.draft_vocab,
            "beats_plain": self.beats_plain,
            "headline": self.headline,
            "reasons": list(self.reasons),
        }


def recommend(report: CompareReport) -> Recommendation:
    """Recommend the fastest size of the first mode; among sizes that noise cannot tell apart, the largest.

    The largest, because what was measured here is speed on these prompts, and more rows serve other text better.
    """
    mode = report.modes[0]
    rows = [report.find(size, mode) for size in report.sizes]
    plain = report.find(PLAIN, mode)
    largest = max(rows, key=lambda row: row.draft_vocab)
    if not largest.stats.num_passes:
        reason = "No pass was made: every answer ended with its first token. Give more prompts or more new tokens."
        return Recommendation(largest.size, largest.draft_vocab, False, (reason,))
    best = max(rows, key=lambda row: row.tokens_per_s)
    noise = max([_NOISE, *(_spread(row) for row in rows)])
    close = [row for row in rows if row.tokens_per_s >= best.tokens_per_s * (1 - noise)]
    chosen = max(close, key=lambda row: row.draft_vocab)

    reasons = [f"{mode.capitalize()}, {chosen.size}: {_cost(chosen)}."]
    if largest is not chosen:
        reasons.append(
            f"The largest, {largest.size}: {_cost(largest)}; {chosen.size} is {_change(chosen, largest)} "
            f"(its draft takes {_ratio(chosen, largest)} as long, its accepted length is "
            f"{chosen.stats.mean_accepted_length / largest.stats.mean_accepted_length:.3f} of it)."
        )
    if len(close) > 1:
        names = ", ".join(row.size for row in sorted(close, key=lambda row: -row.draft_vocab))
        reasons.append(
            f"{names} are within {noise:.0%} of the best, which these runs cannot tell apart; the largest of them "
            "serves other text best."
        )
    reasons.append(f"Plain decoding: {_cost(plain)}; {chosen.size} is {_change(chosen, plain)}.")
    beats_plain = chosen.tokens_per_s >= plain.tokens_per_s
    if not beats_plain:
        reasons.append("A pass over the tree costs more here than the tokens it gives; a smaller tree may pay.")
    return Recommendation(chosen.size, chosen.draft_vocab, beats_plain, tuple(reasons))


def _spread(row: Row) -> float:
    """Half the relative range of the repeats' time per pass."""
    times = row.per_pass_s
    return (max(times) - min(times)) / (max(times) + min(times)) if len(times) > 1 else 0.0


def _cost(row: Row) -> str:
    return (
        f"{row.stats.mean_accepted_length:.2f} tokens per pass at {row.seconds_per_pass * 1e3:.1f} ms "
        f"(draft {row.stats.draft_s / row.stats.num_passes * 1e3:.1f}, "
        f"verify {row.stats.verify_s / row.stats.num_passes * 1e3:.1f}) = {row.tokens_per_s:.1f} tokens/s"
    )


def _change(row: Row, other: Row) -> str:
    change = row.tokens_per_s / other.tokens_per_s - 1
    return f"{abs(change):.0%} {'faster' if change >= 0 else 'slower'}"


def _ratio(row: Row, other: Row) -> str:
    a, b = row.stats.draft_s / row.stats.num_passes, other.stats.draft_s / other.stats.num_passes
    return f"{a / b:.2f} times" if b else "the same time"
