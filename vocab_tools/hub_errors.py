"""What goes wrong with the Hub, in the words of a user: errors of its library and of the network, described.

Each package puts the description into an error class of its own. Where the Hub is unreachable, a copy in the cache may
do instead; where that is passing, the same call may succeed a moment later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses that say: not now."""
# Broken off in the middle is an accident; refused or silent is a state.
_ACCIDENTS = ("RemoteProtocolError", "ReadError", "WriteError", "ConnectionError", "ChunkedEncodingError")
GIVEN_UP = 599
"""Status, which no server sends, of a request that was given up; its `given_up` says why."""
_CONSISTENCY = "Consistency check failed"
_BEYOND = 416
"""Status of a range that begins beyond the end of a file."""
NOT_ASKED = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
"""Reasons that say: fetching is off."""
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN."


@dataclass(frozen=True)
class HubTrouble:
    """One error of the Hub, explained.

    Attributes:
        headline: what happened, beginning with the repository, without advice.
        advice: what to do about it.
        reason: class of the error that says most, or "connection".
        facts: for programs: `repo_id`, and `status`, `errno` and others where they are known.
        is_unreachable: the Hub gave no answer of its own.
        is_passing: the same call may succeed a moment later.
        retry_after_s: how long the Hub asks to wait, in seconds, where it says so.
    """

    headline: str
    advice: str = ""
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    is_unreachable: bool = False
    is_passing: bool = False
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return f"{self.headline}.\n{self.advice}".rstrip()


class TooSlowError(Exception):
    """A transfer is slower than the floor."""

    def __init__(self, found: float, floor: float) -> None:
        super().__init__(f"{found:,.0f} bytes a second, below the floor of {floor:,.0f}")


def is_given_up(error: object) -> bool:
    """Whether an error says only that something, its cause, was given up."""
    return hasattr(error, "given_up")


def came_otherwise(error: BaseException) -> bool:
    """Whether a file of the cache came in another size than the Hub says, or what is there of it is too long."""
    answer = getattr(error, "response", None)
    return _CONSISTENCY in str(error) or getattr(answer, "status_code", None) == _BEYOND


def trouble_of(error: BaseException, repo_id: str, revision: str | None = None, purpose: str = "read") -> HubTrouble:
    """Describe an error of `huggingface_hub`, of its HTTP library or of the cache's disk, or one caused by such.

    `purpose` is "read", or "write" for uploads, where a refusal means another thing.
    """
    from huggingface_hub import errors

    known = (
        errors.HfHubHTTPError,
        errors.EntryNotFoundError,
        errors.HFValidationError,
        errors.OfflineModeIsEnabled,
        errors.FileMetadataError,
        TooSlowError,
        *transport_errors(),
    )
    found = [cause for cause in causes(error) if isinstance(cause, known) and not is_given_up(cause)] or [error]
    # That a file is not in the cache says least: what kept the library from fetching it is behind.
    cause = next((cause for cause in found if not isinstance(cause, errors.LocalEntryNotFoundError)), found[0])
    name = type(cause).__name__
    facts = {"repo_id": repo_id}
    if isinstance(cause, errors.LocalEntryNotFoundError):
        return not_cached(repo_id)
    if isinstance(cause, errors.HfHubHTTPError):
        return _refusal(cause, repo_id, revision, purpose)
    if isinstance(cause, errors.EntryNotFoundError):
        return HubTrouble(f"{repo_id}: a file is missing{at(revision)} ({plain(cause)})", "", name, facts)
    if isinstance(cause, errors.HFValidationError):
        advice = "Expected a folder, or a repository such as name/model."
        return HubTrouble(f"{repo_id}: not the id of a repository ({plain(cause)})", advice, name, facts)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return HubTrouble(f"{repo_id}: fetching is off: HF_HUB_OFFLINE is set", "Unset it.", name, facts)
    if isinstance(cause, errors.FileMetadataError):
        return not_the_hub(repo_id, "an answer without the Hub's headers")
    if isinstance(cause, TooSlowError):
        advice = "Try again later; where the network is that slow, lower the floor with --min-speed."
        return HubTrouble(f"{repo_id}: a transfer drips ({cause})", advice, "connection", facts, is_unreachable=True)
    if isinstance(cause, transport_errors()):
        return _no_connection(repo_id, cause, purpose)
    if isinstance(cause, errors.LocalTokenNotFoundError):
        return HubTrouble(f"{repo_id}: no token of the Hub is at hand", _LOGIN, name, facts)
    if _CONSISTENCY in str(cause):
        # What follows is advice to callers of the library.
        what = plain(str(cause).partition("\n")[0])
        advice = "It was cut off, or changed on the Hub meanwhile: run the same command again, which fetches it anew."
        return HubTrouble(f"{repo_id}: a file did not come as it is on the Hub ({what})", advice, name, facts)
    if isinstance(cause, ValueError):
        # What should be JSON is not.
        return not_the_hub(repo_id, "a page that is not the Hub's")
    return _disk_trouble(cause, repo_id)


def not_cached(repo_id: str) -> HubTrouble:
    """What is not in the cache while fetching is off."""
    return HubTrouble(
        f"{repo_id}: not in the cache, and the Hub was not asked",
        "Run the same command once with a connection, unset HF_HUB_OFFLINE, or give a local folder.",
        "LocalEntryNotFoundError",
        {"repo_id": repo_id},
        is_unreachable=True,
    )


def not_the_hub(repo_id: str, found: str) -> HubTrouble:
    """An answer that comes from somebody else than the Hub, such as a login page of the network."""
    return HubTrouble(
        f"{repo_id}: {endpoint()} cannot be reached: {found} came back",
        "A network that wants a login first answers so: open a page in a browser, then try again.",
        "connection",
        {"repo_id": repo_id, "found": found},
        is_unreachable=True,
    )


