"""Files of a repository at one commit, fetched into huggingface_hub's cache or found there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from eagle_slim.vocab_tools.hub import (
    HubTrouble,
    is_offline,
    keep_limit,
    list_model,
    not_cached,
    transfer_errors,
    trouble_of,
)

from ..errors import CheckpointError, SourceError
from ..rows.paths import list_names

LIBRARY_NAME = "eagle-slim"

Choose = Callable[[Sequence[str], str], list[str]]
"""From the names of all files of a repository, and how messages call it, the names of those that are wanted."""


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository in the cache.

    Attributes:
        folder: holds the files that were asked for.
        repo_id, commit: what it is a snapshot of.
        files: names of all files of the repository; offline, of those in `folder`.
    """

    folder: Path
    repo_id: str
    commit: str
    files: tuple[str, ...]


class HubError(SourceError):
    """What was asked of the Hub failed; `trouble` says how."""

    def __init__(self, trouble: HubTrouble) -> None:
        super().__init__(str(trouble), reason=trouble.reason)
        self.trouble = trouble


@contextmanager
def explained(repo_id: str, revision: str | None = None, purpose: str = "read") -> Iterator[None]:
    """Raise the errors of huggingface_hub, its HTTP library and the cache's disk as `HubError`; as `trouble_of`."""
    keep_limit()
    try:
        yield
    except transfer_errors() as error:
        raise HubError(trouble_of(error, repo_id, revision, purpose)) from error


def check_repository_id(text: str) -> None:
    """Raise SourceError unless `text` can be the id of a repository."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    with explained(text):
        validate_repo_id(text)


def find_snapshot(
    repo_id: str, revision: str | None, offline: bool, choose: Choose, hints: Sequence[str], inside: str
) -> Snapshot:
    """Return a snapshot with the files that `choose` wants: fetched, or from the cache where the Hub is out of reach.

    Args:
        offline: ask for nothing.
        hints: names of files one of which is in the cache if the repository is.
        inside: the folder of the repository in question; "" for all of it.

    Raises:
        SourceError: no such repository or revision, no access, or neither connection nor copy.
    """
    check_repository_id(repo_id)
    if offline or is_offline():
        if (cached := _cached(repo_id, revision, choose, hints, inside)) is None:
            raise HubError(not_cached(f"{repo_id}/{inside}".rstrip("/")))
        return cached
    try:
        return _online(repo_id, revision, choose)
    except HubError as error:
        cached = _cached(repo_id, revision, choose, hints, inside) if error.trouble.is_unreachable else None
        if cached is None:
            raise
        found = f"{repo_id}@{cached.commit[:12]}"
        print(f"{error.trouble.headline}; using the copy in the cache, {found}", file=sys.stderr)
        return cached


def fetch(snapshot: Snapshot, names: Collection[str], offline: bool) -> None:
    """Bring further files into a snapshot; SourceError where they cannot be had."""
    for name in names:
        if (snapshot.folder / name).exists():
            continue
        if offline or is_offline():
            raise HubError(not_cached(f"{snapshot.repo_id}@{snapshot.commit[:12]}", name))
        _download(snapshot.repo_id, name, snapshot.commit)


def without(path: str | Path, name: str) -> Path:
    """Return the folder in which `path` is called `name`: `/a` for `/a/b/c` and `b/c`."""
    return Path(*Path(path).parts[: len(Path(path).parts) - len(PurePosixPath(name).parts)])


def _online(repo_id: str, revision: str | None, choose: Choose) -> Snapshot:
    with explained(repo_id, revision):
        commit, files = list_model(repo_id, revision)
    names = choose(files, f"{repo_id}@{commit[:12]}")
    if not names:
        found = ", ".join(files[:8]) or "no files"
        problem = f"holds none of the files that are needed; it has {found}.\nIs this the repository of a model?"
        raise SourceError(f"{repo_id}: {problem}")
    # Asked for by the name of the revision, the first file makes the library note which commit that is; --offline needs
    # it. The others are asked for by the commit, so that all come from one.
    folder = without(_download(repo_id, names[0], revision or "main"), names[0])
    if folder.name != commit:
        folder = without(_download(repo_id, names[0], commit), names[0])
    snapshot = Snapshot(folder, repo_id, commit, files)
    fetch(snapshot, names[1:], offline=False)
    return snapshot


def _cached(repo_id: str, revision: str | None, choose: Choose, hints: Sequence[str], inside: str) -> Snapshot | None:
    """Return the snapshot of a revision in the cache, if it has what `choose` wants; asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    for hint in hints:
        name = f"{inside}/{hint}".lstrip("/")
        found = try_to_load_from_cache(repo_id, name, revision=revision)
        if isinstance(found, str):
            folder = without(found, name)
            names = tuple(f"{inside}/{file}".lstrip("/") for file in list_names(folder / inside))
            try:
                complete = bool(choose(names, repo_id))
            except CheckpointError:
                complete = False
            return Snapshot(folder, repo_id, folder.name, names) if complete else None
    return None


def _download(repo_id: str, name: str, revision: str) -> str:
    from huggingface_hub import hf_hub_download

    with explained(repo_id, revision):
        return hf_hub_download(repo_id, name, revision=revision, library_name=LIBRARY_NAME)
