"""LM-head rows that may join a draft vocabulary while it is in use: where a head has them, and how they are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from eagle_slim.convert.artifact.provenance import original_at_hand
from eagle_slim.convert.heads.open import DraftHead
from torch import Tensor

from ..errors import NothingToFollowError
from .weights import gather_lm_head_rows, gather_target_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..target.wrapper import TargetModel

# Half a unit in the last place of bfloat16, the coarsest type that rows are in.
_ROUNDING = 2**-8


@dataclass(frozen=True)
class JoinableRows:
    """Every LM-head row of a head that a draft vocabulary may take in, those that it holds already among them.

    Attributes:
        rows: [rows, hidden]; where they are the target's LM head in its own dtype and place, that tensor itself.
        row_of_id: int32 [target_vocab] on the same device: the row of each target id, -1 where there is none, since the
            head has no row for it.
        rank_order: target ids, best first, int64 [ranked], as far as the head's manifest ranks them; None without one.
    """

    rows: Tensor
    row_of_id: Tensor
    rank_order: NDArray[np.int64] | None


def load_joinable_rows(head: DraftHead, target: TargetModel, draft_ids: NDArray[np.int64]) -> JoinableRows:
    """Load the rows that may join a draft vocabulary, in the target's type and place.

    In order: the target's LM head where the head drafts with its rows; the head's own beyond the draft vocabulary;
    those of the head that the artifact was made from, where it is at hand.

    Args:
        head: as opened.
        target: the target that the head drafts for.
        draft_ids: int64 [draft_vocab], ids of the draft vocabulary.

    Raises:
        NothingToFollowError: there are no rows but those of `draft_ids`; the message says what to do.
        UnsupportedModelError: the rows are the target's, and quantised there.
    """
    manifest = head.manifest
    ranks = None if manifest is None else manifest.ranks
    rank_order = None if ranks is None else ranks.target_ids
    if not head.has_lm_head or _has_rows_of(head, target):
        every = np.arange(target.lm_head.shape[0], dtype=np.int64)
        rows = target.lm_head.detach()
        if rows.dtype != target.dtype or rows.device != target.device:
            rows = gather_target_rows(head, target, every)
        return JoinableRows(rows, _places(every, len(every), target.device), rank_order)
    if head.draft_vocab <= len(draft_ids):
        original = original_at_hand(head)
        if original is None:
            raise _no_rows(head, len(draft_ids))
        head = original
    ids = np.arange(head.target_vocab) if head.draft_ids_to_target is None else np.sort(head.draft_ids_to_target)
    rows = gather_lm_head_rows(head, target, ids)
    return JoinableRows(rows, _places(ids, head.target_vocab, target.device), rank_order)


def _has_rows_of(head: DraftHead, target: TargetModel) -> bool:
    """Whether an artifact's rows were taken from the LM head of this target: by its manifest, and by their values."""
    manifest = head.manifest
    taken = manifest is not None and manifest.lm_head is not None and manifest.lm_head["from"] == "target"
    if not taken or head.draft_ids_to_target is None or not target.lm_head.is_floating_point():
        return False
    own = head.tensors.get("lm_head.weight").float()
    ids = torch.from_numpy(head.draft_ids_to_target).to(target.lm_head.device)
    theirs = target.lm_head.detach()[ids].to("cpu", torch.float32)
    # A target may be loaded in another type than its files have.
    return torch.allclose(own, theirs, rtol=_ROUNDING, atol=_ROUNDING * float(own.abs().max()))


def _places(ids: NDArray[np.int64], target_vocab: int, device: torch.device) -> Tensor:
    row_of_id = torch.full((target_vocab,), -1, dtype=torch.int32)
    row_of_id[torch.from_numpy(ids)] = torch.arange(len(ids), dtype=torch.int32)
    return row_of_id.to(device)


def _no_rows(head: DraftHead, draft_vocab: int) -> NothingToFollowError:
    manifest = head.manifest
    trained = draft_vocab if manifest is None else (manifest.vocabulary or {}).get("trained_ids", head.target_vocab)
    advice = "Give a smaller draft_vocab, so that the others can join."
    if manifest is not None and trained > draft_vocab:
        advice = (
            f"Convert the original, {manifest.head.get('repo_id') or manifest.head['name']}, with a larger "
            "--draft-vocab, and give a smaller draft_vocab here."
        )
    return NothingToFollowError(
        f"{head.location} holds the {draft_vocab:,} rows that are drafted over and no others, so none can join while a "
        f"text is followed. {advice}"
    )
