"""The LM head of a target, from a folder, from the Hub's cache, or as the bytes of one tensor from the Hub.

Where config.json ties the LM head to the input embedding, the embedding is it even beside a stored LM head: so vLLM,
SGLang and transformers 4 load such a target. transformers 5 takes the stored one where the two differ.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.hub import fetch, is_offline, not_cached
from eagle_slim.vocab_tools.target import says_tied

from .. import names
from ..errors import CheckpointError, MismatchError
from ..heads.config import EMBEDDING_TRAINED_KEY
from ..heads.draft_head import DraftHead
from ..rows.checkpoint import Checkpoint, SourceRows, open_checkpoint
from ..rows.files import FLOATS, TORCH_SUFFIXES, check_blob, choose_weights, list_names, read_index, shorten
from ..rows.hub_tensor import HubFile, cached_tensor, fetch_tensor, kept_tensor
from ..sources.source import ResolvedSource
from .lm_head import LmHead

# The last two are Qwen-Omni's and DeepSeek-VL2's.
_PARTS = ("language_model.", "model.language_model.", "language_model.model.", "text_model.", "thinker.", "language.")
_MODEL = ("", "model.", *_PARTS)
LM_HEAD_NAMES = tuple(f"{prefix}lm_head.weight" for prefix in _MODEL)
"""Spellings of an LM head of its own: plain, and inside multimodal models."""

_TEXT = ("model.", *_MODEL, "model.language_model.model.", "model.text_model.", "thinker.model.", "language.model.")
EMBEDDING_NAMES = tuple(f"{prefix}embed_tokens.weight" for prefix in _TEXT)
"""Spellings of the input embedding, which is the LM head too where none of `LM_HEAD_NAMES` exists."""


def find_lm_head(names: Collection[str], where: str, tied: bool | None = None) -> str:
    """Return the LM head's name among `names`, the embedding first where `tied`, else last; else CheckpointError."""
    prefixes = tuple(f"{prefix}lm_head." for prefix in _MODEL)
    other = next((name for name in names if name.startswith(prefixes) and name not in LM_HEAD_NAMES), None)
    if not tied and other is not None:
        problem = f"{shorten(other)}: an LM head that is quantised, or has a bias, is not gathered"
        raise CheckpointError.at(where, f"{problem}.\nGive another form of the target with --target.")
    if tied is False and not any(name in names for name in LM_HEAD_NAMES):
        problem = "no LM head: config.json says tie_word_embeddings: false, and the weights hold none"
        raise CheckpointError.at(where, f"{problem}.\nFetch all of the target's weights, or correct a copy of it.")
    spellings = EMBEDDING_NAMES + LM_HEAD_NAMES if tied else LM_HEAD_NAMES + EMBEDDING_NAMES
    if (found := next((name for name in spellings if name in names), None)) is not None:
        return found
    near = sorted(name for name in names if "head" in name or "embed" in name)[:8]
    problem = f"no LM head: expected {LM_HEAD_NAMES[0]} or {EMBEDDING_NAMES[0]}, found {shorten(near, 300)}"
    raise CheckpointError.at(where, f"{problem}.\nExpected a causal language model in the Hugging Face layout.")


def ties_embedding(folder: Path) -> bool | None:
    """Tell whether the config.json in `folder` ties the LM head to the input embedding; None where it does not say."""
    try:
        return says_tied(read_object(folder / "config.json", CheckpointError))
    except CheckpointError:
        return None


def open_target_lm_head(target: ResolvedSource, offline: bool = False) -> LmHead:
    """Open the LM head of a target: its `lm_head.weight`, or its input embedding where that is tied or all it has.

    From a folder or the Hub's cache it is read in place. Otherwise the bytes of this tensor are fetched (`hub_tensor`);
    of a repository that has only `pytorch_model.bin`, the whole file or shard. With `offline`, nothing is. Raises
    SourceError as `target_files`, CheckpointError where the weights are damaged, or have no LM head in floating point.
    """
    try:
        return open_local_lm_head(target.folder, target.label)
    except CheckpointError:
        if target.repo_id is None:
            raise
    with contextlib.suppress(CheckpointError):
        return _fetched(target)
    if offline or is_offline():
        raise not_cached(target.label, "its LM head")
    return _fetch(target)


def settle_embedding(head: DraftHead, target: ResolvedSource | None) -> DraftHead:
    """Return a head without an embedding of its own that is a copy of the target's, with a warning of any other.

    vLLM compares the two when it loads a head, and drafts with the head's own where they differ
    (`v1/spec_decode/llm_base_proposer.py`). What config.json says to be trained is not compared.
    """
    is_settled = head.target_hidden_size != head.hidden_size or head.config.get(EMBEDDING_TRAINED_KEY)
    if head.kind == "dflash" or names.EMBEDDING not in head.tensors or is_settled:
        return head
    is_copy = None if target is None else is_embedding_of(target, head)
    if head.kind == "eagle3" and is_copy:
        kept = {**head.tensors.stored}
        dropped = {**head.dropped, kept.pop(names.EMBEDDING): "a copy of the target's, which every engine shares"}
        return replace(head, tensors=replace(head.tensors, stored=kept), dropped=dropped)
    if is_copy or (is_copy is None and head.kind == "eagle"):
        return head
    reason = "is not a copy of the target's"
    if is_copy is None:
        reason = "was not compared with the target's, whose weights are not on this disk (--target takes their folder)"
    elif head.kind == "eagle":
        reason += ", with which SGLang drafts all the same"
    return replace(head, warnings=(*head.warnings, f"embed_tokens.weight is kept: it {reason}"))


