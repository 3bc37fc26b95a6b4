"""One generation at a time per target: hooks, attention and the drafter's cache belong to whoever generates.

Models over the same target (`SpeculativeModel.with_draft_vocab`, or two heads) share its turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import UsageError


class Turns:
    """Lets callers in one after another; other threads wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn and hold it. Raises `UsageError` for a thread that holds it, which would wait forever."""
        if self._owner == threading.get_ident():
            raise UsageError(
                "generate() was called from its own streamer, while the model is generating; let that answer end first."
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


_TURNS: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_TURNS_LOCK = threading.Lock()


def turns_of(model: nn.Module) -> Turns:
    """Return the turns of a target, the same for everyone who wraps it."""
    with _TURNS_LOCK:
        return _TURNS.setdefault(model, Turns())
