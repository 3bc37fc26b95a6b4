"""Files of a repository at one commit, fetched into huggingface_hub's cache or found there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from eagle_slim.vocab_tools.hub import (
    HubTrouble,
    fetch_file,
    is_offline,
    keep_limit,
    list_model,
    not_cached,
    transfer_errors,
    trouble_of,
)  # fmt: skip

from ..errors import CheckpointError, SourceError
from ..rows.paths import list_names

# Files one of which is in the cache if anything of a head or a target is.
_HINTS = ("config.json", "README.md", "model.safetensors", "tokenizer.json", "eagle_slim.json")

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
    """A request to the Hub failed; `trouble` says how."""

    def __init__(self, trouble: HubTrouble) -> None:
        super().__init__(str(trouble))
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


def find_snapshot(repo_id: str, revision: str | None, offline: bool, choose: Choose, inside: str) -> Snapshot:
    """Return a snapshot with the files that `choose` wants: fetched, or from the cache where the Hub is out of reach.

    Args:
        offline: ask for nothing.
        inside: the folder of the repository in question; "" for all of it.

    Raises:
        SourceError: no such repository or revision, no access, or neither connection nor copy.
    """
    check_repository_id(repo_id)
    if offline or is_offline():
        if (cached := _cached(repo_id, revision, choose, inside)) is None:
            raise HubError(not_cached(f"{repo_id}/{inside}".rstrip("/")))
        return cached
    try:
        return _online(repo_id, revision, choose)
    except HubError as error:
        cached = _cached(repo_id, revision, choose, inside) if error.trouble.is_unreachable else None
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


def _cached(repo_id: str, revision: str | None, choose: Choose, inside: str) -> Snapshot | None:
    """Return the snapshot of a revision in the cache, if it has what `choose` wants; asks nobody."""
    for hint in _HINTS:
        name = f"{inside}/{hint}".lstrip("/")
        if (found := fetch_file(repo_id, name, revision, only_cache=True)) is not None:
            folder = without(found, name)
            names = tuple(f"{inside}/{file}".lstrip("/") for file in list_names(folder / inside))
            with suppress(CheckpointError):
                return Snapshot(folder, repo_id, folder.name, names) if choose(names, repo_id) else None
            return None
    return None


def _download(repo_id: str, name: str, revision: str) -> Path:
    with explained(repo_id, revision):
        found = fetch_file(repo_id, name, revision, only_cache=False)
    assert found is not None
    return found
