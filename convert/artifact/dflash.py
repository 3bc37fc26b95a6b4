"""DFlash: the draft as it is, with LM-head rows of its own and the map that says which tokens they are.

z-lab's and speculators' drafts borrow the target's LM head, or have one over a reduced vocabulary. With
`lm_head.weight`, `d2t` (offsets, as in EAGLE-3) and `draft_vocab_size` vLLM takes the draft's own (`qwen3_dflash.py`,
`load_weights`; `v1/worker/gpu/spec_decode/dflash/utils.py`). Everything else keeps its bytes, names and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..heads import names
from ..heads.draft_head import DraftHead
from ..rows.checkpoint import SourceRows
from ..rows.lm_head import LmHead, rows_of_ids
from .eagle3 import copy_plan, plan_map
from .writer import TensorPlan

# Paths of the machine that trained the draft, code that is not in the artifact, a quantisation of nothing.
_DROPPED_KEYS = ("_name_or_path", "auto_map", "quantization_config")


def plan_tensors(head: DraftHead, lm_head: LmHead, target_ids: NDArray[np.int64]) -> list[TensorPlan]:
    """Plan the tensors of the slim draft for `target_ids` int64 [draft_vocab], ascending."""
    rows = {names.LM_HEAD: lm_head.gather(head, target_ids)}
    for name in head.row_tensors:
        own, dtype = rows_of_ids(head, target_ids), head.tensors.info(name).dtype
        source, stored = head.tensors.source, head.tensors.stored[name]
        rows[name] = SourceRows(source, stored, dtype, head.location, own, target_ids)
    plans = [copy_plan(head, name) for name in head.tensors if name not in rows]
    return plans + [TensorPlan.of(name, found) for name, found in rows.items()] + plan_map(head, target_ids)


def slim_config(head: DraftHead, draft_vocab: int) -> dict[str, Any]:
    """Copy config.json in its own form, with `draft_vocab_size`, which vLLM reads at top level in both."""
    config = {key: value for key, value in head.source_config.items() if key not in _DROPPED_KEYS}
    nested = config.get("transformer_layer_config")
    if isinstance(nested, Mapping):
        config["transformer_layer_config"] = {key: nested[key] for key in nested if key not in _DROPPED_KEYS}
    return {**config, "draft_vocab_size": draft_vocab}
