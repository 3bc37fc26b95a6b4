"""The Hugging Face Hub: its library's errors in the words of a user, and a time limit where the library has none.

Requests, retries and the time limits of downloads are huggingface_hub's own (HF_HUB_DOWNLOAD_TIMEOUT,
HF_HUB_ETAG_TIMEOUT), as are its cache, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY_NAME = "eagle-slim"
SILENCE_S = 60.0
"""Seconds without a byte after which a command gives up a request for which the library sets no limit."""
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN."
_BROKEN = ("RemoteProtocolError", "ReadError", "WriteError")
_BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class HubTrouble:
    """One error of the Hub, explained.

    Attributes:
        headline: what happened, beginning with the repository, without advice.
        advice: what to do about it.
        reason: "offline", "silent", "broken", "unreachable", "busy", "missing", "access", "refused" or "disk".
    """

    headline: str
    advice: str
    reason: str

    @property
    def is_unreachable(self) -> bool:
        """Whether the Hub gave no answer of its own, so that a copy in the cache may do instead."""
        return self.reason in ("offline", "silent", "broken", "unreachable", "busy")

    def __str__(self) -> str:
        return f"{self.headline}.\n{self.advice}".rstrip()


_limit_s: float | None = None


def limit_silence() -> None:
    """Let requests of this process for which nobody sets a limit end after `SILENCE_S`; for commands."""
    global _limit_s
    _limit_s = SILENCE_S


def keep_limit() -> None:
    """Give huggingface_hub's client the limit of `limit_silence`, if it was called; before anything is asked."""
    global _limit_s
    if _limit_s is None:
        return
    from huggingface_hub import get_session, set_client_factory

    client, hooks, limit_s = type(get_session()), get_session().event_hooks, _limit_s
    set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=limit_s))
    _limit_s = None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids every request."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def endpoint() -> str:
    """Address of the Hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def list_model(repo_id: str, revision: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Ask for the commit of a revision of a model repository, and the names of its files.

    Raises one of `transfer_errors`; ValueError for an answer that is none of the Hub's.
    """
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("the answer about the repository has another form than the Hub's") from error
    if not isinstance(info.sha, str):
        raise ValueError("the answer about the repository names no commit")
    return info.sha, tuple(sibling.rfilename for sibling in info.siblings or ())


def fetch_file(repo_id: str, name: str, revision: str | None, only_cache: bool) -> Path | None:
    """Return a file of a model repository in the Hub's cache, fetched unless `only_cache`; None where it is not there.

    Raises one of `transfer_errors`.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if only_cache:
        found = try_to_load_from_cache(repo_id, name, revision=revision)
        return Path(found) if isinstance(found, str) else None
    return Path(hf_hub_download(repo_id, name, revision=revision, library_name=LIBRARY_NAME))


def transfer_errors() -> tuple[type[Exception], ...]:
    """Everything that asking the Hub can raise: what `trouble_of` describes."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    # The base of all errors of the HTTP library, httpx or httpx2.
    return (OSError, ValueError, EntryNotFoundError, HfHubHTTPError.__bases__[0])


