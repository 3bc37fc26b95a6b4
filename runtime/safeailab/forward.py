"""The fused forward over an `EaModel`'s own base model: verification of a draft tree in upstream's KV cache.

Upstream's base models are transformers' with another cache, which holds for each layer what `KVCache` does. Prompts go
through upstream's own forward, trees through this one, which a CUDA graph holds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from eagle_slim.convert.heads.taps import default_taps
from torch import Tensor, nn

from ..errors import UsageError
from ..ops import Ops, current
from ..settings import TreeConfig
from ..target.cache import KVCache
from ..target.fused import Choice, FusedTarget, choose_forward
from ..target.kernels.attention_kernels import REACH
from ..target.kernels.tree_rows import ForwardRows, tree_rows
from ..target.known import unfit_calls
from ..tree import Trees
from .drafting import captured
from .reading import kind_of, rotary_of

_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
_BASES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def take_forward(asked: str, model: Any, ops: Ops) -> tuple[Choice, FusedTarget | None]:
    """Choose the forward that verifies trees, and build it where it is "fused". Raises as `choose_forward`."""
    base = model.base_model
    device = base.lm_head.weight.device
    choice = choose_forward(asked, "upstream", lambda: _unfit_reason(model), device)
    if choice.name != "fused":
        return choice, None
    with torch.inference_mode(False), torch.no_grad(), current(device):
        return choice, FusedTarget(base, _tap_layers(model), ops, _rotary(base))


class TreeForward:
    """A forward over the tree of one sequence, captured where there is a GPU.

    ``data``: upstream's cache, [2 * layers, 1, kv_heads, max_length, head_dim], keys and values in turn. ``lengths``:
    int32 [1], committed rows. `run` writes ``logits`` [nodes, vocab] and ``features`` [nodes, feature_width]. Raises
    `UsageError` for a tree that the attention kernel cannot take.
    """

    def __init__(self, target: FusedTarget, data: Tensor, tree: TreeConfig, trees: Trees, lengths: Tensor) -> None:
        nodes, deepest = tree.total_tokens, min(tree.path_width, tree.total_tokens) - 1
        if tree.top_k > 1 and deepest > REACH:
            problem = f"takes trees that branch to {REACH} levels; depth = {tree.depth} gives {deepest}"
            advice = "Lower ea_layer.depth, or patch the model with target_backend='upstream'."
            raise UsageError(f"The fused forward {problem}. {advice}")
        self.data = data
        self._target, self._trees = target, trees
        self._cache = KVCache.over(data[0::2], data[1::2])
        self._rows = ForwardRows.allocate(1, nodes, lengths, is_path=tree.top_k == 1)
        self._bufs = target.new_buffers(1, nodes, nodes, self._cache.capacity)
        self.logits, self.features = self._bufs.logits, self._bufs.features
        self._replay: Callable[[], None] | None = None
        target.reserve_positions(self._cache.capacity)

    def run(self) -> None:
        """Run the target over the tree, without waiting; writes the tree's rows after the committed ones."""
        if self._replay is None and self.data.is_cuda:
            self._replay = captured(self._forward)
        (self._replay or self._forward)()

    def _forward(self) -> None:
        self._target.ops(tree_rows)(self._trees, self._rows)
        self._target.forward(self._rows, self._cache, self._bufs)


def _tap_layers(model: Any) -> tuple[int, ...] | None:
    """List the layers whose inputs are EAGLE-3's features, ascending, as upstream's forwards collect them."""
    if kind_of(model.ea_layer) != "eagle3":
        return None
    return tuple(sorted(set(default_taps(len(model.base_model.model.layers)))))


def _unfit_reason(model: Any) -> str | None:
    base, taps = model.base_model, _tap_layers(model)
    name = type(base).__name__
    if name not in _BASES:
        return f"{name} is none of {', '.join(_BASES)}"
    if taps is not None and (len(taps) < 3 or taps[0] < 0):
        return f"{len(base.model.layers)} layers have no three different ones to tap"
    rotary = _rotary_module(base)
    if "ynamic" in f"{type(rotary).__name__} {getattr(rotary, 'rope_type', '')}":
        return "dynamic RoPE scaling changes its frequencies with the length"
    if getattr(base.config, "sliding_window", None) is not None:
        return "it attends within a sliding window"
    # Modules are those of the base model's own file, in every layer the same.
    base_file, eps = type(base).__module__, base.config.rms_norm_eps
    for path, module in base.named_modules():
        file, module_eps = type(module).__module__, getattr(module, "variance_epsilon", eps)
        if file != base_file and type(module) not in _PLAIN and not file.startswith("transformers."):
            return f"{path} is a {type(module).__qualname__} of {file}"
        if module_eps != eps:
            return f"{path}.variance_epsilon is {module_eps}, and its configuration gives {eps}"
    return unfit_calls(base)


def _rotary_module(base: Any) -> Any:
    """Return a rotary embedding: the decoder's (Qwen2, Qwen3), or the first layer's (upstream's Llama)."""
    return getattr(base.model, "rotary_emb", None) or base.model.layers[0].self_attn.rotary_emb


def _rotary(base: Any) -> Any:
    module = _rotary_module(base)
    if hasattr(module, "attention_scaling"):
        return module
    rotary = rotary_of(module, base.lm_head.weight.device)
    return SimpleNamespace(inv_freq=rotary.inverse_frequencies, attention_scaling=rotary.scaling)
