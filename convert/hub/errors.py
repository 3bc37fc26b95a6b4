"""Errors of the Hub as errors of this package: what `vocab_tools.hub_errors` describes, as a SourceError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eagle_slim.vocab_tools.hub_errors import HubTrouble, transfer_errors, trouble_of

from ..errors import SourceError


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