def trouble_of(error: BaseException, repo_id: str, revision: str | None = None, purpose: str = "read") -> HubTrouble:
    """Describe an error of `transfer_errors`, or one caused by such; `purpose` is "read" or "write"."""
    from huggingface_hub import errors

    http_error = errors.HfHubHTTPError.__bases__[0]
    known = (http_error, errors.EntryNotFoundError, errors.HFValidationError, errors.OfflineModeIsEnabled)
    found = [cause for cause in _causes(error) if isinstance(cause, known)] or [error]
    # That a file is not in the cache says least: what kept the library from fetching it is behind.
    cause = next((cause for cause in found if not isinstance(cause, errors.LocalEntryNotFoundError)), found[0])
    name, said, hub = type(cause).__name__, plain(getattr(cause, "server_message", None) or cause), endpoint()
    page, status = f"{hub}/{repo_id}", getattr(getattr(cause, "response", None), "status_code", None)
    at = f"revision {revision or 'main'!r}"
    advice = f"See {page}."
    if isinstance(cause, errors.GatedRepoError):
        reason, what = "access", "a gated repository, and this account has no access to it"
        advice = f"Ask for access at {page}. Then: {_LOGIN}"
    elif isinstance(cause, errors.DisabledRepoError):
        reason, what = "access", "the Hub has disabled this repository"
    elif isinstance(cause, errors.RevisionNotFoundError):
        reason, what, advice = "missing", f"has no {at}", "Give a branch, a tag or a whole commit hash."
    elif isinstance(cause, errors.LocalEntryNotFoundError):
        return not_cached(repo_id)
    elif isinstance(cause, errors.EntryNotFoundError):
        reason, what = "missing", f"a file is missing at {at} ({said})"
    elif purpose == "write" and status in (401, 403):
        reason, what = "access", f"may not be written with this account ({said})"
        advice = f"{_LOGIN} The token needs the right to write to this name."
    elif isinstance(cause, errors.RepositoryNotFoundError):
        reason, what = "missing", f"no such folder here, and no such repository at {hub}, or a private one"
        advice = f"Check the spelling. For a private one: {_LOGIN}"
    elif status == 401 or isinstance(cause, errors.LocalTokenNotFoundError):
        reason, what, advice = "access", f"the token is missing or not accepted ({said})", _LOGIN
    elif status == 429:
        reason, what = "busy", f"the rate limit of {hub} is reached ({said})"
        advice = f"Try again in a few minutes. The limit is higher for those who are logged in: {_LOGIN}"
    elif status in _BUSY:
        reason, what, advice = "busy", f"{hub} is in trouble ({said})", "Try again in a few minutes."
    elif status is not None:
        reason, what = "refused", f"the Hub refuses (status {status}: {said})"
    elif isinstance(cause, errors.OfflineModeIsEnabled):
        reason, what, advice = "offline", "fetching is off: HF_HUB_OFFLINE is set", "Unset it."
    elif isinstance(cause, errors.HFValidationError):
        reason, what = "missing", f"not the id of a repository ({said})"
        advice = "Expected a folder, or a repository such as name/model."
    elif isinstance(cause, http_error):
        advice = "Check the connection, the proxy and HF_ENDPOINT, and try again."
        reason, what = "unreachable", f"{hub} cannot be reached ({name}: {said})"
        if "Timeout" in name:
            reason, what = "silent", f"{hub} does not answer ({name})"
            advice += " Where the network is only slow, set HF_HUB_ETAG_TIMEOUT or HF_HUB_DOWNLOAD_TIMEOUT."
        elif name in _BROKEN:
            reason, what = "broken", f"the connection to {hub} broke off ({said})"
    elif "Consistency check failed" in str(cause):
        reason, what = "broken", "a file did not come as it is on the Hub"
        advice = "It was cut off, or changed on the Hub meanwhile: run the same command again."
    elif isinstance(cause, ValueError | errors.FileMetadataError):
        reason, what = "unreachable", f"what {hub} answers is not the Hub's ({said})"
        advice = "A network that wants a login first answers so: open a page in a browser, then try again."
    else:
        reason, what = "disk", f"the transfer failed ({said})"
        advice = "Try again; where the disk of the cache is the cause, set HF_HOME to a folder on another."
    return HubTrouble(f"{repo_id}: {what}", advice, reason)


def not_cached(repo_id: str, what: str = "") -> HubTrouble:
    """Describe what is not in the cache while fetching is off: a repository, or `what` of it."""
    advice = "Run the same command once with a connection (without --offline or HF_HUB_OFFLINE), or give a folder."
    missing = f"{what} is not" if what else "not"
    return HubTrouble(f"{repo_id}: {missing} in the cache, and the Hub was not asked", advice, "offline")


def plain(text: object, limit: int = 200) -> str:
    """Return what a library or server says on one line, without its full stop, cut to `limit` characters."""
    line = " ".join(str(text).split()).rstrip(".")
    line = "".join(letter for letter in line if letter.isprintable())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
