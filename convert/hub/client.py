"""How every question goes to the Hub: with a timeout, asked again when the Hub is busy.

Files travel through the library, so its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and its other variables work as
everywhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .errors import UnreachableError, explained

LIBRARY_NAME = "eagle-slim"

_Answer = TypeVar("_Answer")

_ATTEMPTS = 5
# No new attempt later than this after the first, and no wait that is longer, whatever the Hub asks for.
_PATIENCE_S = 60.0
# The Hub works on a large commit before it answers.
_WRITE_SILENCE_S = 120.0


def ask(call: Callable[[], _Answer], repo_id: str, revision: str | None = None, purpose: str = "read") -> _Answer:
    """Return what `call` returns, called again with growing pauses while the Hub is busy or breaks off.

    Args:
        call: a function of the library. Where the library would wait for ever it waits `silence_s` instead.
        repo_id, revision, purpose: as `errors.explained`.

    Raises:
        SourceError: it failed for good; an `UnreachableError` where the Hub could not be reached.
    """
    began = time.monotonic()
    for attempt in range(1, _ATTEMPTS + 1):
        _limit_silence(_WRITE_SILENCE_S if purpose == "write" else silence_s())
        try:
            with explained(repo_id, revision, purpose):
                return call()
        except UnreachableError as error:
            pause_s = pause_before_next(attempt, error.trouble.retry_after_s)
            late = time.monotonic() - began + pause_s > _PATIENCE_S
            if not error.trouble.is_passing or attempt == _ATTEMPTS or late:
                raise
            notify_stderr(f"{error.trouble.headline}; trying again in {pause_s:.0f} s")
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def notify_stderr(message: str) -> None:
    """Write a notice for the user to stderr."""
    print(message, file=sys.stderr)


def pause_before_next(attempt: int, asked_s: float | None = None) -> float:
    """Seconds to wait after the failed `attempt` (the first is 1): doubling, and at least what the Hub asked for."""
    return max(asked_s or 0.0, min(16.0, 2.0 ** (attempt - 1)))


def silence_s() -> float:
    """Seconds without a byte after which a request counts as lost (HF_HUB_ETAG_TIMEOUT)."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_ETAG_TIMEOUT)


def api() -> Any:
    """The library's client, under our name."""
    from huggingface_hub import HfApi

    return HfApi(library_name=LIBRARY_NAME)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids every request."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _limit_silence(seconds: float) -> None:
    """Give the library's session a time limit for the requests that name none."""
    from huggingface_hub import get_session

    session: Any = get_session()
    if hasattr(session, "timeout"):
        session.timeout = seconds
    else:
        # Before huggingface_hub 1.0 it is one of requests, which knows limits of single requests only.
        request = getattr(session.request, "func", session.request)
        session.request = partial(request, timeout=seconds)
