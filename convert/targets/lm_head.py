"""An LM head, and where its rows go: the row of each target id, gathered in the dtype of the head.

With ids (1, 4, 5) of a vocabulary of 6, a full LM head gives its rows 1, 4 and 5; a head that already has the map
(0, 1, 4, 5) gives its rows 1, 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from eagle_slim.vocab_tools.vocabulary import MAX_PADDING
from numpy.typing import NDArray

from .. import names
from ..errors import MismatchError
from ..heads.draft_head import DraftHead
from ..rows.checkpoint import Checkpoint, SourceRows
from ..rows.files import LONG_NAMES, TensorInfo


@dataclass(frozen=True)
class LmHead:
    """The matrix [rows, hidden] that rows are gathered from, by its stored name: the head's own, or the target's."""

    checkpoint: Checkpoint
    name: str
    where: str
    origin: Literal["head", "target"]

    @property
    def info(self) -> TensorInfo:
        """Dtype and shape as stored; a target's vocabulary may be padded beyond the tokenizer's."""
        return self.checkpoint.info(self.name)

    def dtype_written(self, head: DraftHead) -> str:
        """Return the dtype of the rows in the slim head: the target's are rounded to the head's."""
        return head.dtype_name if self.origin == "target" else self.info.dtype

    def describe(self, head: DraftHead) -> dict[str, Any]:
        """Describe for a manifest where the rows of a slim head come from, and whether they are rounded on the way."""
        stored, written = self.info.dtype, self.dtype_written(head)
        dtypes = {"source_dtype": LONG_NAMES[stored], "dtype": LONG_NAMES[written], "rounded": stored != written}
        return {"from": self.origin, "tensor": self.name, "rows": self.info.num_rows, **dtypes}

    def gather(self, head: DraftHead, target_ids: NDArray[np.int64]) -> SourceRows:
        """Choose the rows of `target_ids`, not read yet; MismatchError as `rows_of_ids`, or for an id beyond them."""
        rows = rows_of_ids(head, target_ids) if self.origin == "head" else target_ids
        if len(rows) and (last := int(rows.max())) >= self.info.num_rows:
            problem = f"{self.name} has {self.info.num_rows} rows, none for id {last} of the head's {head.target_vocab}"
            is_full = len(target_ids) == head.target_vocab
            advice = "Give a number of rows with --draft-vocab." if is_full else "Fetch the target's weights again."
            raise MismatchError.at(self.where, f"{problem}.\n{advice}")
        return SourceRows(self.checkpoint, self.name, self.dtype_written(head), self.where, rows, target_ids)


def own_lm_head(head: DraftHead) -> LmHead:
    """Return the LM head of a head that has one."""
    return LmHead(head.tensors.source, head.tensors.stored[names.LM_HEAD], head.location, "head")


def fitting(lm_head: LmHead, head: DraftHead, target: str) -> LmHead:
    """Return a target's LM head under the target's name; MismatchError where its shape does not fit the head."""
    where = f"target {target}"
    rows, columns = lm_head.info.shape
    if abs(rows - head.target_vocab) > MAX_PADDING or columns != head.hidden_size:
        needed = f"the head {head.location} needs [{head.target_vocab}, {head.hidden_size}]"
        advice = "This is not the target that the head was trained for: give that one with --target."
        raise MismatchError.at(where, f"{lm_head.name} is [{rows}, {columns}], {needed}.\n{advice}")
    return replace(lm_head, where=where)


def rows_of_ids(head: DraftHead, target_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the LM-head row of each target id, int64 [ids]; MismatchError for one that was never trained on."""
    if head.draft_ids_to_target is None:
        return target_ids
    order = np.argsort(head.draft_ids_to_target, kind="stable").astype(np.int64)
    trained = head.draft_ids_to_target[order]
    place = np.minimum(np.searchsorted(trained, target_ids), len(trained) - 1)
    missing = target_ids[trained[place] != target_ids]
    if len(missing):
        problem = f"{len(missing)} of the {len(target_ids)} wanted ids have no row, the first is {missing[0]}"
        advice = f"The head was trained on {len(trained)} ids, and a draft vocabulary must be among them."
        raise MismatchError.at(head.location, f"{problem}.\n{advice}")
    return order[place]


def all_ids(head: DraftHead) -> NDArray[np.int64]:
    """Return every target id, int64 [target_vocab]; MismatchError where the head was trained on fewer."""
    if head.draft_vocab < head.target_vocab:
        problem = f"was trained on {head.draft_vocab} of {head.target_vocab} ids, so there is no full vocabulary"
        raise MismatchError.at(head.location, f"{problem}.\nUse --draft-vocab {head.draft_vocab} to normalise it.")
    return np.arange(head.target_vocab, dtype=np.int64)
