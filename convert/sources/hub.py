"""Heads and targets from folders or from the Hugging Face Hub; the only module that imports `huggingface_hub`.

Files travel through the library, so its cache, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and its other variables work as
everywhere. Of a target only the bytes of one tensor are fetched (`remote.py`), through the library's own session and
headers. Every failure ends in a `SourceError` that says what to do next.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import quote

from eagle_slim.vocab_tools.files import expand_home

from ..atomic import atomic_file
from ..errors import CheckpointError, OutputError, SourceError
from ..weights.checkpoint import Checkpoint, open_weights_file
from ..weights.names import canonical_names
from ..weights.paths import TORCH_SUFFIXES, choose_weights, clean_subfolder, list_names, read_index
from ..weights.safetensors_file import SafetensorsHeader
from ..weights.types import shorten
from .lm_head import TargetLMHead, find_lm_head, lm_head_of, open_local_lm_head, ties_embedding, unused_lm_head
from .range_reads import CacheEntry, ConnectionBrokenError, fetch_tensor, read_remote_header

__all__ = [
    "HEAD_FILES",
    "TARGET_FILES",
    "ResolvedSource",
    "open_head_source",
    "open_target_lm_head",
    "push_folder",
    "resolve",
    "target_files",
]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
TARGET_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""Small files of a target: its configuration and its tokenizer."""

HEAD_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "eagle_slim.json",
    "README.md",
    *TOKENIZER_FILES,
)
"""Small files of a head: configuration, manifest, card (which may name the target), and a tokenizer if it has one."""

Notify = Callable[[str], object]
# Names of all files of a repository, and how messages call it, to the names of those that are wanted.
_Choose = Callable[[Sequence[str], str], list[str]]

_LIBRARY_NAME = "eagle-slim"
_BUSY = (408, 429, 500, 502, 503, 504)
# requests loses what it holds back of a chunk when a connection breaks, so chunks are small.
_READ_BYTES = 1 << 13


def notify_stderr(message: str) -> None:
    """Write a notice for the user to stderr; the `notify` of every function here unless another is given."""
    print(message, file=sys.stderr)


@dataclass(frozen=True)
class ResolvedSource:
    """A folder on this disk, and where it came from.

    Attributes:
        folder: holds the files; a snapshot of the Hub's cache where `repo_id` is set.
        repo_id: repository on the Hub, or None for a folder of the user.
        revision: branch, tag or commit as asked for, or None.
        commit: the commit that `folder` holds, or None for a folder of the user.
        files: names of the files in `folder`, or of all in the repository; those not asked for are not in `folder`.
        subfolder: where in the repository, or in the folder of the user, `folder` is; "" for all of it.
    """

    folder: Path
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    files: tuple[str, ...] = ()
    subfolder: str = ""

    @property
    def root(self) -> Path:
        """`folder` without the sub-folder."""
        return _without(self.folder, self.subfolder)

    @property
    def label(self) -> str:
        """How messages call it: the repository, its commit and the sub-folder, or the folder."""
        if self.repo_id is None:
            return str(self.folder)
        return _joined(f"{self.repo_id}@{(self.commit or '')[:12]}", self.subfolder)

    @property
    def pinned(self) -> tuple[str, str]:
        """Repository and commit; only for a source that comes from the Hub."""
        assert self.repo_id is not None
        assert self.commit is not None
        return self.repo_id, self.commit


def resolve(
    source: str | Path,
    revision: str | None = None,
    offline: bool = False,
    allow_patterns: Sequence[str] | None = None,
    notify: Notify = notify_stderr,
) -> ResolvedSource:
    """Return a folder with the files of a folder or Hub repository that match.

    Args:
        source: an existing folder, or the id of a model repository on the Hub. A folder of that name comes first.
        revision: branch, tag or commit of the repository; refused for a folder.
        offline: use only what the cache holds; as HF_HUB_OFFLINE=1.
        allow_patterns: shell patterns of the files to fetch; all files, if None.
        notify: called with notices for the user.

    Raises:
        SourceError: no such folder or repository or revision, no access, no connection, disk full.
    """
    return _resolve(source, revision, offline, lambda names, _: _matching(names, allow_patterns), notify)


