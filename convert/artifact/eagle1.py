"""EAGLE-1 and EAGLE-2: the head unchanged but for small repairs, to be used with `freq_N.pt`.

The repairs: a zero `fc.bias` where there is none, since SGLang would leave it uninitialised; no `bias` in config.json,
which vLLM and SGLang take to mean attention biases; of biases in the layer, the flags by which each engine loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engines import flavoured_architecture
from ..heads import config as head_config
from ..heads import names
from ..heads.draft_head import DraftHead
from .eagle3 import copy_plan, zero_output_bias
from .writer import TensorPlan, zeros_plan

# Paths of the machine that trained the head, or code that is not in the artifact.
_DROPPED_KEYS = ("bias", "_name_or_path", "auto_map")


def plan_tensors(head: DraftHead) -> Sequence[TensorPlan]:
    """Plan the tensors of an EAGLE-1/2 head as they are, with a zero `fc.bias` [hidden] where it has none.

    With biases of q, k and v alone, which SafeAILab trains, the output projection gets one of zeros too.
    """
    plans = [copy_plan(head, name) for name in head.tensors] + zero_output_bias(head)
    if names.FC_BIAS not in head.tensors:
        plans.append(zeros_plan(names.FC_BIAS, head.dtype_name, head.hidden_size))
    return plans


def repaired_config(head: DraftHead, flavour: str = "default") -> dict[str, Any]:
    """Copy config.json without the keys that no engine may read, and with the class name of the flavour."""
    source = head_config.flattened_text(head.source_config)
    config = {key: value for key, value in source.items() if key not in _DROPPED_KEYS}
    config["num_hidden_layers"] = head.config["num_hidden_layers"]
    # SGLang would make one matrix of a tied embedding and the gathered LM head, and stop.
    config |= {"tie_word_embeddings": False} if config.get("tie_word_embeddings") else {}
    if head.config["attention_bias"]:
        # vLLM and SGLang read the first, SafeAILab the second.
        config |= {"attention_bias": True, "qkv_bias": True}
    if head.config["mlp_bias"]:
        config["mlp_bias"] = True
    found = config.get("architectures")
    architecture = str(found[0]) if isinstance(found, list) and found else "LlamaForCausalLM"
    written = flavoured_architecture("eagle", flavour, architecture)
    return config if written == architecture else {**config, "architectures": [written]}