def tied_warnings(lm_head: LmHead, target: ResolvedSource) -> list[str]:
    """Warn where a target stores another LM head beside the embedding that config.json says it is, if both are here."""
    if lm_head.name not in EMBEDDING_NAMES:
        return []
    try:
        other = open_local_lm_head(target.folder, target.label, tied=False)
        is_alike = other.info.shape == lm_head.info.shape
        if is_alike:
            stored = SourceRows(other.checkpoint, other.name, lm_head.info.dtype, target.label)
            if not len(stored.differing(lm_head.checkpoint.array(lm_head.name))):
                return []
    except (CheckpointError, MismatchError):
        return []
    found = "they differ" if is_alike else f"its shape is {list(other.info.shape)}, not {list(lm_head.info.shape)}"
    what = f"{target.label} holds {other.name} beside {lm_head.name}, to which config.json ties it, and {found}"
    return [
        f"{what}: rows are the embedding's, as in vLLM and SGLang; transformers 5, and eagle-generate, take the other"
    ]


def is_embedding_of(target: ResolvedSource, head: DraftHead) -> bool | None:
    """Tell whether a head's embedding is the target's, padding aside, in the head's dtype; None if it is not here."""
    try:
        lm_head = open_local_lm_head(target.folder, target.label, tied=True)
    except CheckpointError:
        return None
    info, rows = head.tensors.info(names.EMBEDDING), head.tensors.source.array(head.tensors.stored[names.EMBEDDING])
    if lm_head.name not in EMBEDDING_NAMES or lm_head.info.shape[1:] != info.shape[1:]:
        return None
    common = np.arange(min(len(rows), lm_head.info.num_rows))
    try:
        of_target = SourceRows(lm_head.checkpoint, lm_head.name, info.dtype, target.label, common)
        return len(of_target.differing(rows)) == 0
    except (CheckpointError, MismatchError):
        # The target's has values that the head's dtype does not hold, or that are none.
        return False


def open_local_lm_head(folder: Path, label: str, tied: bool | None = None) -> LmHead:
    """Open the LM head of a target in a folder, of whose shards its own suffices; `tied` as config.json says."""
    tied, only = ties_embedding(folder) if tied is None else tied, None
    chosen = choose_weights(list_names(folder), str(folder))
    if chosen.endswith(".index.json"):
        only = {find_lm_head(read_index(folder / chosen), label, tied)}
    checkpoint = open_checkpoint(folder, only)
    for file in checkpoint.files:
        check_blob(file.path)
    return _checked(LmHead(checkpoint, find_lm_head(checkpoint.names, label, tied), label, "target"))


def _checked(lm_head: LmHead) -> LmHead:
    info = lm_head.checkpoint.info(lm_head.name)
    if len(info.shape) != 2 or info.dtype not in FLOATS:
        problem = f"{info.name}: expected a matrix of bf16, fp16 or fp32, found {info.dtype} {list(info.shape)}"
        raise CheckpointError.at(lm_head.where, f"{problem}.\nGive the unquantised target with --target.")
    return lm_head


def _fetch(target: ResolvedSource) -> LmHead:
    snapshot, tied, shard_of = target.snapshot, ties_embedding(target.folder), dict[str, str]()
    chosen = choose_weights([name for name in target.files if "/" not in name], target.label)
    if chosen.endswith(".index.json"):
        fetch(snapshot, [chosen], offline=False)
        shard_of = read_index(target.folder / chosen)
        chosen = shard_of[find_lm_head(shard_of, target.label, tied)]
    if chosen.endswith(TORCH_SUFFIXES):
        logging.getLogger(__name__).warning(f"{target.label}: has no safetensors: fetching {chosen} whole")
        fetch(snapshot, [chosen], offline=False)
        return open_local_lm_head(target.folder, target.label)
    file = HubFile.open(snapshot.repo_id, snapshot.commit, chosen, f"{target.label}/{chosen}")
    header = file.read_header()
    name = find_lm_head(shard_of or header.tensors, target.label, tied)
    if name not in header.tensors:
        problem = f"the index says that {chosen} holds {name}, but it does not.\nGive another --revision."
        raise CheckpointError.at(target.label, problem)
    fetch_tensor(file, header, name, cached_tensor(snapshot.repo_id, snapshot.commit))
    return _fetched(target)


def _fetched(target: ResolvedSource) -> LmHead:
    file = kept_tensor(cached_tensor(target.snapshot.repo_id, target.snapshot.commit))
    (name,) = file.tensors
    return _checked(LmHead(Checkpoint.of(file, target.label), name, target.label, "target"))
