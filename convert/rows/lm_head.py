"""An LM head, and where its rows go: the row of each target id, gathered in the dtype of the head.

With ids (1, 4, 5) of a vocabulary of 6, a full LM head gives its rows 1, 4 and 5; a head that already has the map
(0, 1, 4, 5) gives its rows 1, 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import MismatchError
from ..heads import names
from ..heads.draft_head import MOST_PADDING, DraftHead
from .checkpoint import Checkpoint
from .writer import SourceRows


@dataclass(frozen=True)
class LmHead:
    """The matrix that a slim head's rows come from: the head's own, or a target's, opened without its other weights.

    Attributes:
        checkpoint: holds at least this tensor; records what was read.
        name: of the tensor, [rows, hidden], as it is stored.
        where: in words, for messages.
        origin: whose it is.
        file: name of the target's weights file that holds it.
    """

    checkpoint: Checkpoint
    name: str
    where: str
    origin: Literal["head", "target"]
    file: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, hidden)`; a target's vocabulary may be padded beyond the tokenizer's."""
        return self.checkpoint.shape(self.name)

    @property
    def dtype_name(self) -> str:
        """Dtype of the rows as they are stored, in safetensors' spelling."""
        return self.checkpoint.info(self.name).dtype

    def dtype_written(self, head: DraftHead) -> str:
        """Dtype of the rows in the slim head: the head's own keep theirs, the target's become the head's."""
        return head.dtype_name if self.origin == "target" else self.dtype_name

    def gather(self, head: DraftHead, target_ids: NDArray[np.int64]) -> SourceRows:
        """The rows of `target_ids`, in that order, in the head's dtype.

        Raises:
            MismatchError: as `rows_of_ids`, or an id beyond the rows of a target whose vocabulary is padded less.
        """
        rows = rows_of_ids(head, target_ids) if self.origin == "head" else target_ids
        if len(rows) and int(rows.max()) >= self.shape[0]:
            raise MismatchError(
                f"{self.where}: {self.name} has {self.shape[0]} rows, none for id {int(rows.max())} of the head's "
                f"{head.target_vocab}.\nGive a number of rows with --draft-vocab."
            )
        return SourceRows(self.checkpoint, self.name, self.dtype_written(head), self.where, rows, target_ids)


def own_lm_head(head: DraftHead) -> LmHead:
    """The LM head of a head that has one."""
    return LmHead(head.tensors.source, head.tensors.stored[names.LM_HEAD], head.location, "head")


def fitting(lm_head: LmHead, head: DraftHead, target: str) -> LmHead:
    """A target's LM head, named in messages by that target, if it fits the head whose rows it lends.

    Raises:
        MismatchError: its shape is not [vocab_size, hidden_size] of the head.
    """
    where = f"target {target}"
    rows, columns = lm_head.shape
    if abs(rows - head.target_vocab) > MOST_PADDING or columns != head.hidden_size:
        raise MismatchError(
            f"{where}: {lm_head.name} is [{rows}, {columns}], the head {head.location} needs "
            f"[{head.target_vocab}, {head.hidden_size}].\n"
            "This is not the target that the head was trained for: give that one with --target."
        )
    return replace(lm_head, where=where)


def rows_of_ids(head: DraftHead, target_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The LM-head row of each target id, int64 [ids]; for a head with a map, the map's inverse.

    Raises:
        MismatchError: an id that the head was never trained on.
    """
    if head.draft_ids_to_target is None:
        return target_ids
    order = np.argsort(head.draft_ids_to_target, kind="stable").astype(np.int64)
    trained = head.draft_ids_to_target[order]
    place = np.minimum(np.searchsorted(trained, target_ids), len(trained) - 1)
    missing = target_ids[trained[place] != target_ids]
    if len(missing):
        raise MismatchError.at(
            head.location,
            f"{len(missing)} of the {len(target_ids)} wanted ids have no row, the first is {missing[0]}.\n"
            f"The head was trained on {len(trained)} ids, and a draft vocabulary must be among them.",
        )
    return order[place]


def all_ids(head: DraftHead) -> NDArray[np.int64]:
    """Every target id, int64 [target_vocab], as a full vocabulary holds them.

    Raises:
        MismatchError: the head was trained on fewer.
    """
    if head.draft_vocab < head.target_vocab:
        raise MismatchError.at(
            head.location,
            f"was trained on {head.draft_vocab} of {head.target_vocab} ids, so there is no full "
            f"vocabulary to write.\nUse --draft-vocab {head.draft_vocab} to normalise it as it is.",
        )
    return np.arange(head.target_vocab, dtype=np.int64)