def http_library() -> Any:
    """The HTTP library below huggingface_hub: httpx, or requests before 1.0."""
    from huggingface_hub.errors import HfHubHTTPError

    return sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]


def transport_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library: what a broken connection, or one that leads nowhere, raises."""
    names = ("RequestException", "RequestError", "StreamError", "InvalidURL")
    return tuple(getattr(http_library(), name) for name in names if hasattr(http_library(), name))


def failures() -> tuple[type[Exception], ...]:
    """What one request can raise: a refusal, a connection that fails, a drip."""
    from huggingface_hub.errors import HfHubHTTPError

    return (HfHubHTTPError, TooSlowError, *transport_errors())


def broken_off(what: str) -> Exception:
    """The library's error for a connection that closed too early."""
    kind = getattr(http_library(), "RemoteProtocolError", None) or http_library().ConnectionError
    return kind(what)  # type: ignore[no-any-return]


def transfer_errors() -> tuple[type[Exception], ...]:
    """Everything that asking the Hub can raise: what `trouble_of` describes."""
    from huggingface_hub.errors import EntryNotFoundError

    return (OSError, ValueError, EntryNotFoundError, *transport_errors())


def retry_after_s(response: Any) -> float | None:
    """Seconds that an answer asks to wait before the next request, where it says so: as a number, or as a date."""
    value = getattr(response, "headers", {}).get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


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


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what caused it, one after the other."""
    while error is not None:
        yield error
        error = getattr(error, "given_up", None) or error.__cause__ or error.__context__


def _refusal(error: Any, repo_id: str, revision: str | None, purpose: str) -> HubTrouble:
    from huggingface_hub import errors

    page, address = f"{endpoint()}/{repo_id}", endpoint()
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)

    def trouble(what: str, advice: str, **facts: Any) -> HubTrouble:
        facts = {"repo_id": repo_id, "status": status, **facts}
        busy = status in BUSY
        wait_s = retry_after_s(response) if busy else None
        return HubTrouble(f"{repo_id}: {what}", advice, type(error).__name__, facts, busy, busy, wait_s)

    if isinstance(error, errors.GatedRepoError):
        advice = f"Ask for access at {page}. Then: {_LOGIN}"
        return trouble("a gated repository, and this account has no access to it", advice, gated=True)
    if isinstance(error, errors.DisabledRepoError):
        return trouble("the Hub has disabled this repository", f"See {page}.")
    if isinstance(error, errors.RevisionNotFoundError):
        advice = "Give a branch, a tag or a whole commit hash."
        return trouble(f"has no revision {revision or 'main'!r}", advice, revision=revision)
    if isinstance(error, errors.EntryNotFoundError):
        return trouble(f"a file is missing{at(revision)}: {plain(error)}", f"See {page}.")
    if purpose == "write" and status in (401, 403):
        advice = f"{_LOGIN} The token needs the right to write to this name."
        return trouble(f"may not be written with this account (status {status})", advice)
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = f"Check the spelling. For a private one: {_LOGIN}"
        return trouble(f"no such folder here, and no such model at {address}, or a private one", advice)
    if status == 401:
        return trouble("the token is not accepted (status 401)", _LOGIN)
    if status == 429:
        wait_s = retry_after_s(response)
        soon = "in a few minutes" if wait_s is None else f"in {wait_s:.0f} seconds, or give --patience as many"
        advice = f"Try again {soon}. The limit is higher for those who are logged in: {_LOGIN}"
        return trouble(f"the rate limit of {address} is reached (status 429)", advice)
    if status in BUSY:
        return trouble(f"{address} is in trouble (status {status})", f"Try again in a few minutes{_else(purpose)}.")
    if "html" in getattr(response, "headers", {}).get("Content-Type", ""):
        return not_the_hub(repo_id, f"an HTML page with status {status}")
    return trouble(f"the Hub refuses (status {status}): {plain(error, 300)}", f"See {page}.")


def _else(purpose: str) -> str:
    return ", or give a folder" if purpose == "read" else ""


def _no_connection(repo_id: str, cause: BaseException, purpose: str) -> HubTrouble:
    kind = type(cause).__name__
    if kind == "JSONDecodeError":
        return not_the_hub(repo_id, "a page that is not the Hub's")
    advice = f"Check the connection, the proxy and HF_ENDPOINT, and try again{_else(purpose)}."
    if kind == "TooManyRedirects":
        headline = f"{repo_id}: {endpoint()} redirects in a circle ({plain(cause, 160)})"
    elif "Timeout" in kind:
        headline = f"{repo_id}: {endpoint()} does not answer ({kind})"
        advice += " Where the network is only slow, set HF_HUB_ETAG_TIMEOUT to more seconds."
    elif kind in _ACCIDENTS and kind != "ConnectionError":
        headline = f"{repo_id}: the connection to {endpoint()} broke off ({kind}: {plain(cause, 160)})"
    else:
        # Of requests, a ConnectionError is one that was refused, too.
        headline = f"{repo_id}: {endpoint()} cannot be reached ({kind}: {plain(cause, 160)})"
    facts = {"repo_id": repo_id, "cause": kind}
    return HubTrouble(headline, advice, "connection", facts, is_unreachable=True, is_passing=kind in _ACCIDENTS)


def _disk_trouble(error: BaseException, repo_id: str) -> HubTrouble:
    facts = {"repo_id": repo_id, "errno": getattr(error, "errno", None)}
    advice = "Try again; where the disk of the cache is the cause, set HF_HOME to a folder on another."
    return HubTrouble(f"{repo_id}: the transfer failed ({plain(error, 300)})", advice, type(error).__name__, facts)
