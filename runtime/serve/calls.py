"""Calls of clients as the event loop knows them, to which alone they belong; refusals in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_slim.vocab_tools.errors import EagleSlimError

from ..api.request import FinishReason, Request
from ..errors import PromptError, UsageError


class RefusedError(EagleSlimError):
    """A call that is not served; ``status`` is HTTP's, ``param`` the field, ``headers`` of the response."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: BaseException) -> RefusedError:
    """Return what a client is told of an error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, (UsageError, PromptError)):
        first = str(error).partition(" ")[0]
        is_long = isinstance(error, PromptError) and "context" in str(error)
        code = "context_length_exceeded" if is_long else None
        return RefusedError(str(error), code=code, param=first if first.isidentifier() and first.islower() else None)
    if status := getattr(error, "status_code", None):
        return RefusedError(str(getattr(error, "detail", error)), status)
    text = str(error) if isinstance(error, EagleSlimError) else f"{type(error).__name__} in the server"
    return RefusedError(text, 500)


@dataclass(eq=False)
class ServedAnswer:
    """One answer of a call, as far as the event loop has been told."""

    request: Request
    call: ServedCall
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    told_at: float = 0.0
    num_told: int = 0
    """Tokens that the engine's thread has sent."""


class ServedCall:
    """A client's call; ``is_streamed``: whether news wake it, or its end alone."""

    def __init__(self, requests: Sequence[Request], is_streamed: bool) -> None:
        self.answers = [ServedAnswer(request, self) for request in requests]
        self.is_streamed = is_streamed
        self.began = time.perf_counter()
        self.first_token_s: float | None = None
        self.changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def error(self) -> Exception | None:
        """Cause of an answer that ended before it was whole."""
        ended = {answer.finish_reason: answer.error for answer in self.answers}
        if "cancelled" in ended:
            return RefusedError("The server ends.", 503)
        return ended.get("fault")
