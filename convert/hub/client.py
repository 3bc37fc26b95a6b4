"""How every question goes to the Hub.

Files travel through the library, so its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and its other variables work as
everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from eagle_slim.vocab_tools.hub_session import be_patient

from .errors import explained

LIBRARY_NAME = "eagle-slim"

_Answer = TypeVar("_Answer")


def ask(call: Callable[[], _Answer], repo_id: str, revision: str | None = None, purpose: str = "read") -> _Answer:
    """Return what `call` returns; its requests keep the rule of `vocab_tools.hub_session`.

    Args:
        call: a function of the library.
        repo_id, revision, purpose: as `errors.explained`.

    Raises:
        SourceError: it failed for good; an `UnreachableError` where the Hub could not be reached.
    """
    be_patient()
    with explained(repo_id, revision, purpose):
        return call()


def notify_stderr(message: str) -> None:
    """Write a notice for the user to stderr."""
    print(message, file=sys.stderr)


def api() -> Any:
    """The library's client, under our name."""
    from huggingface_hub import HfApi

    return HfApi(library_name=LIBRARY_NAME)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids every request."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
