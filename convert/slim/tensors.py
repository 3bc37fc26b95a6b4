"""Plans of a slim head: from an open head and a set of target ids to tensors and configuration.

Nothing is written here, and nothing is read before the plans are carried out. With ids (1, 4, 5) of a vocabulary of 6,
rows 1, 4 and 5 of a full LM head become rows 0, 1 and 2, and d2t is (1, 3, 3).

EAGLE-1/2: the head unchanged but for small repairs, to be used with `freq_N.pt`. DFlash: with `lm_head.weight`, `d2t`
and `draft_vocab_size` vLLM takes the draft's own LM head (`qwen3_dflash.py`, `load_weights`;
`v1/worker/gpu/spec_decode/dflash/utils.py`). Everything else keeps its bytes, names and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.token_maps import d2t_from_ids, t2d_from_ids
from numpy.typing import NDArray

from .. import names
from ..artifact.manifest import Flavour
from ..engines import flavoured_architecture
from ..heads.config import QWEN3_ARCHITECTURE, flattened_text
from ..heads.draft_head import DraftHead
from ..rows.checkpoint import SourceRows
from ..rows.files import LONG_NAMES
from ..rows.writer import TensorPlan, array_plan, zeros_plan
from ..targets.lm_head import LmHead, all_ids, rows_of_ids

_ARCHITECTURE = "LlamaForCausalLMEagle3"
# Paths of the machine that trained the head, code that is not in the artifact.
_DROPPED_KEYS = ("_name_or_path", "auto_map")


def plan_tensors(head: DraftHead, lm_head: LmHead | None, target_ids: NDArray[np.int64] | None) -> list[TensorPlan]:
    """Plan the tensors for `target_ids` int64 [draft_vocab], ascending; None for all of them, without a map."""
    rows = {}
    for name in (each for each in head.tensors if each != names.LM_HEAD):
        stored, dtype = head.tensors.stored[name], head.tensors.info(name).dtype
        rows[name] = SourceRows(head.tensors.source, stored, dtype, head.location)
    if lm_head is not None:
        ids = all_ids(head) if target_ids is None else target_ids
        rows[names.LM_HEAD] = lm_head.gather(head, ids)
        for name in head.row_tensors:
            rows[name] = replace(rows[name], row_ids=rows_of_ids(head, ids), target_ids=ids)
    plans = [TensorPlan.of(name, found) for name, found in rows.items()]
    plans += [zeros_plan(name, head.dtype_name, head.hidden_size) for name in _zero_biases(head)]
    if lm_head is not None and target_ids is not None:
        plans += [array_plan("d2t", d2t_from_ids(target_ids))]
        plans += [array_plan("t2d", t2d_from_ids(target_ids, head.target_vocab))]
    return plans


def _zero_biases(head: DraftHead) -> list[str]:
    """List the biases [hidden] that engines leave uninitialised where the file has none.

    Of the output projection: one switch, `attention_bias`, is for q, k, v and o in vLLM, SGLang and TensorRT-LLM, and
    heads with Qwen2's attention lack it. vLLM's Qwen3 layer, of heads with norms of q and k, has none.
    """
    biases = [names.FC_BIAS] if head.kind == "eagle" else []
    if head.kind != "dflash" and not head.has_head_norms and head.config.get("attention_bias"):
        biases.append(names.ATTENTION_BIASES[head.kind][-1])
    return [name for name in biases if name not in head.tensors]


def config_of(head: DraftHead, draft_vocab: int, flavour: Flavour) -> dict[str, Any]:
    """Make config.json of an artifact of `draft_vocab` rows: the head's own values, with what every engine demands."""
    if head.kind == "eagle":
        return _repaired_config(head, flavour)
    if head.kind == "dflash":
        return _in_own_form(head, draft_vocab)
    architecture, model_type = flavoured_architecture("eagle3", flavour, _ARCHITECTURE), "llama"
    if head.has_head_norms:
        architecture, model_type = QWEN3_ARCHITECTURE, "qwen3"
    settled = {"architectures": [architecture], "model_type": model_type, "draft_vocab_size": draft_vocab}
    return head.config | settled | {"torch_dtype": LONG_NAMES[head.dtype_name]}


def _repaired_config(head: DraftHead, flavour: Flavour) -> dict[str, Any]:
    """Copy an EAGLE-1/2 head's without the keys that no engine may read, and with the class name of the flavour."""
    source = flattened_text(head.source_config)
    # vLLM and SGLang take `bias` to mean biases of the attention.
    config = {key: value for key, value in source.items() if key not in (*_DROPPED_KEYS, "bias")}
    config["num_hidden_layers"] = head.config["num_hidden_layers"]
    if "layer_types" not in head.config:
        config.pop("layer_types", None)
    # SGLang would make one matrix of a tied embedding and the gathered LM head, and stop.
    if config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False
    if head.config["attention_bias"]:
        # vLLM and SGLang read the first, SafeAILab the second.
        config |= {"attention_bias": True, "qkv_bias": True}
    if head.config["mlp_bias"]:
        config["mlp_bias"] = True
    architectures = config.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    written = flavoured_architecture("eagle", flavour, named or "LlamaForCausalLM")
    # vLLM would build Qwen2's configuration, whose layer types it cannot look up.
    more = {"model_type": "llama"} if flavour == "default" and written != named else {}
    return {**config, "architectures": [written], **more}


def _in_own_form(head: DraftHead, draft_vocab: int) -> dict[str, Any]:
    """Copy a DFlash draft's, flat or nested, with `draft_vocab_size`, which vLLM reads at top level in both."""
    # A quantisation that is left is one of nothing.
    dropped = (*_DROPPED_KEYS, "quantization_config")
    config = {key: value for key, value in head.source_config.items() if key not in dropped}
    nested = config.get("transformer_layer_config")
    if isinstance(nested, Mapping):
        config["transformer_layer_config"] = {key: nested[key] for key in nested if key not in dropped}
    return {**config, "draft_vocab_size": draft_vocab}