def open_head_source(
    head: str | Path,
    revision: str | None = None,
    offline: bool = False,
    notify: Notify = notify_stderr,
    subfolder: str | None = None,
) -> ResolvedSource:
    """Return a folder with the weights (safetensors rather than .bin) and the small files of a draft head.

    Args:
        head, revision, offline, notify: as `resolve`.
        subfolder: where in the repository or folder the head is. The repository's card comes with it where the
            sub-folder has none.

    Raises:
        UsageError: a sub-folder that would lead out.
        SourceError: as `resolve`; or there is no such sub-folder.
        CheckpointError: the repository holds no weights, or an index that is damaged or unsafe.
        UnsupportedHeadError: the index names tensors that no head has.
    """
    inside = clean_subfolder(subfolder)
    whole = _resolve(head, revision, offline, partial(_head_names, subfolder=inside), notify, inside)
    resolved = replace(whole, folder=whole.folder / inside, subfolder=inside)
    if resolved.repo_id is None:
        if not resolved.folder.is_dir():
            raise _no_subfolder(str(head), inside, [path.name for path in whole.folder.iterdir() if path.is_dir()])
        return replace(resolved, files=tuple(list_names(resolved.folder)))
    chosen = choose_weights(list_names(resolved.folder), resolved.label)
    if chosen.endswith(".index.json"):
        index = read_index(resolved.folder / chosen)
        # A whole model named by mistake is refused before its gigabytes are fetched.
        canonical_names(index.shard_of, resolved.label)
        _fetch(whole, [_joined(inside, shard) for shard in index.shards], offline)
    return resolved


def target_files(
    target: str | Path, revision: str | None = None, offline: bool = False, notify: Notify = notify_stderr
) -> ResolvedSource:
    """Return a folder with configuration and tokenizer of a target; its weights are not fetched.

    Arguments and errors as `resolve`.
    """
    return resolve(target, revision, offline, TARGET_FILES, notify)


def open_target_lm_head(
    target: str | Path | ResolvedSource,
    revision: str | None = None,
    offline: bool = False,
    notify: Notify = notify_stderr,
) -> TargetLMHead:
    """Open the LM head of a target: its `lm_head.weight`, or its input embedding where that is tied or all it has.

    From a folder, and from weights that are whole in the Hub's cache, it is read in place. Otherwise the index, the
    header of one shard and the bytes of this tensor are fetched, and kept under `HF_HOME/assets/eagle-slim`, where
    `HF_ASSETS_CACHE` may point elsewhere. Of a repository that has only `pytorch_model.bin`, whose layout does not
    allow it, the whole file or shard is fetched, after a notice.

    Args:
        target: folder or Hub repository, or what `target_files` returned for it.
        revision: branch, tag or commit of a repository.
        offline: use only what the caches hold.
        notify: called with notices for the user.

    Raises:
        SourceError: as `resolve`; or the server ignores byte ranges, or the connection breaks again and again.
        CheckpointError: the weights are damaged, or have no LM head in floating point.
    """
    if not isinstance(target, ResolvedSource):
        target = resolve(target, revision, offline, ("config.json",), notify)
    if target.repo_id is None:
        return open_local_lm_head(target.folder, target.label)
    if (cached := _cached_lm_head(target)) is not None:
        return cached
    if offline or _library_offline():
        raise SourceError(
            f"{target.label}: its LM head is not in the cache, and fetching is off (--offline or HF_HUB_OFFLINE).\n"
            "Run the same command once with a connection, or give a folder with --target."
        )
    return _fetch_lm_head(target, notify)


