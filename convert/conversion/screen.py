"""The screen of an artifact that is slimmed again: its rows for the ids that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..head.draft_head import DraftHead
from ..head.screen_file import DOWN, PROJECT, ROWS, head_digest, open_screen_file
from ..rows.lm_head import rows_of_ids
from ..rows.stream import read
from ..rows.writer import TensorPlan, whole

Screen = tuple[Sequence[TensorPlan], Mapping[str, str]]
"""Tensors and metadata of a file."""


def cut_screen(head: DraftHead, ids: NDArray[np.int64] | None, offline: bool) -> Screen | None:
    """The screen of fewer rows; None where it lacks some of them. The factors, and the recall that it tells, stay.

    The head is without the rows that its artifact keeps; `ids` int64 [draft_vocab] are the ascending target ids that
    stay, None for all. Screens of EAGLE-1/2 have every row. Raises as `open_screen_file`.
    """
    assert head.source is not None
    if head.kind == "eagle" or ids is None:
        ids = np.arange(head.target_vocab) if head.draft_ids_to_target is None else head.draft_ids_to_target
    if head.draft_ids_to_target is not None and not np.isin(ids, head.draft_ids_to_target).all():
        return None
    file = open_screen_file(head.source.folder, head, offline)
    picked = {ROWS: rows_of_ids(head, ids), DOWN: None, PROJECT: None}
    raw = {name: read(file, name, rows)[0] for name, rows in picked.items()}
    plans = [
        TensorPlan(name, file.tensors[name].dtype, (len(data), *file.tensors[name].shape[1:]), whole(data))
        for name, data in raw.items()
    ]
    cut = {"draft_vocab_size": str(len(ids)), "head_sha256": head_digest(head, ids)}
    return plans, {**file.header.metadata, **cut}
