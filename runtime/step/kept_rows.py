"""What slots still hold of the sequences that have left them, so that a prompt that goes on need not be run again.

After "a b c d" was answered with "e f g", the target's cache has rows for all but the newest token g, and the drafter's
has pairs up to where the last step began. Of the next prompt, "a b c d e f X", all that the slot holds and the prompt
begins with is taken over, token by token; an edited history shares less, and an unrelated prompt nothing::

    held     a b c d e f g          prompt   a b c d e f X
    rows     a b c d e f            taken    a b c d e          run   f X

With a drafter the last shared token is run again: the pair of its feature and the token after it needs the feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SMALLEST_CAPACITY = 1024
_LARGEST_POWER = 131072


def capacity_for(rows: int) -> int:
    """Rows to allocate for ``rows``: a power of two, so that few sizes occur; exactly those beyond 131,072.

    There a power of two would cost gigabytes, and more positions than the persistent drafter takes.
    """
    capacity = _SMALLEST_CAPACITY
    while capacity < rows:
        capacity *= 2
    return capacity if capacity <= _LARGEST_POWER else rows


@dataclass(frozen=True)
class KeptRows:
    """A sequence whose rows are still in a slot: all but the newest of ``tokens``, and ``num_pairs`` of the drafter."""

    tokens: tuple[int, ...] = ()
    num_pairs: int = 0

    def num_shared(self, prompt: Sequence[int], is_drafted: bool) -> int:
        """How many tokens at the beginning of a prompt need not be run; at least its last one must be."""
        most = min(len(self.tokens) - 1, len(prompt) - 1)
        common = next((i for i, (a, b) in enumerate(zip(self.tokens, prompt, strict=False)) if a != b), most + 1)
        shared = min(most, common)
        if is_drafted:
            shared = min(shared, common - 1, self.num_pairs)
        return max(0, shared)

    def cut(self, prompt: Sequence[int], shared: int, is_drafted: bool) -> KeptRows:
        """Rows still valid once a prompt takes over its first ``shared`` tokens (`num_shared`).

        Pair t holds token t + 1. Where nothing is drafted, the token after the shared ones may be another.
        """
        valid = shared if is_drafted else max(0, shared - 1)
        return KeptRows(tuple(prompt[: shared + 1]), min(self.num_pairs, valid))


def match_slots(
    prompts: Sequence[Sequence[int]], kept: Sequence[KeptRows], free: Iterable[int], is_drafted: bool
) -> list[tuple[int, int]]:
    """Give each prompt a free slot, those first that share most with it: (slot, shared tokens) by prompt.

    There must be as many free slots as prompts, or more.
    """
    slots = list(free)
    pairs = [
        (-kept[slot].num_shared(prompt, is_drafted), place, slot)
        for place, prompt in enumerate(prompts)
        for slot in slots
    ]
    found: dict[int, tuple[int, int]] = {}
    taken: set[int] = set()
    for shared, place, slot in sorted(pairs):
        if place not in found and slot not in taken:
            found[place] = (slot, -shared)
            taken.add(slot)
    return [found[place] for place in range(len(prompts))]