def push_folder(
    folder: Path | str,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload slim draft head",
) -> str:
    """Upload every file of a folder to a model repository, made if it does not exist, and return its address.

    Args:
        folder: what to upload.
        repo_id: `name/repository`.
        private: visibility of a new repository; the account's default if None.
        revision: an existing branch; the main one if None.
        commit_message: of the one commit.

    Raises:
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name=_LIBRARY_NAME)
    with _explained(repo_id, revision, "write"):
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        try:
            api.upload_folder(
                repo_id=created.repo_id, folder_path=str(folder), revision=revision, commit_message=commit_message
            )
        except RuntimeError as error:
            # The library's wrapper around whatever stopped the upload of one large file.
            raise SourceError(
                f"{repo_id}: the upload failed: {shorten(str(error), 160)} ({shorten(str(error.__cause__), 200)}).\n"
                "Nothing was committed: run the same command again."
            ) from error
    return str(created)


def _matching(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    if patterns is None:
        return list(names)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _head_names(names: Sequence[str], where: str, subfolder: str) -> list[str]:
    folder_of = {name: name.rpartition("/")[0] for name in names}
    beside = [name.rpartition("/")[2] for name in names if folder_of[name] == subfolder]
    if subfolder and not beside:
        raise _no_subfolder(where, subfolder, folder_of.values())
    try:
        found = [*_matching(beside, HEAD_FILES), choose_weights(beside, _joined(where, subfolder))]
    except CheckpointError as error:
        elsewhere = {folder_of[name] for name in names if name.endswith(".safetensors")} - {"", subfolder}
        if not elsewhere:
            raise
        raise CheckpointError(f"{error}\nWeights are in its sub-folders {_listed(elsewhere)}: name one.") from error
    card = ["README.md"] if "README.md" in names and "README.md" not in beside else []
    return [_joined(subfolder, name) for name in found] + card


def _no_subfolder(where: str, subfolder: str, folders: Collection[str]) -> SourceError:
    return SourceError(f"{where}: no files in a sub-folder {subfolder!r}.\nIts sub-folders: {_listed(folders)}.")


def _listed(folders: Collection[str]) -> str:
    return ", ".join(sorted({folder for folder in folders if folder[:1] not in ("", ".")})[:8]) or "none"


def _joined(folder: str, name: str) -> str:
    return "/".join(part for part in (folder, name) if part)


def _resolve(
    source: str | Path,
    revision: str | None,
    offline: bool,
    choose: _Choose,
    notify: Notify,
    subfolder: str = "",
) -> ResolvedSource:
    folder = expand_home(source)
    if str(source) and folder.is_dir():
        if revision is not None:
            raise SourceError(f"{source}: is a folder and has no revision {revision!r}.\nLeave the revision out.")
        return ResolvedSource(folder, files=tuple(list_names(folder)))
    repo_id = _repository_id(source)
    if not (offline or _library_offline()):
        try:
            return _resolve_online(repo_id, revision, choose)
        except _UnreachableError as error:
            cached = _resolve_cached(repo_id, revision, choose, subfolder)
            if cached is None:
                raise
            notify(f"{error.headline}; using the copy in the cache, {cached.label}")
            return cached
    cached = _resolve_cached(repo_id, revision, choose, subfolder)
    if cached is None:
        raise SourceError(
            f"{_joined(repo_id, subfolder)}: not in the cache{_at(revision)}, and fetching is off "
            "(--offline or HF_HUB_OFFLINE).\n"
            "Run the same command once with a connection, or give a folder."
        )
    return cached


def _repository_id(source: str | Path) -> str:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    text = str(source)
    is_file = expand_home(text).is_file()
    path_like = isinstance(source, Path) or text.startswith(("/", ".", "~")) or text.count("/") > 1 or not text
    if path_like or is_file:
        kind = "is a file" if is_file else "no such folder"
        raise SourceError(f"{text or '(empty)'}: {kind}.\nExpected a folder, or a Hub repository such as name/model.")
    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise SourceError(
            f"{text}: neither a folder nor the id of a Hub repository ({shorten(str(error), 200)}).\n"
            "Expected a folder, or a repository such as name/model."
        ) from error
    return text


def _resolve_online(repo_id: str, revision: str | None, choose: _Choose) -> ResolvedSource:
    from huggingface_hub import HfApi

    with _explained(repo_id, revision):
        info = HfApi(library_name=_LIBRARY_NAME).model_info(repo_id, revision=revision)
    files = tuple(sibling.rfilename for sibling in info.siblings or ())
    commit = cast(str, info.sha)
    names = choose(files, f"{repo_id}@{commit[:12]}")
    if not names:
        raise SourceError(
            f"{repo_id}: holds none of the files that are needed{_at(revision)}; "
            f"it has {', '.join(files[:8]) or 'no files'}.\nIs this the repository of a model?"
        )
    # Asked for by the name of the revision, the first file makes the library note which commit that is; --offline needs
    # it. The others are asked for by the commit, so that all come from one.
    first = _download(repo_id, names[0], revision or "main")
    folder = _without(first, names[0])
    if folder.name != commit:
        first = _download(repo_id, names[0], commit)
        folder = _without(first, names[0])
    resolved = ResolvedSource(folder, repo_id, revision, commit, files)
    _fetch(resolved, names[1:], offline=False)
    return resolved


def _resolve_cached(repo_id: str, revision: str | None, choose: _Choose, subfolder: str) -> ResolvedSource | None:
    """Return the snapshot of a revision in the cache, if it has what `choose` wants; touches no network."""
    from huggingface_hub import try_to_load_from_cache

    for name in (*HEAD_FILES, "model.safetensors"):
        found = try_to_load_from_cache(repo_id, _joined(subfolder, name), revision=revision)
        if isinstance(found, str):
            folder = _without(found, _joined(subfolder, name))
            names = tuple(_joined(subfolder, name) for name in list_names(folder / subfolder))
            try:
                complete = bool(choose(names, repo_id))
            except CheckpointError:
                complete = False
            return ResolvedSource(folder, repo_id, revision, folder.name, names) if complete else None
    return None


def _without(path: str | Path, name: str) -> Path:
    """The folder in which `path` is called `name`: `/a` for `/a/b/c` and `b/c`."""
    return Path(*Path(path).parts[: len(Path(path).parts) - len(PurePosixPath(name).parts)])


def _fetch(resolved: ResolvedSource, names: Collection[str], offline: bool) -> None:
    repo_id, commit = resolved.pinned
    for name in names:
        if (resolved.folder / name).exists():
            continue
        if offline or _library_offline():
            raise SourceError(
                f"{resolved.label}: {name} is not in the cache, and fetching is off (--offline or HF_HUB_OFFLINE).\n"
                "Run the same command once with a connection."
            )
        _download(repo_id, name, commit)


def _download(repo_id: str, name: str, revision: str) -> str:
    from huggingface_hub import hf_hub_download

    with _explained(repo_id, revision):
        return hf_hub_download(repo_id, name, revision=revision, library_name=_LIBRARY_NAME)


def _fetch_lm_head(target: ResolvedSource, notify: Notify) -> TargetLMHead:
    repo_id, _ = target.pinned
    chosen = choose_weights([name for name in target.files if "/" not in name], target.label)
    header: SafetensorsHeader | None = None
    stored: Collection[str] = ()
    said = ties_embedding(target.folder)
    if chosen.endswith(".index.json"):
        _fetch(target, [chosen], offline=False)
        index = read_index(target.folder / chosen)
        stored = index.shard_of
        name, tied = find_lm_head(stored, target.label, said)
        chosen = index.shard_of[name]
    elif not chosen.endswith(TORCH_SUFFIXES):
        header = read_remote_header(_HubFile.open(target, chosen))
        stored = header.tensors
        name, tied = find_lm_head(stored, target.label, said)
    if chosen.endswith(TORCH_SUFFIXES):
        notify(
            f"{target.label}: has no safetensors, so that one tensor cannot be fetched alone: fetching {chosen} whole"
        )
        _fetch(target, [chosen], offline=False)
        return _from_snapshot(target, chosen)
    file = _HubFile.open(target, chosen)
    header = header or read_remote_header(file)
    if name not in header.tensors:
        raise CheckpointError(
            f"{target.label}: the index says that {chosen} holds {name}, but it does not.\n"
            "Index and shards come from different versions: give another --revision, or tell the author."
        )
    folder = _tensor_cache(repo_id) / _safe_name(file.etag)
    path = fetch_tensor(file, header.tensors[name], folder, _progress)
    unused = unused_lm_head(stored, name)
    note = {"etag": file.etag, "file": chosen, "tensor": name, "tied": tied, "said": said, "unused": unused}
    with contextlib.suppress(OutputError), atomic_file(_commit_note(target)) as out:
        # Only a shortcut for the next time, and the way without a connection; a full disk need not stop this one.
        out.write(json.dumps(note, sort_keys=True).encode())
    return _from_cached_tensor(target, path, chosen, name, tied, file.etag, unused)


def _cached_lm_head(target: ResolvedSource) -> TargetLMHead | None:
    """Return the LM head from the caches, checked, or None; touches no network."""
    repo_id, _ = target.pinned
    names = list_names(target.folder)
    with contextlib.suppress(CheckpointError):
        chosen = choose_weights([name for name in names if "/" not in name], target.label)
        if not chosen.endswith(".index.json"):
            return _from_snapshot(target, chosen)
        index = read_index(target.folder / chosen)
        shard = index.shard_of[find_lm_head(index.shard_of, target.label, ties_embedding(target.folder))[0]]
        if (target.folder / shard).exists():
            return _from_snapshot(target, shard)
    try:
        note = json.loads(_commit_note(target).read_bytes())
        etag, file, name, tied = str(note["etag"]), str(note["file"]), str(note["tensor"]), bool(note["tied"])
        said, unused = bool(note.get("said")), note.get("unused")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    entry = CacheEntry(_tensor_cache(repo_id) / _safe_name(etag), name)
    if said != ties_embedding(target.folder) or not entry.checked():
        return None
    return _from_cached_tensor(target, entry.whole, file, name, tied, etag, unused)


def _from_snapshot(target: ResolvedSource, file: str) -> TargetLMHead:
    opened = open_local_lm_head(target.folder, target.label)
    # The library names a blob by its etag.
    etag = (target.folder / file).resolve().name
    return replace(opened, etag=etag)


def _from_cached_tensor(
    target: ResolvedSource, path: Path, file: str, name: str, tied: bool, etag: str, unused: str | None
) -> TargetLMHead:
    opened = open_weights_file(path)
    head = lm_head_of(Checkpoint(target.label, {name: opened}), name, tied, etag, target.label, unused)
    return replace(head, file=file)


def _tensor_cache(repo_id: str) -> Path:
    from huggingface_hub import cached_assets_path, constants

    with _explained(repo_id, None):
        return cached_assets_path(
            _LIBRARY_NAME,
            namespace="tensors",
            subfolder=repo_id.replace("/", "--"),
            assets_dir=constants.HF_ASSETS_CACHE,
        )


def _commit_note(target: ResolvedSource) -> Path:
    repo_id, commit = target.pinned
    return _tensor_cache(repo_id) / f"{_safe_name(commit)}.json"


def _safe_name(etag: str) -> str:
    return quote(etag, safe="").replace(".", "%2E")


@dataclass(frozen=True)
class _HubFile:
    """A file of a repository at one commit, read by byte ranges; the transport of `remote.py`."""

    label: str
    size_bytes: int
    etag: str
    url: str
    repo_id: str
    commit: str

    @classmethod
    def open(cls, target: ResolvedSource, name: str) -> _HubFile:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        repo_id, commit = target.pinned
        url = hf_hub_url(repo_id, name, revision=commit)
        label = f"{target.label}/{name}"
        with _explained(repo_id, target.revision):
            metadata = get_hf_file_metadata(url, library_name=_LIBRARY_NAME)
        if metadata.size is None or metadata.etag is None:
            raise SourceError(
                f"{label}: the server at {_endpoint()} names no size and etag, so it is not a Hub.\n"
                "Check HF_ENDPOINT and the proxy."
            )
        return cls(label, metadata.size, metadata.etag, url, repo_id, commit)

    @contextmanager
    def stream(self, start: int, end: int) -> Iterator[Iterator[bytes]]:
        """Open bytes [start, end): see `remote.RemoteFile`."""
        from huggingface_hub import constants, get_session

        # Both are documented as public, though the module has no __all__.
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        headers = {
            **build_hf_headers(library_name=_LIBRARY_NAME),
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        try:
            session: Any = get_session()
            with _open_stream(session, self.url, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT) as (response, chunks):
                if response.status_code in _BUSY:
                    raise ConnectionBrokenError(f"status {response.status_code}", _retry_after(response))
                with _explained(self.repo_id, self.commit):
                    hf_raise_for_status(response)
                self._check_range(response, start, end)
                yield chunks
        except _transport_errors() as error:
            raise ConnectionBrokenError(f"{type(error).__name__}: {error}") from error

    def _check_range(self, response: Any, start: int, end: int) -> None:
        expected = f"bytes {start}-{end - 1}/{self.size_bytes}"
        found = response.headers.get("Content-Range")
        whole = response.status_code == 200 and start == 0 and end == self.size_bytes
        if not whole and (response.status_code != 206 or found != expected):
            raise SourceError(
                f"{self.label}: the server does not serve byte ranges: asked for {expected}, it answered "
                f"{response.status_code} with {found or 'no range'}.\n"
                f"Fetch the repository whole (`hf download {self.repo_id}`) and give its folder with --target."
            )


@contextmanager
def _open_stream(session: Any, url: str, headers: dict[str, str], timeout_s: float) -> Iterator[tuple[Any, Any]]:
    """Open a streamed GET on the library's session: httpx since huggingface_hub 1.0, requests before."""
    # A requests session has an attribute of this name too, a switch.
    if callable(session.stream):
        with session.stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
            # As it comes: given a size, httpx holds chunks back until they are that large, and loses them on an error.
            yield response, response.iter_raw()
    else:
        with session.get(url, headers=headers, timeout=timeout_s, stream=True) as response:
            yield response, response.iter_content(_READ_BYTES)


