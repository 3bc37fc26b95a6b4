"""One generation at a time per target: the KV cache and the drafter's serve one call of `generate`.

Models over the same target (`SpeculativeModel.with_draft_vocab`, or two heads) share its lock. Forwards that are not
ours, as of the model's own ``generate`` in another thread, need not wait: nothing that they read is changed
(`shared_copy`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import UsageError


class GenerationLock:
    """Lets one caller generate; other threads wait.

    What is held is held by ``with`` statements alone, so that no line is left at which an interrupt keeps it.
    """

    def __init__(self) -> None:
        self._thread = threading.RLock()
        self._call = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the lock and hold it. Raises `UsageError` in the thread that holds it, which would wait forever."""
        with self._thread:
            # Other threads wait above, so whoever holds it is this one.
            if self._call.locked():
                raise UsageError(
                    "generate() was called from its own streamer while the model is generating. Let that answer end "
                    "first."
                )
            with self._call:
                yield


_LOCKS: WeakKeyDictionary[nn.Module, GenerationLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: nn.Module) -> GenerationLock:
    """Return the lock of a target, the same for everyone who wraps it."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, GenerationLock())
