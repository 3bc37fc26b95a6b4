"""Reading an `EaModel`: its kind of head, the head's tensors as `HeadWeights`, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafter.rope import RotaryEmbedding
from ..drafter.weights import HeadWeights
from ..errors import PairingError, UnsupportedModelError, UsageError
from ..settings import TreeConfig

KNOWN_TO_WORK = "Known to work: SafeAILab/EAGLE of commit cb7e084 with transformers 4.53."
_LAYER = ("topK_genrate", "reset_kv", "embed_tokens", "fc", "depth", "top_k", "total_tokens")


def is_ea_model(model: object) -> bool:
    """Tell if an object looks like SafeAILab's `EaModel`."""
    layer = getattr(model, "ea_layer", None)
    return hasattr(model, "base_model") and hasattr(layer, "topK_genrate")


def check_ea_model(model: Any) -> None:
    """Raise `UsageError` for what is no `EaModel`, `UnsupportedModelError` for one that cannot be drafted for."""
    if not is_ea_model(model):
        expected = "a loaded EaModel of SafeAILab's EAGLE (with base_model and ea_layer.topK_genrate)"
        advice = "For a transformers model, use SpeculativeModel.from_pretrained."
        raise UsageError(f"Expected {expected}; got {type(model).__name__}. {advice}")
    layer = model.ea_layer
    missing = [name for name in _LAYER if not hasattr(layer, name)]
    if missing:
        problem = f"has no {missing[0]}, which both of upstream's heads (cnets.Model, cnets1.Model) have"
        raise UnsupportedModelError(f"{type(layer).__name__} {problem}. {KNOWN_TO_WORK}")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        reason = "The persistent drafter and the step's kernels run on one device"
        advice = 'load it with device_map="cuda:0", or leave it as it is'
        raise UnsupportedModelError(f"This EaModel lies on {', '.join(devices)}. {reason}: {advice}.")


def kind_of(layer: Any) -> str:
    """Return "eagle3" (cnets.Model) or "eagle" (cnets1.Model). Raises `UnsupportedModelError` for neither."""
    if hasattr(layer, "midlayer") and hasattr(layer, "lm_head") and hasattr(layer, "norm"):
        return "eagle3"
    if len(getattr(layer, "layers", ())) != 1:
        kinds = "midlayer, norm and lm_head (EAGLE-3, cnets.Model) or layers, one of them (EAGLE-1/2, cnets1.Model)"
        raise UnsupportedModelError(f"{type(layer).__name__} is of neither kind: expected {kinds}.")
    return "eagle"


def tree_of(layer: Any) -> TreeConfig:
    """Read the tree's size; upstream's ``total_tokens`` leaves the root out."""
    return TreeConfig(int(layer.depth), int(layer.top_k), int(layer.total_tokens) + 1)


def trained_ids(model: Any) -> NDArray[np.int64]:
    """Return the target id of every row of the LM head: int64 [rows]. Raises `PairingError` for a wrong ``d2t``."""
    layer = model.ea_layer
    rows = _lm_head(model).shape[0]
    vocab = layer.embed_tokens.weight.shape[0]
    ids = np.arange(rows)
    if kind_of(layer) == "eagle3" and layer.config.vocab_size != layer.config.draft_vocab_size:
        ids = ids + layer.d2t.cpu().numpy()
    if len(np.unique(ids)) != rows or ids.min() < 0 or ids.max() >= vocab:
        raise PairingError(
            f"The head's d2t must hold offsets that give each of its {rows} rows another id below {vocab}; got "
            f"{len(np.unique(ids))} different ids from {ids.min()} to {ids.max()}. Was the checkpoint read whole?"
        )
    return ids.astype(np.int64)


def read_head(model: Any, draft_ids: NDArray[np.int64] | None = None) -> HeadWeights:
    """Gather a head's tensors for the drafter, sharing memory with the model except for a slimmed LM head.

    ``draft_ids``: int64 [draft_vocab] ascending target ids among `trained_ids`; None takes all. Raises
    `UnsupportedModelError` for RoPE that changes with length, and as `HeadWeights` for tensors that do not fit.
    """
    layer, kind = model.ea_layer, kind_of(model.ea_layer)
    block, outside = (layer.midlayer, ("fc", "norm")) if kind == "eagle3" else (layer.layers[0], ("fc",))
    tensors = dict(block.named_parameters())
    for module in outside:
        tensors |= {f"{module}.{name}": each for name, each in getattr(layer, module).named_parameters()}
    attention = block.self_attn
    available = trained_ids(model)
    order = np.argsort(available, kind="stable")
    rows = order if draft_ids is None else order[np.searchsorted(available[order], draft_ids)]
    lm_head, embedding = _lm_head(model), layer.embed_tokens.weight.detach()
    if not np.array_equal(rows, np.arange(len(lm_head))):
        lm_head = lm_head[torch.from_numpy(rows).to(lm_head.device)]
    return HeadWeights(
        kind=kind,
        tensors={name: each.detach() for name, each in tensors.items()},
        embedding=embedding,
        lm_head=lm_head.to(embedding.device, embedding.dtype),
        draft_to_target=torch.from_numpy(available[rows]).to(embedding.device),
        rotary=rotary_of(attention.rotary_emb, embedding.device),
        hidden=embedding.shape[1],
        num_heads=int(attention.num_heads),
        num_kv_heads=int(attention.num_key_value_heads),
        head_dim=int(attention.head_dim),
        norm_eps=float(block.post_attention_layernorm.variance_epsilon),
        activation=str(attention.config.hidden_act),
        feature_width=layer.fc.weight.shape[1] if kind == "eagle3" else embedding.shape[1],
    )


def _lm_head(model: Any) -> Tensor:
    """Return rows of the LM head that the head drafts with: in EAGLE-1/2 the target's."""
    owner = model.ea_layer if kind_of(model.ea_layer) == "eagle3" else model.base_model
    rows: Tensor = owner.lm_head.weight.detach()
    return rows


def rotary_of(module: Any, device: torch.device) -> RotaryEmbedding:
    """Recompute the frequencies in fp32: the module's own buffers were rounded to the model's type with its weights."""
    if "Dynamic" in type(module).__name__:
        problem = "recomputes frequencies as the text grows, so keys already cached would be wrong"
        advice = "Use a head without it, or with linear scaling."
        raise UnsupportedModelError(f"The head uses dynamic RoPE scaling, which {problem}. {advice}")
    exponents = torch.arange(0, module.dim, 2, dtype=torch.int64).float() / module.dim
    frequencies = 1.0 / (module.base**exponents) / getattr(module, "scaling_factor", 1.0)
    return RotaryEmbedding(frequencies.to(device), 1.0)
