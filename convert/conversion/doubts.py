"""Oddities of a head's files that no engine reports: two sets of weights, or two LM heads, of which one was taken."""

from __future__ import annotations

from ..errors import CheckpointError
from ..head.draft_head import DraftHead
from ..sources.source import ResolvedSource
from ..weights import names
from ..weights.checkpoint import Checkpoint, open_checkpoint, same_tensors
from ..weights.paths import SINGLE_SAFETENSORS, SINGLE_TORCH


def doubts_about(head: DraftHead, source: ResolvedSource) -> list[str]:
    """Warnings about a second set of weights beside those that were opened, and about a second LM head."""
    return [*_other_weights(head, source), *_other_lm_head(head)]


def _other_weights(head: DraftHead, source: ResolvedSource) -> list[str]:
    both = {SINGLE_SAFETENSORS, SINGLE_TORCH}
    if source.weights_file or not both <= set(source.files) or not (source.folder / SINGLE_TORCH).is_file():
        return []
    try:
        other = open_checkpoint(source.folder / SINGLE_TORCH)
    except CheckpointError:
        return []
    mine = head.tensors.source.fork()
    if _same(mine, other):
        return []
    return [
        f"{SINGLE_SAFETENSORS} was read, and {SINGLE_TORCH} beside it holds other weights (SafeAILab reads that one); "
        "--weights-file chooses"
    ]


def _other_lm_head(head: DraftHead) -> list[str]:
    tensors = head.tensors
    is_tied = head.source_config.get("tie_word_embeddings") is True
    if head.kind != "eagle3" or not is_tied or names.EMBEDDING not in tensors or not head.has_lm_head:
        return []
    source = tensors.source.fork()
    if same_tensors(source, tensors.stored[names.LM_HEAD], source, tensors.stored[names.EMBEDDING]):
        return []
    return [
        "config.json ties the LM head to the embedding (tie_word_embeddings), but the file stores another LM head: the "
        "rows are those of the stored one"
    ]


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return set(one.names) == set(other.names) and all(same_tensors(one, name, other, name) for name in one.names)
