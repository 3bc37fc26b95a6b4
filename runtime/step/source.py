"""Sources of the requests of a generation loop: a list, or whatever keeps the protocol, such as a server's queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..api.request import Request
from .rules import CallRules


class Source(Protocol):
    """Requests for a loop, whose thread alone calls this."""

    num_slots: int
    """Most that run side by side."""
    max_tokens: int
    """Most tokens of a prompt and its answer."""
    prompt_lengths: Sequence[int]
    """Tokens of the prompts that are known before."""

    def has_waiting(self) -> bool:
        """Return whether there is a request to take."""
        ...

    def take(self, count: int) -> list[tuple[Request, CallRules]]:
        """Take up to ``count`` requests, those first that came first."""
        ...

    def publish(self) -> None:
        """Look at what requests have become: called where some have new tokens, or have ended."""
        ...

    def fail(self, request: Request, error: Exception) -> None:
        """Take note that a request has failed; raises where all others are to fail with it."""
        ...


class RequestList:
    """The requests of one call, by rules that are the same for all."""

    def __init__(self, requests: Sequence[Request], rules: CallRules) -> None:
        self._waiting, self._rules = deque(each for each in requests if each.finish_reason is None), rules
        self.num_slots = len(self._waiting)
        self.prompt_lengths: Sequence[int] = [len(each.prompt_ids) for each in self._waiting]
        self.max_tokens = max((each.max_tokens for each in self._waiting), default=0)

    def has_waiting(self) -> bool:
        """See `Source`."""
        return bool(self._waiting)

    def take(self, count: int) -> list[tuple[Request, CallRules]]:
        """See `Source`."""
        return [(self._waiting.popleft(), self._rules) for _ in range(min(count, len(self._waiting)))]

    def publish(self) -> None:
        """See `Source`."""

    def fail(self, request: Request, error: Exception) -> None:
        """See `Source`."""
        raise error
