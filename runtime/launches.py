"""How many launches of a call had tuned parameters (`drafter.tuned_cache`), those that graphs repeat included."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

Launches = Counter[tuple[str, bool]]
"""How many launches there were of a kind, by whether their parameters were tuned."""


class _Counts(threading.local):
    def __init__(self) -> None:
        self.launches: Launches = Counter()


_COUNTS = _Counts()


def count(kind: str, is_tuned: bool) -> None:
    """Count a launch of this thread."""
    _COUNTS.launches[kind, is_tuned] += 1


def count_again(launches: Launches) -> None:
    """Count launches that a graph repeats."""
    _COUNTS.launches.update(launches)


@contextmanager
def counted_apart() -> Iterator[Launches]:
    """Count launches of this block separately."""
    outside, _COUNTS.launches = _COUNTS.launches, Counter()
    try:
        yield _COUNTS.launches
    finally:
        _COUNTS.launches = outside
