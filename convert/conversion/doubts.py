"""Ambiguous files of a head that no engine reports: two sets of weights, or two LM heads, of which one was taken."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CheckpointError
from ..head.draft_head import DraftHead
from ..sources.source import ResolvedSource
from ..weights import names
from ..weights.checkpoint import open_checkpoint, same_tensors
from ..weights.paths import SINGLE_SAFETENSORS, SINGLE_TORCH


def doubts_about(head: DraftHead, source: ResolvedSource) -> Iterator[str]:
    """Warnings about a second set of weights beside those that were opened, and about a second LM head."""
    # With a record of its own: what is compared is not what the conversion reads.
    mine, stored = head.tensors.source.fork(), head.tensors.stored
    both = {SINGLE_SAFETENSORS, SINGLE_TORCH}
    if not source.weights_file and both <= set(source.files) and (source.folder / SINGLE_TORCH).is_file():
        try:
            other = open_checkpoint(source.folder / SINGLE_TORCH)
            is_same = set(mine.names) == set(other.names)
            is_same = is_same and all(same_tensors(mine, name, other, name) for name in mine.names)
        except CheckpointError:
            is_same = True
        if not is_same:
            yield (
                f"{SINGLE_SAFETENSORS} was read, and {SINGLE_TORCH} beside it holds other weights (SafeAILab reads "
                "that one); --weights-file chooses"
            )
    is_tied = head.kind == "eagle3" and head.source_config.get("tie_word_embeddings") is True
    has_both = names.EMBEDDING in head.tensors and head.has_lm_head
    if is_tied and has_both and not same_tensors(mine, stored[names.LM_HEAD], mine, stored[names.EMBEDDING]):
        yield (
            "config.json ties the LM head to the embedding (tie_word_embeddings), but the file stores another LM head: "
            "the rows are those of the stored one"
        )