def _transport_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library below huggingface_hub, whichever it is: what a broken connection raises."""
    from huggingface_hub.errors import HfHubHTTPError

    library = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
    names = ("RequestException", "TransportError", "StreamError", "InvalidURL")
    return tuple(getattr(library, name) for name in names if hasattr(library, name))


def _retry_after(response: Any) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None


@contextmanager
def _progress(label: str, done_bytes: int, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, in the library's style, so that its switches (HF_HUB_DISABLE_PROGRESS_BARS) hold."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # public, not in __all__

    bar = tqdm(  # type: ignore[no-untyped-call]
        desc=label[-60:],
        total=total_bytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None,
    )
    with bar:
        yield bar.update


class _UnreachableError(SourceError):
    """The Hub cannot be reached; a copy in the cache may do instead."""

    def __init__(self, headline: str, advice: str) -> None:
        super().__init__(f"{headline}.\n{advice}")
        self.headline = headline


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _library_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _explained(repo_id: str, revision: str | None, purpose: str = "read") -> Iterator[None]:
    """Turn the errors of `huggingface_hub` and of the disk of its cache into SourceError with the next step."""
    from huggingface_hub import errors

    try:
        yield
    # First, because before huggingface_hub 1.0 it was one of the HTTP errors.
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__ or error.__context__ or error
        raise _UnreachableError(*_unreachable(repo_id, cause)) from error
    except errors.HfHubHTTPError as error:
        raise _http_error(error, repo_id, revision, purpose) from error
    except errors.EntryNotFoundError as error:
        raise SourceError(f"{repo_id}: a file is missing{_at(revision)} ({shorten(str(error), 200)}).") from error
    except errors.HFValidationError as error:
        raise SourceError(
            f"{repo_id}: not the id of a repository ({shorten(str(error), 200)}).\nExpected name/repository."
        ) from error
    except _transport_errors() as error:
        raise _UnreachableError(*_unreachable(repo_id, error)) from error
    except errors.OfflineModeIsEnabled as error:
        raise SourceError(f"{repo_id}: fetching is off: HF_HUB_OFFLINE is set.\nUnset it.") from error
    except OSError as error:
        raise _disk_error(error, repo_id) from error


def _http_error(error: Any, repo_id: str, revision: str | None, purpose: str) -> SourceError:
    from huggingface_hub import errors

    page = f"{_endpoint()}/{repo_id}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "Log in with `hf auth login`, or set HF_TOKEN."
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{repo_id}: a gated repository, and this account has no access to it.\n"
            f"Ask for access at {page}, then: {login}"
        )
    if isinstance(error, errors.DisabledRepoError):
        return SourceError(f"{repo_id}: the Hub has disabled this repository.\nSee {page}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{repo_id}: has no revision {revision or 'main'!r}.\n{_revisions(repo_id)}")
    if isinstance(error, errors.EntryNotFoundError):
        return SourceError(f"{repo_id}: a file is missing{_at(revision)}: {shorten(str(error), 300)}.\nSee {page}.")
    if purpose == "write" and status in (401, 403):
        return SourceError(
            f"{repo_id}: may not be written with this account (status {status}).\n"
            f"{login} The token needs the right to write to this name."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        if (kind := _other_kind(repo_id)) is not None:
            return SourceError(
                f"{repo_id}: is a {kind} on the Hub; a model repository is expected.\n"
                "Check the id; a data set is given with --dataset."
            )
        return SourceError(
            f"{repo_id}: no such folder here, and no such model at {_endpoint()}, or a private one.\n"
            f"Check the spelling. For a private one: {login}"
        )
    if status == 401:
        return SourceError(f"{repo_id}: the token is not accepted (status 401).\n{login}")
    if status in _BUSY:
        return _UnreachableError(*_unreachable(repo_id, f"status {status}"))
    return SourceError(f"{repo_id}: the Hub refuses (status {status}): {shorten(str(error), 300)}.\nSee {page}.")


def _unreachable(repo_id: str, cause: object) -> tuple[str, str]:
    reason = cause if isinstance(cause, str) else f"{type(cause).__name__}: {shorten(str(cause), 160)}"
    return (
        f"{repo_id}: {_endpoint()} cannot be reached ({reason})",
        "Check the connection, the proxy and HF_ENDPOINT, and try again; or give a folder.",
    )


def _disk_error(error: OSError, repo_id: str) -> SourceError:
    from huggingface_hub import constants

    cache = error.filename or constants.HF_HUB_CACHE
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = Path(constants.HF_HUB_CACHE)
        while not place.exists():
            place = place.parent
        return SourceError(
            f"{repo_id}: the disk of the cache is full ({cache}, {shutil.disk_usage(place).free:,} bytes free).\n"
            "Free some space, or set HF_HOME to a folder on another disk."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SourceError(
            f"{repo_id}: the cache cannot be written ({cache}: {os.strerror(error.errno)}).\n"
            "Set HF_HOME to a folder of your own."
        )
    return SourceError(f"{repo_id}: the transfer failed ({shorten(str(error), 300)}).\nTry again.")


def _other_kind(repo_id: str) -> str | None:
    """Return "dataset" or "space" where the Hub has one of this id; errors mean that it has not."""
    from huggingface_hub import HfApi, errors

    for kind in ("dataset", "space"):
        with contextlib.suppress(errors.HfHubHTTPError, *_transport_errors()):
            HfApi(library_name=_LIBRARY_NAME).repo_info(repo_id, repo_type=kind)
            return kind
    return None


def _revisions(repo_id: str) -> str:
    from huggingface_hub import HfApi, errors

    with contextlib.suppress(errors.HfHubHTTPError, *_transport_errors()):
        refs = HfApi(library_name=_LIBRARY_NAME).list_repo_refs(repo_id)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        return f"It has {', '.join(names[:12])}; a commit hash must be whole."
    return "Give a branch, a tag or a whole commit hash."
