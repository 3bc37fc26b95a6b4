"""One generation at a time per target: hooks, attention and the drafter's cache serve one call of `generate`.

Models over the same target (`SpeculativeModel.with_draft_vocab`, or two heads) share its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import UsageError


class GenerationLock:
    """Lets one caller generate; other threads wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.claims: dict[int, object] = {}
        """By the `id` of a drafter, the mark of the call that allocated its cache last: models may share a drafter."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the lock and hold it. Raises `UsageError` in the thread that holds it, which would wait forever."""
        if self._owner == threading.get_ident():
            raise UsageError(
                "generate() was called from its own streamer while the model is generating. Let that answer end first.",
                held_by="this thread",
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


_LOCKS: WeakKeyDictionary[nn.Module, GenerationLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: nn.Module) -> GenerationLock:
    """Return the lock of a target, the same for everyone who wraps it."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, GenerationLock())
