"""The LM head of a target, from a folder, from the Hub's cache, or as the bytes of one tensor from the Hub."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from ..atomic import atomic_file
from ..errors import CheckpointError, OutputError
from ..hub.client import is_offline, notify_stderr
from ..hub.range_reads import CacheEntry, fetch_tensor, read_remote_header
from ..hub.remote_file import HubFile, progress_bar
from ..hub.snapshot import cache_folder, fetch, not_cached
from ..weights.checkpoint import Checkpoint, open_weights_file
from ..weights.paths import TORCH_SUFFIXES, choose_weights, list_names, read_index
from ..weights.safetensors_header import SafetensorsHeader
from .lm_head import (
    TargetLMHead,
    find_lm_head,
    lm_head_bias,
    lm_head_of,
    open_local_lm_head,
    ties_embedding,
    unused_lm_head,
)
from .source import Notify, ResolvedSource, resolve


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
    if (cached := _cached(target)) is not None:
        return cached
    if offline or is_offline():
        raise not_cached(target.label, " (its LM head)", "Or give a folder with --target.")
    return _fetch(target, notify)


def _fetch(target: ResolvedSource, notify: Notify) -> TargetLMHead:
    snapshot = target.snapshot
    chosen = choose_weights([name for name in target.files if "/" not in name], target.label)
    header: SafetensorsHeader | None = None
    stored: Collection[str] = ()
    said = ties_embedding(target.folder)
    if chosen.endswith(".index.json"):
        fetch(snapshot, [chosen], offline=False)
        index = read_index(target.folder / chosen)
        stored = index.shard_of
        name, tied = find_lm_head(stored, target.label, said)
        chosen = index.shard_of[name]
    elif not chosen.endswith(TORCH_SUFFIXES):
        header = read_remote_header(_open(target, chosen))
        stored = header.tensors
        name, tied = find_lm_head(stored, target.label, said)
    if chosen.endswith(TORCH_SUFFIXES):
        notify(
            f"{target.label}: has no safetensors, so that one tensor cannot be fetched alone: fetching {chosen} whole"
        )
        fetch(snapshot, [chosen], offline=False)
        return _from_snapshot(target, chosen)
    file = _open(target, chosen)
    header = header or read_remote_header(file)
    if name not in header.tensors:
        raise CheckpointError(
            f"{target.label}: the index says that {chosen} holds {name}, but it does not.\n"
            "Index and shards come from different versions: give another --revision, or tell the author.",
            path=target.label,
            tensor=name,
            shard=chosen,
        )
    path = fetch_tensor(file, header.tensors[name], _entry(target, file.etag, name).folder, progress_bar)
    unused = unused_lm_head(stored, name)
    bias = lm_head_bias(stored, name)
    note = {"etag": file.etag, "file": chosen, "tensor": name, "tied": tied, "said": said, "unused": unused}
    note |= {"bias": bias}
    with contextlib.suppress(OutputError), atomic_file(_commit_note(target)) as out:
        # Only a shortcut for the next time, and the way without a connection; a full disk need not stop this one.
        out.write(json.dumps(note, sort_keys=True).encode())
    return _from_tensor(target, path, chosen, name, tied, file.etag, unused, bias)


def _cached(target: ResolvedSource) -> TargetLMHead | None:
    """Return the LM head from the caches, checked, or None; touches no network."""
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
        said, unused, bias = bool(note.get("said")), note.get("unused"), note.get("bias")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    entry = _entry(target, etag, name)
    if said != ties_embedding(target.folder) or not entry.checked():
        return None
    return _from_tensor(target, entry.whole, file, name, tied, etag, unused, bias)


def _from_snapshot(target: ResolvedSource, file: str) -> TargetLMHead:
    opened = open_local_lm_head(target.folder, target.label)
    # The library names a blob by its etag.
    return replace(opened, etag=(target.folder / file).resolve().name)


def _from_tensor(
    target: ResolvedSource,
    path: Path,
    file: str,
    name: str,
    tied: bool,
    etag: str,
    unused: str | None,
    bias: str | None,
) -> TargetLMHead:
    checkpoint = Checkpoint(target.label, {name: open_weights_file(path)})
    return replace(lm_head_of(checkpoint, name, tied, etag, target.label, unused, bias), file=file)


def _open(target: ResolvedSource, name: str) -> HubFile:
    return HubFile.open(target.snapshot.repo_id, target.snapshot.commit, name, f"{target.label}/{name}")


def _entry(target: ResolvedSource, etag: str, tensor: str) -> CacheEntry:
    return CacheEntry(cache_folder(target.snapshot.repo_id) / _safe_name(etag), tensor)


def _commit_note(target: ResolvedSource) -> Path:
    return cache_folder(target.snapshot.repo_id) / f"{_safe_name(target.snapshot.commit)}.json"


def _safe_name(etag: str) -> str:
    return quote(etag, safe="").replace(".", "%2E")
