"""What goes wrong with the Hub, in the words of a user: every error of the library and of the network ends here.

Each becomes a `SourceError` that says what to do next. An `UnreachableError` among them means that a copy in the cache
may do instead; if it is passing, the same call may succeed a moment later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SourceError

BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses that say: not now."""
# Broken off in the middle is an accident; refused or silent is a state.
_ACCIDENTS = ("RemoteProtocolError", "ReadError", "WriteError", "ConnectionError", "ChunkedEncodingError")
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN."
_PORTAL_ADVICE = "A network that wants a login first answers so: open a page in a browser, then try again."


class UnreachableError(SourceError):
    """The Hub cannot be reached; a copy in the cache may do instead.

    Attributes:
        headline: what happened, without advice.
        is_passing: whether the same call may succeed a moment later.
        retry_after_s: how long the Hub asks to wait, in seconds, where it says so.
    """

    def __init__(
        self,
        headline: str,
        advice: str,
        is_passing: bool = False,
        retry_after_s: float | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(f"{headline}.\n{advice}", **facts)
        self.headline = headline
        self.is_passing = is_passing
        self.retry_after_s = retry_after_s


@contextmanager
def explained(repo_id: str, revision: str | None = None, purpose: str = "read") -> Iterator[None]:
    """Turn the errors of `huggingface_hub`, of its HTTP library and of the cache's disk into SourceError.

    Args:
        repo_id: the repository in question.
        revision: of it.
        purpose: "read", or "write" for uploads, where a refusal means another thing.
    """
    from huggingface_hub import errors

    try:
        yield
    # First, because before huggingface_hub 1.0 it was one of the HTTP errors.
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__ or error.__context__ or error
        raise _unreachable(repo_id, cause) from error
    except errors.HfHubHTTPError as error:
        raise _refusal(error, repo_id, revision, purpose) from error
    except errors.EntryNotFoundError as error:
        raise SourceError(
            f"{repo_id}: a file is missing{at(revision)} ({plain(error)}).", repo_id=repo_id, revision=revision
        ) from error
    except errors.HFValidationError as error:
        raise not_an_id(repo_id, error) from error
    except transport_errors() as error:
        raise _unreachable(repo_id, error) from error
    except errors.OfflineModeIsEnabled as error:
        raise SourceError(f"{repo_id}: fetching is off: HF_HUB_OFFLINE is set.\nUnset it.", repo_id=repo_id) from error
    except ValueError as error:
        # What should be JSON is not.
        raise not_the_hub(repo_id, "a page that is not the Hub's") from error
    except OSError as error:
        raise _disk_error(error, repo_id) from error


def not_the_hub(repo_id: str, found: str) -> UnreachableError:
    """The error for an answer that comes from somebody else than the Hub, such as a login page of the network."""
    return UnreachableError(
        f"{repo_id}: {endpoint()} cannot be reached: {found} came back", _PORTAL_ADVICE, repo_id=repo_id, found=found
    )


def not_an_id(text: str, error: Exception) -> SourceError:
    """The error for a name that is neither a folder nor a possible repository."""
    return SourceError(
        f"{text}: not the id of a repository ({plain(error)}).\nExpected a folder, or a repository such as name/model.",
        repo_id=text,
    )


def transport_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library below huggingface_hub, whichever it is: what a broken connection raises."""
    from huggingface_hub.errors import HfHubHTTPError

    library = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
    names = ("RequestException", "TransportError", "StreamError", "InvalidURL")
    return tuple(getattr(library, name) for name in names if hasattr(library, name))


def retry_after_s(response: Any) -> float | None:
    """Seconds that an answer asks to wait before the next request, where it says so as a number."""
    value = getattr(response, "headers", {}).get("Retry-After", "")
    return float(value) if value.isdigit() else None


def at(revision: str | None) -> str:
    """The revision as part of a sentence, if there is one."""
    return f" at revision {revision!r}" if revision else ""


def plain(text: object, limit: int = 200) -> str:
    """What a library or server says, on one line and without its full stop, cut to `limit` characters."""
    line = " ".join(str(text).split()).rstrip(".")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def endpoint() -> str:
    """Address of the Hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _refusal(error: Any, repo_id: str, revision: str | None, purpose: str) -> SourceError:
    from huggingface_hub import errors

    page = f"{endpoint()}/{repo_id}"
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    facts = {"repo_id": repo_id, "status": status}
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{repo_id}: a gated repository, and this account has no access to it.\n"
            f"Ask for access at {page}. Then: {_LOGIN}",
            gated=True,
            **facts,
        )
    if isinstance(error, errors.DisabledRepoError):
        return SourceError(f"{repo_id}: the Hub has disabled this repository.\nSee {page}.", **facts)
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"{repo_id}: has no revision {revision or 'main'!r}.\n{_revisions(repo_id)}", revision=revision, **facts
        )
    if isinstance(error, errors.EntryNotFoundError):
        return SourceError(f"{repo_id}: a file is missing{at(revision)}: {plain(error)}.\nSee {page}.", **facts)
    if purpose == "write" and status in (401, 403):
        return SourceError(
            f"{repo_id}: may not be written with this account (status {status}).\n"
            f"{_LOGIN} The token needs the right to write to this name.",
            **facts,
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        if (kind := _other_kind(repo_id)) is not None:
            return SourceError(
                f"{repo_id}: is a {kind} on the Hub; a model repository is expected.\n"
                "Check the id. A dataset is given with --dataset.",
                found=kind,
                **facts,
            )
        return SourceError(
            f"{repo_id}: no such folder here, and no such model at {endpoint()}, or a private one.\n"
            f"Check the spelling. For a private one: {_LOGIN}",
            **facts,
        )
    if status == 401:
        return SourceError(f"{repo_id}: the token is not accepted (status 401).\n{_LOGIN}", **facts)
    if status == 429:
        wait_s = retry_after_s(response)
        soon = "in a few minutes" if wait_s is None else f"in {wait_s:.0f} seconds"
        return UnreachableError(
            f"{repo_id}: the rate limit of {endpoint()} is reached (status 429)",
            f"Try again {soon}. The limit is higher for those who are logged in: {_LOGIN}",
            is_passing=True,
            retry_after_s=wait_s,
            **facts,
        )
    if status in BUSY:
        return UnreachableError(
            f"{repo_id}: {endpoint()} is in trouble (status {status})",
            "Try again in a few minutes, or give a folder.",
            is_passing=True,
            retry_after_s=retry_after_s(response),
            **facts,
        )
    if "html" in getattr(response, "headers", {}).get("Content-Type", ""):
        return not_the_hub(repo_id, f"an HTML page with status {status}")
    return SourceError(f"{repo_id}: the Hub refuses (status {status}): {plain(error, 300)}.\nSee {page}.", **facts)


def _unreachable(repo_id: str, cause: BaseException) -> SourceError:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(cause, HfHubHTTPError):
        return _refusal(cause, repo_id, None, "read")
    kind = type(cause).__name__
    if kind == "JSONDecodeError":
        return not_the_hub(repo_id, "a page that is not the Hub's")
    advice = "Check the connection, the proxy and HF_ENDPOINT, and try again; or give a folder."
    if "Timeout" in kind:
        headline = f"{repo_id}: {endpoint()} does not answer ({kind})"
        advice += " Where the network is only slow, set HF_HUB_ETAG_TIMEOUT to more seconds."
    else:
        headline = f"{repo_id}: {endpoint()} cannot be reached ({kind}: {plain(cause, 160)})"
    return UnreachableError(
        headline,
        advice,
        is_passing=kind in _ACCIDENTS,
        repo_id=repo_id,
        cause=kind,
    )


def _disk_error(error: OSError, repo_id: str) -> SourceError:
    from huggingface_hub import constants

    cache = error.filename or constants.HF_HUB_CACHE
    facts = {"repo_id": repo_id, "errno": error.errno}
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = Path(constants.HF_HUB_CACHE)
        while not place.exists():
            place = place.parent
        return SourceError(
            f"{repo_id}: the disk of the cache is full ({cache}, {shutil.disk_usage(place).free:,} bytes free).\n"
            "Free some space, or set HF_HOME to a folder on another disk.",
            **facts,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SourceError(
            f"{repo_id}: the cache cannot be written ({cache}: {os.strerror(error.errno)}).\n"
            "Set HF_HOME to a folder of your own.",
            **facts,
        )
    return SourceError(f"{repo_id}: the transfer failed ({plain(error, 300)}).\nTry again.", **facts)


def _other_kind(repo_id: str) -> str | None:
    """Return "dataset" or "space" where the Hub has one of this id; errors mean that it has not."""
    from huggingface_hub import HfApi, constants, errors

    for kind in ("dataset", "space"):
        with contextlib.suppress(errors.HfHubHTTPError, *transport_errors()):
            HfApi().repo_info(repo_id, repo_type=kind, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return kind
    return None


def _revisions(repo_id: str) -> str:
    from huggingface_hub import HfApi, errors

    with contextlib.suppress(errors.HfHubHTTPError, *transport_errors()):
        refs = HfApi().list_repo_refs(repo_id)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        return f"It has {', '.join(names[:12])}; a commit hash must be whole."
    return "Give a branch, a tag or a whole commit hash."
