"""Count the drafter's launches with and without tuned parameters (`drafter.tuned_cache`), graph replays included."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

Launches = Counter[bool]
"""Number of launches, by whether their parameters were tuned."""


class _Counts(threading.local):
    def __init__(self) -> None:
        self.launches: Launches = Counter()


_COUNTS = _Counts()


def count_launches(launches: Launches) -> None:
    """Add launches to this thread's count, a graph's replays included."""
    _COUNTS.launches.update(launches)


@contextmanager
def counted_apart() -> Iterator[Launches]:
    """Count launches of this block separately."""
    outside, _COUNTS.launches = _COUNTS.launches, Counter()
    try:
        yield _COUNTS.launches
    finally:
        _COUNTS.launches = outside
