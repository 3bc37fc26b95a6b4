"""One generation at a time per target: hooks, attention and the drafter's cache serve one call of `generate`.

Models over the same target (`SpeculativeModel.with_draft_vocab`, or two heads) share its lock. While a forward of ours
through transformers' layers runs, the model's attention is switched and its layers are listened to; so a forward that
is not ours, as of the model's own ``generate`` in another thread, waits for its end, and ours for that of others
(`guard`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import UsageError
from .attention import CONTEXT_ARGUMENT


class Turn:
    """What one thread holds at a time.

    A thread that holds it already goes on: an interrupt may have kept a forward from its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def take(self) -> None:
        """Wait until no other thread holds it."""
        if self._owner != threading.get_ident():
            self._lock.acquire()
            self._owner = threading.get_ident()

    def leave(self) -> None:
        """Let others take it; nothing happens in a thread that does not hold it."""
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it while a block runs."""
        self.take()
        try:
            yield
        finally:
            self.leave()


class GenerationLock(Turn):
    """Lets one caller generate; other threads wait."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = Turn()
        """To run the model's own forward."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the lock and hold it. Raises `UsageError` in the thread that holds it, which would wait forever."""
        if self._owner == threading.get_ident():
            raise UsageError(
                "generate() was called from its own streamer while the model is generating. Let that answer end first.",
                held_by="this thread",
            )
        with super().hold():
            yield


_LOCKS: WeakKeyDictionary[nn.Module, GenerationLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: nn.Module) -> GenerationLock:
    """Return the lock of a target, the same for everyone who wraps it."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, GenerationLock())


class _Guard:
    """A hook; a pickled or copied model has one in its place that does nothing and needs no package of ours."""

    def __init__(self, act: Callable[[Turn], None]) -> None:
        self._act = act

    def __call__(self, model: nn.Module, _args: Any, kwargs: Mapping[str, Any], *_output: Any) -> None:
        if CONTEXT_ARGUMENT not in kwargs:
            self._act(lock_of(model).forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


# Before a forward that is not ours, and after it, also after an error; ours holds the turn already.
_GUARDS = _Guard(Turn.take), _Guard(Turn.leave)


def guard(model: nn.Module) -> None:
    """Let forwards of a model that are not ours wait for ours; doing it again changes nothing."""
    if _GUARDS[0] not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_GUARDS[0], with_kwargs=True)
        model.register_forward_hook(_GUARDS[1], with_kwargs=True, always_call=True)


def is_guard(hook: object) -> bool:
    """Whether a hook is one of `guard`, or what a copy of a model has in its place."""
    return hook in _GUARDS or isinstance(getattr(hook, "__self__", None), nullcontext)
