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
from dataclasses import dataclass, field, replace

from ..drafter.reference import Drafter
from ..target.cache import SlotCache

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
        """What stays, whatever becomes of it, once a prompt takes over its first ``shared`` tokens (`num_shared`).

        Pair t holds token t + 1. Where nothing is drafted, the token behind the shared ones may be another.
        """
        valid = shared if is_drafted else max(0, shared - 1)
        return KeptRows(tuple(prompt[: shared + 1]), min(self.num_pairs, valid))


@dataclass
class KeptPieces:
    """What a call whose steps ran in pieces leaves for the next: caches, and what their slots hold.

    Empty while a call runs, so that a failed one leaves nothing.
    """

    cache: SlotCache | None = None
    drafter: Drafter | None = None
    """Whose cache has the pairs, as long as ``claim`` is the last one."""
    capacity: int = 0
    """Tokens of a sequence that the drafter's cache has room for."""
    slots: list[KeptRows] = field(default_factory=list)
    claim: object | None = None
    """The mark that the allocation of the drafter's cache has left (`GenerationLock.claims`)."""

    def take(self) -> KeptPieces:
        """Return what is there and leave nothing."""
        taken = replace(self)
        self.put(KeptPieces())
        return taken

    def put(self, pieces: KeptPieces) -> None:
        """Hold this from now on."""
        vars(self).update(vars(pieces))

    def has_room(self, num_slots: int, capacity: int, rows: int) -> bool:
        """Whether the caches serve as many slots, of ``capacity`` tokens each and ``rows`` rows of the target's."""
        cache = self.cache
        return (
            cache is not None and cache.num_slots == num_slots and cache.capacity >= rows and self.capacity >= capacity
        )


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
