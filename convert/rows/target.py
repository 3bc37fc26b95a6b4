"""The LM head of a target, from a folder, from the Hub's cache, or as the bytes of one tensor from the Hub.

Where config.json ties the LM head to the input embedding, the embedding is it even beside a stored LM head: so vLLM,
SGLang and transformers 4 load such a target. transformers 5 takes the stored one where the two differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagle_slim.vocab_tools.files import write_file

from ..errors import CheckpointError
from ..files import read_object
from ..hub.client import is_offline, notify_stderr
from ..hub.range_reads import CacheEntry, fetch_tensor, read_remote_header
from ..hub.remote_file import HubFile
from ..hub.snapshot import cache_folder, fetch, not_cached
from ..sources.source import ResolvedSource
from .checkpoint import Checkpoint, open_checkpoint, open_weights_file
from .dtypes import FLOATS
from .lm_head import LmHead
from .paths import TORCH_SUFFIXES, choose_weights, list_names, path_inside, read_index
from .types import shorten

LM_HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "language_model.model.lm_head.weight",
    "text_model.lm_head.weight",
)
"""Spellings of an LM head of its own: plain, and inside multimodal models."""

_TIE = "tie_word_embeddings"

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "text_model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "embed_tokens.weight",
)
"""Spellings of the input embedding, which is the LM head too where none of `LM_HEAD_NAMES` exists."""


def find_lm_head(names: Collection[str], where: str, tied: bool = False) -> str:
    """Return the name of the LM-head tensor among `names`: the embedding first where they are `tied`, else last.

    Raises:
        CheckpointError: there is neither under any known name.
    """
    spellings = EMBEDDING_NAMES + LM_HEAD_NAMES if tied else LM_HEAD_NAMES + EMBEDDING_NAMES
    if (found := next((name for name in spellings if name in names), None)) is not None:
        return found
    near = sorted(name for name in names if "head" in name or "embed" in name)[:8]
    raise CheckpointError.at(
        where,
        f"no LM head: expected {LM_HEAD_NAMES[0]} or {EMBEDDING_NAMES[0]}, perhaps under language_model., "
        f"found {shorten(near, 300) if near else 'no tensor with such a name'}.\n"
        "Expected a causal language model in the Hugging Face layout.",
        found=near,
    )


def unused_lm_head(names: Collection[str], chosen: str) -> str | None:
    """Name of an LM head that is stored beside `chosen`, the tied embedding; None without one."""
    return next((name for name in LM_HEAD_NAMES if name in names), None) if chosen in EMBEDDING_NAMES else None


def ties_embedding(folder: Path) -> bool:
    """Whether the config.json in `folder` ties the LM head to the input embedding.

    A multimodal target must not say otherwise in one of its two places; engines differ in which of them they read.
    """
    try:
        config = read_object(folder / "config.json", CheckpointError, str(folder))
    except CheckpointError:
        return False
    parts = (config, config.get("text_config"))
    said = [part[_TIE] for part in parts if isinstance(part, dict) and part.get(_TIE) is not None]
    return bool(said) and all(value is True for value in said)


def open_target_lm_head(target: ResolvedSource, offline: bool = False) -> LmHead:
    """Open the LM head of a target: its `lm_head.weight`, or its input embedding where that is tied or all it has.

    From a folder, and from weights that are whole in the Hub's cache, it is read in place. Otherwise the index, the
    header of one shard and the bytes of this tensor are fetched, and kept under `HF_HOME/assets/eagle-slim`, where
    `HF_ASSETS_CACHE` may point elsewhere. Of a repository that has only `pytorch_model.bin`, whose layout does not
    allow it, the whole file or shard is fetched, after a notice; with `offline`, nothing is.

    Raises:
        SourceError: as `target_files`; or the server ignores byte ranges, or the connection breaks again and again.
        CheckpointError: the weights are damaged, or have no LM head in floating point.
    """
    if target.repo_id is None:
        return open_local_lm_head(target.folder, target.label)
    if (cached := _cached(target)) is not None:
        return cached
    if offline or is_offline():
        raise not_cached(target.label, " (its LM head)", "Or give a folder with --target.")
    return _fetch(target)


def open_local_lm_head(folder: Path, label: str) -> LmHead:
    """Open the LM head of a target in a folder; of a sharded target only the shard that holds it need be there."""
    chosen = choose_weights(list_names(folder), str(folder))
    shards = read_index(path_inside(folder, chosen)).shard_of if chosen.endswith(".index.json") else None
    checkpoint = open_checkpoint(folder) if shards is None else None
    stored = checkpoint.names if checkpoint is not None else tuple(shards or ())
    name = find_lm_head(stored, label, ties_embedding(folder))
    if checkpoint is None:
        checkpoint = open_checkpoint(folder, {name})
    unused = unused_lm_head(stored, name)
    if unused is not None and (shards is None or (folder / shards[unused]).is_file()):
        # Opened anew: what is read for this comparison is not what the conversion read.
        both = open_checkpoint(folder, {name, unused})
        unused = None if _same(both, name, unused) else unused
    file = checkpoint.file_of(name).path.name
    return _checked(LmHead(checkpoint, name, label, "target", unused, file))


def _same(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    infos = [checkpoint.info(each) for each in (name, other)]
    is_alike = (infos[0].dtype, infos[0].shape) == (infos[1].dtype, infos[1].shape)
    return is_alike and checkpoint.sha256(name) == checkpoint.sha256(other)


def _checked(lm_head: LmHead) -> LmHead:
    """The LM head, if it is a matrix of floating-point numbers (and not quantised to integers, say)."""
    info = lm_head.checkpoint.info(lm_head.name)
    if len(info.shape) != 2 or info.dtype not in FLOATS:
        raise CheckpointError.at(
            lm_head.where,
            f"{info.name}: expected a matrix of bf16, fp16 or fp32, found {info.dtype} "
            f"{list(info.shape)}.\nGive the unquantised target with --target.",
            tensor=lm_head.name,
            found=info.dtype,
        )
    return lm_head


def _fetch(target: ResolvedSource) -> LmHead:
    snapshot = target.snapshot
    chosen = choose_weights([name for name in target.files if "/" not in name], target.label)
    stored: Collection[str] = ()
    name, said = "", ties_embedding(target.folder)
    if chosen.endswith(".index.json"):
        fetch(snapshot, [chosen], offline=False)
        index = read_index(target.folder / chosen)
        stored = index.shard_of
        name = find_lm_head(stored, target.label, said)
        chosen = index.shard_of[name]
    if chosen.endswith(TORCH_SUFFIXES):
        notify_stderr(
            f"{target.label}: has no safetensors, so that one tensor cannot be fetched alone: fetching {chosen} whole"
        )
        fetch(snapshot, [chosen], offline=False)
        return open_local_lm_head(target.folder, target.label)
    file = HubFile.open(snapshot.repo_id, snapshot.commit, chosen, f"{target.label}/{chosen}")
    header = read_remote_header(file)
    if not stored:
        stored = header.tensors
        name = find_lm_head(stored, target.label, said)
    if name not in header.tensors:
        raise CheckpointError.at(
            target.label,
            f"the index says that {chosen} holds {name}, but it does not.\n"
            "Index and shards come from different versions: give another --revision, or tell the author.",
            tensor=name,
            shard=chosen,
        )
    fetch_tensor(file, header.tensors[name], header.offsets[name], _entry(target, file.etag, name).folder)
    unused = unused_lm_head(stored, name)
    note = {"etag": file.etag, "file": chosen, "tensor": name, "said": said, "unused": unused}
    with contextlib.suppress(OSError):
        # Only a shortcut for the next time, and the way without a connection; a full disk need not stop this one.
        write_file(_commit_note(target), json.dumps(note, sort_keys=True).encode())
    return _noted(target, note)


def _cached(target: ResolvedSource) -> LmHead | None:
    """Return the LM head from the caches, checked, or None; touches no network."""
    names = list_names(target.folder)
    with contextlib.suppress(CheckpointError):
        chosen = choose_weights([name for name in names if "/" not in name], target.label)
        if chosen.endswith(".index.json"):
            index = read_index(target.folder / chosen)
            chosen = index.shard_of[find_lm_head(index.shard_of, target.label, ties_embedding(target.folder))]
        if (target.folder / chosen).exists():
            return open_local_lm_head(target.folder, target.label)
    try:
        note = json.loads(_commit_note(target).read_bytes())
        if note["said"] == ties_embedding(target.folder) and _entry(target, note["etag"], note["tensor"]).checked():
            return _noted(target, note)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _noted(target: ResolvedSource, note: dict[str, Any]) -> LmHead:
    """The LM head that was fetched, as it was noted then."""
    name = note["tensor"]
    checkpoint = Checkpoint(target.label, {name: open_weights_file(_entry(target, note["etag"], name).whole)})
    return _checked(LmHead(checkpoint, name, target.label, "target", note["unused"], note["file"]))


def _entry(target: ResolvedSource, etag: str, tensor: str) -> CacheEntry:
    return CacheEntry(cache_folder(target.snapshot.repo_id) / _safe_name(etag), tensor)


def _commit_note(target: ResolvedSource) -> Path:
    return cache_folder(target.snapshot.repo_id) / f"{_safe_name(target.snapshot.commit)}.json"


def _safe_name(etag: str) -> str:
    return quote(etag, safe="").replace(".", "%2E")
