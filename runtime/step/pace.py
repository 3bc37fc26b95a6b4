"""Whether drafting pays on a CPU, told by the steps themselves: no table knows another one, nor the text.

    tokens a second, drafted = tokens of a step / its seconds
                     plain   = 1 / seconds of a plain forward and one choice

Drafted steps are timed as they run. Beside them a plain forward of the same sequences is timed, as often as all of
these take at most `SHARE` of the time. Its result is thrown away, and rows that it writes are written again by the next
step.
Where drafting loses, the call goes on plainly, and later calls of the model with as many sequences begin so. Only the
time may differ: the clock decides for nothing but targets whose drafted and plain tokens are the same (float32).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

SHARE = 0.02
"""Most of the time that plain forwards may take."""
_MOST_PROBES = 5
_KEPT_STEPS = 256


@dataclass
class Pace:
    """Of one number of sequences side by side, with trees of ``num_nodes``."""

    num_nodes: int
    steps: deque[tuple[float, float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    """Of drafted steps: tokens a sequence, and seconds of the whole, of verifying, and of accepting."""
    plain_s: list[float] = field(default_factory=list)
    """Seconds of plain forwards."""
    drafted_s: float = 0.0
    """Seconds of all drafted steps."""

    def add(self, num_tokens: float, whole_s: float, verify_s: float, accept_s: float) -> None:
        """Take a drafted step."""
        self.steps.append((num_tokens, whole_s, verify_s, accept_s))
        self.drafted_s += whole_s

    @property
    def is_due(self) -> bool:
        """Whether a plain forward may be timed; before the first, a tree's stands for it, which is no shorter."""
        if not self.steps or len(self.plain_s) >= _MOST_PROBES:
            return False
        expected_s = max(self.plain_s) if self.plain_s else self._median(2)
        return sum(self.plain_s) + expected_s <= SHARE * self.drafted_s

    @property
    def rates(self) -> tuple[float, float] | None:
        """Tokens a second of one sequence, drafted and plain; None before a plain forward was timed."""
        if not self.plain_s:
            return None
        tokens = sum(step[0] for step in self.steps) / len(self.steps)
        return tokens / self._median(1), 1 / (median(self.plain_s) + self._median(3) / tokens)

    @property
    def loses(self) -> str | None:
        """Where drafting is slower, a sentence that says so with both figures."""
        if self.rates is None or self.rates[0] >= self.rates[1]:
            return None
        drafted, plain = (f"{rate:.1f}" for rate in self.rates)
        trees = f"trees of {self.num_nodes} nodes"
        return f"drafting does not pay here: {drafted} tokens/s a sequence with {trees}, {plain} without"

    def _median(self, place: int) -> float:
        return median(step[place] for step in self.steps)
