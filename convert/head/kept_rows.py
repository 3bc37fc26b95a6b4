"""Rows of an artifact beyond its draft vocabulary: the file that holds them, and a head with them joined to its own.

The file is a safetensors file with `lm_head.weight` [kept, hidden], of the LM head's dtype, and `target_ids` int64
[kept], rows in rank order. Its name ends so that no engine reads it: vLLM, SGLang (`_prepare_weights`), TensorRT-LLM
(`HfWeightLoader`), LMDeploy and transformers look for `*.safetensors`, `*.bin`, `*.pt`, `*.pth` and `*.gguf`. Nor do
vLLM and SGLang fetch it, whose patterns on the Hub match in sub-folders too (`download_weights_from_hf`), so that a
sub-folder would not do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import ArtifactError
from ..hub.snapshot import fetch
from ..manifest import KeptRows
from ..rows.joined_rows import JoinedRows
from ..rows.paths import path_inside
from ..rows.safetensors_file import SafetensorsFile
from ..rows.stream import read
from ..sources.source import ResolvedSource
from . import names
from .draft_head import DraftHead
from .tensors import LazyTensors

KEPT_ROWS_NAME = "kept_rows.eagle_slim"
KEPT_IDS = "target_ids"
KEPT_TENSORS = (names.LM_HEAD, KEPT_IDS)


def with_kept_rows(head: DraftHead, offline: bool = False) -> DraftHead:
    """The head over all rows that its artifact holds: its own, then the kept ones in rank order.

    A head without kept rows is returned as it is. Of an artifact on the Hub the file is fetched now, unless `offline`.
    """
    kept = None if head.manifest is None else head.manifest.kept_rows
    if kept is None:
        return head
    assert head.source is not None
    assert head.draft_ids_to_target is not None
    file = open_kept_rows(head.source, kept, offline)
    checkpoint, stored = head.tensors.source, head.tensors.stored[names.LM_HEAD]
    joined = JoinedRows(stored, (checkpoint.file_of(stored), stored), (file, names.LM_HEAD))
    ids = np.concatenate([head.draft_ids_to_target, kept.rank_order_ids])
    return replace(
        head,
        tensors=LazyTensors(checkpoint.replaced(stored, joined), head.tensors.stored),
        draft_ids_to_target=ids,
        config={**head.config, "draft_vocab_size": len(ids)},
    )


def open_kept_rows(source: ResolvedSource, kept: KeptRows, offline: bool = False) -> SafetensorsFile:
    """Open the file of an artifact and hold its header and its ids against the manifest. Raises as `with_kept_rows`."""
    if source.repo_id is not None:
        fetch(source.snapshot, [f"{source.subfolder}/{KEPT_ROWS_NAME}".lstrip("/")], offline)
    folder = source.folder
    if not (folder / KEPT_ROWS_NAME).is_file():
        raise ArtifactError.at(
            folder,
            f"{KEPT_ROWS_NAME} is missing, which holds {len(kept)} rows by the manifest.\n"
            "Fetch the artifact again, or convert the head again with --keep-rows.",
            file=KEPT_ROWS_NAME,
        )
    file = SafetensorsFile(path_inside(folder, KEPT_ROWS_NAME))
    problem = layout_problem(file, kept)
    if problem is not None:
        raise ArtifactError(
            f"{folder / KEPT_ROWS_NAME}: {problem}.\nFetch the artifact again, or convert the head again."
        )
    return file


def layout_problem(file: SafetensorsFile, kept: KeptRows) -> str | None:
    """What tensors and ids of the file have that the manifest does not describe, in words; None if nothing."""
    if sorted(file.tensors) != sorted(KEPT_TENSORS):
        return f"expected the tensors {', '.join(KEPT_TENSORS)}, found {', '.join(sorted(file.tensors)) or 'none'}"
    rows, ids = (file.tensors[name] for name in KEPT_TENSORS)
    if len(rows.shape) != 2 or rows.shape[0] != len(kept):
        return f"{names.LM_HEAD} is {list(rows.shape)}, the manifest ranks {len(kept)} kept ids"
    if (ids.dtype, ids.shape) != ("I64", (len(kept),)):
        return f"{KEPT_IDS}: expected I64 [{len(kept)}], found {ids.dtype} {list(ids.shape)}"
    if not np.array_equal(ids_in(file), kept.rank_order_ids):
        return f"{KEPT_IDS} and the manifest name different ids, or in another order"
    return None


def ids_in(file: SafetensorsFile) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The target ids of the rows, int64 [kept]."""
    raw, _ = read(file, KEPT_IDS)
    return raw.reshape(-1).view(np.int64)
