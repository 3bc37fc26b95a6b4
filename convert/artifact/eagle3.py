"""EAGLE-3: from an open head and a set of target ids to the tensors and configuration of the slim head.

Nothing is written here, and nothing is read before the plans are carried out. With ids (1, 4, 5) of a vocabulary of 6,
rows 1, 4 and 5 of a full LM head become rows 0, 1 and 2, and d2t is (1, 3, 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from eagle_slim.vocab_tools.token_maps import d2t_from_ids, t2d_from_ids
from numpy.typing import NDArray

from ..engines import flavoured_architecture
from ..heads import config as head_config
from ..heads import names
from ..heads.draft_head import DraftHead
from ..rows.checkpoint import SourceRows
from ..rows.dtypes import LONG_NAMES
from ..rows.lm_head import LmHead, all_ids
from .writer import TensorPlan, array_plan, zeros_plan

_ARCHITECTURE = "LlamaForCausalLMEagle3"


def plan_tensors(head: DraftHead, lm_head: LmHead, target_ids: NDArray[np.int64] | None) -> list[TensorPlan]:
    """Plan the tensors for `target_ids` int64 [draft_vocab], ascending; None for all of them, without a map."""
    gathered = lm_head.gather(head, all_ids(head) if target_ids is None else target_ids)
    plans = [copy_plan(head, name) for name in head.tensors if name != names.LM_HEAD] + zero_output_bias(head)
    plans.append(TensorPlan.of(names.LM_HEAD, gathered))
    return plans + ([] if target_ids is None else plan_map(head, target_ids))


def plan_map(head: DraftHead, target_ids: NDArray[np.int64]) -> list[TensorPlan]:
    """Plan `d2t` int64 [draft_vocab], offsets, and `t2d` bool [target_vocab] of ascending ids int64 [draft_vocab]."""
    return [array_plan("d2t", d2t_from_ids(target_ids)), array_plan("t2d", t2d_from_ids(target_ids, head.target_vocab))]


def zero_output_bias(head: DraftHead) -> list[TensorPlan]:
    """Plan a bias of zeros where the output projection lacks one: one switch, `attention_bias`, is for q, k, v and o.

    vLLM, SGLang and TensorRT-LLM leave it uninitialised where the file has none, as in heads with Qwen2's attention.
    vLLM's Qwen3 layer, of heads with norms of q and k, has none.
    """
    name = names.ATTENTION_BIASES[head.kind][-1]
    if head.has_head_norms or not head.config.get("attention_bias") or name in head.tensors:
        return []
    return [zeros_plan(name, head.dtype_name, head.hidden_size)]


def slim_config(head: DraftHead, draft_vocab: int, flavour: str = "default") -> dict[str, Any]:
    """Make config.json of the slim head: the head's own values, with what every engine demands made explicit."""
    architecture, model_type = flavoured_architecture("eagle3", flavour, _ARCHITECTURE), "llama"
    if head.has_head_norms:
        architecture, model_type = head_config.QWEN3_ARCHITECTURE, "qwen3"
    settled = {"architectures": [architecture], "model_type": model_type, "draft_vocab_size": draft_vocab}
    return head.config | settled | {"torch_dtype": LONG_NAMES[head.dtype_name]}


def copy_plan(head: DraftHead, name: str) -> TensorPlan:
    """Plan a tensor of the head as it is."""
    rows = SourceRows(head.tensors.source, head.tensors.stored[name], head.tensors.info(name).dtype, head.location)
    return TensorPlan.of(name, rows)
