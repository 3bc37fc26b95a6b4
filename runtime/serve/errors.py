"""Refusals and faults of a server, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from eagle_slim.vocab_tools.errors import EagleSlimError

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
