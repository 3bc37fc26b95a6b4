"""Generated tokens that the draft vocabulary did not hold: no draft could have proposed them, however good the head.

Counted on the host as tokens arrive, so that the device has nothing more to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..drafter.follow import FollowRows
    from ..drafter.weights import HeadWeights


@dataclass(frozen=True)
class HeldIds:
    """What a drafter can propose.

    Attributes:
        base: one byte for each target id, 1 where the draft vocabulary holds it.
        follow: rows that join it while a prompt is followed; None where none do.
    """

    base: bytes
    follow: FollowRows | None = None

    @classmethod
    def of(cls, weights: HeadWeights) -> HeldIds:
        """The ids of a head's draft vocabulary, and what may join them."""
        return cls(weights.held_ids, weights.follow)


class MissedTokens:
    """Counts what one request generates outside what could be drafted; `counts` are by target id."""

    def __init__(self, held: HeldIds, prompt_ids: Sequence[int]) -> None:
        self.held, self.counts = held, Counter[int]()
        self._joined: tuple[int, ...] = () if held.follow is None else held.follow.tail_of(prompt_ids)

    def add(self, tokens: Sequence[int]) -> None:
        """Take the tokens of one step, in order."""
        base, follow = self.held.base, self.held.follow
        outside = [token for token in tokens if not base[token]]
        for token in outside:
            if follow is None or not follow.holds(self._joined, token):
                self.counts[token] += 1


def most_missed_first(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Add up counts by id, and order them: the most frequent first, ties by id."""
    total: Counter[int] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
