"""How every question goes to the Hub, and its errors as errors of this package.

Files travel through the library, so its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and its other variables work as
everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from eagle_slim.vocab_tools.hub_errors import HubTrouble, transfer_errors, trouble_of
from eagle_slim.vocab_tools.hub_session import be_patient

from ..errors import SourceError

LIBRARY_NAME = "eagle-slim"

_Answer = TypeVar("_Answer")


class UnreachableError(SourceError):
    """The Hub cannot be reached; a copy in the cache may do instead. `trouble` says how it failed."""

    def __init__(self, trouble: HubTrouble) -> None:
        super().__init__(str(trouble), **trouble.facts)
        self.trouble = trouble


@contextmanager
def explained(repo_id: str, revision: str | None = None, purpose: str = "read") -> Iterator[None]:
    """Turn the errors of `huggingface_hub`, of its HTTP library and of the cache's disk into SourceError.

    Arguments as `trouble_of`.
    """
    try:
        yield
    except transfer_errors() as error:
        raise source_error(trouble_of(error, repo_id, revision, purpose)) from error


def source_error(trouble: HubTrouble) -> SourceError:
    """The error to raise: an `UnreachableError` where the Hub gave no answer of its own."""
    return UnreachableError(trouble) if trouble.is_unreachable else SourceError(str(trouble), **trouble.facts)


def ask(call: Callable[[], _Answer], repo_id: str, revision: str | None = None, purpose: str = "read") -> _Answer:
    """Return what `call` returns; its requests keep the rule of `vocab_tools.hub_session`.

    The other arguments are those of `trouble_of`.

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
