"""Files of a repository at one commit, fetched into the library's cache or found there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import cast

from eagle_slim.vocab_tools.hub_errors import at, came_otherwise

from ..errors import CheckpointError, SourceError
from ..rows.paths import list_names
from .client import LIBRARY_NAME, UnreachableError, api, ask, explained, is_offline, notify_stderr

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
    if not (offline or is_offline()):
        try:
            return _online(repo_id, revision, choose)
        except UnreachableError as error:
            cached = _cached(repo_id, revision, choose, hints, inside)
            if cached is None:
                raise
            notify_stderr(f"{error.trouble.headline}; using the copy in the cache, {repo_id}@{cached.commit[:12]}")
            return cached
    cached = _cached(repo_id, revision, choose, hints, inside)
    if cached is None:
        raise not_cached(f"{repo_id}/{inside}".rstrip("/"), at(revision), "Or give a folder.")
    return cached


def fetch(snapshot: Snapshot, names: Collection[str], offline: bool) -> None:
    """Bring further files into a snapshot; SourceError where they cannot be had."""
    for name in names:
        if (snapshot.folder / name).exists():
            continue
        if offline or is_offline():
            raise not_cached(f"{snapshot.repo_id}@{snapshot.commit[:12]}", f" ({name})")
        _download(snapshot.repo_id, name, snapshot.commit)


def cache_folder(repo_id: str) -> Path:
    """Our own folder in the library's cache of derived files (HF_HOME/assets, or HF_ASSETS_CACHE)."""
    from huggingface_hub import cached_assets_path, constants

    with explained(repo_id):
        return cached_assets_path(
            LIBRARY_NAME,
            namespace="tensors",
            subfolder=repo_id.replace("/", "--"),
            assets_dir=constants.HF_ASSETS_CACHE,
        )


def not_cached(label: str, what: str, advice: str = "") -> SourceError:
    """The error for what would have to be fetched when fetching is off."""
    return SourceError(
        f"{label}: not in the cache{what}, and fetching is off (--offline or HF_HUB_OFFLINE).\n"
        f"Run the same command once with a connection. {advice}".rstrip(),
        repo_id=label,
        offline=True,
    )


def without(path: str | Path, name: str) -> Path:
    """The folder in which `path` is called `name`: `/a` for `/a/b/c` and `b/c`."""
    return Path(*Path(path).parts[: len(Path(path).parts) - len(PurePosixPath(name).parts)])


def _online(repo_id: str, revision: str | None, choose: Choose) -> Snapshot:
    info = ask(lambda: api().model_info(repo_id, revision=revision), repo_id, revision)
    files = tuple(sibling.rfilename for sibling in info.siblings or ())
    commit = cast(str, info.sha)
    names = choose(files, f"{repo_id}@{commit[:12]}")
    if not names:
        raise SourceError(
            f"{repo_id}: holds none of the files that are needed{at(revision)}; it has "
            f"{', '.join(files[:8]) or 'no files'}.\nIs this the repository of a model?",
            repo_id=repo_id,
        )
    # Asked for by the name of the revision, the first file makes the library note which commit that is; --offline needs
    # it. The others are asked for by the commit, so that all come from one.
    folder = without(_download(repo_id, names[0], revision or "main"), names[0])
    if folder.name != commit:
        folder = without(_download(repo_id, names[0], commit), names[0])
    snapshot = Snapshot(folder, repo_id, commit, files)
    fetch(snapshot, names[1:], offline=False)
    return snapshot


def _cached(repo_id: str, revision: str | None, choose: Choose, hints: Sequence[str], inside: str) -> Snapshot | None:
    """Return the snapshot of a revision in the cache, if it has what `choose` wants; touches no network."""
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

    download = partial(hf_hub_download, repo_id, name, revision=revision, library_name=LIBRARY_NAME)

    def whole() -> str:
        try:
            return download()
        except OSError as error:
            if not came_otherwise(error):
                raise
            # Before 1.0 the library would go on from what it has of the file, at every further run.
            notify_stderr(f"{repo_id}: {name} did not come as it is on the Hub; fetching it anew")
            return download(force_download=True)

    return ask(whole, repo_id, revision)
