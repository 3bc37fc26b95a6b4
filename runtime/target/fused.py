"""A fused target: our own forward over the weights of a loaded Llama, Mistral, Qwen2 or Qwen3, made for CUDA graphs.

The weights stay the model's: q, k, v and gate, up are packed side by side and the modules' parameters become views of
the packed storage, so that nothing is held twice and the model's own ``generate`` works as before. A layer is four
matrix products (cuBLAS) and six kernels (`kernels.fused_layers`, `kernels.tree_attention`); nothing in it waits for the
host, and lengths, slots and positions are read on the device.

`unfit_reason` says why a model cannot be fused: any class but those below, quantised or adapted linears, hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import Ops
from .cache import ForwardBuffers, KVCache, LayerShape
from .kernels.fused_layers import add_norm, rotate_append, swiglu
from .kernels.tree_attention import tree_attention
from .kernels.tree_rows import ForwardRows
from .lock import is_guard

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer; matrices are transposed views [in, out] for ``torch.mm``."""

    norm_in: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    o_bias: Tensor | None
    norm_post: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


class FusedTarget:
    """The fused forward of a loaded model; see the module. Raises nothing: ask `unfit_reason` first.

    ``tap_layers`` as in `TargetModel`: the features are the hidden states entering these layers, or None for the last
    hidden state after the final norm. ``ops`` default to kernels on a GPU and to twins elsewhere.
    """

    def __init__(self, model: nn.Module, tap_layers: Sequence[int] | None, ops: Ops | None = None) -> None:
        config: Any = model.config
        decoder: Any = model.model
        self.model = model
        self.tap_layers = None if tap_layers is None else tuple(tap_layers)
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.lm_head: Tensor = model.lm_head.weight  # type: ignore[union-attr, assignment]
        self.final_norm: Tensor = decoder.norm.weight
        self.eps = float(config.rms_norm_eps)
        self.hidden_size = int(config.hidden_size)
        self.intermediate_size = int(config.intermediate_size)
        self.vocab_size = self.lm_head.shape[0]
        first = decoder.layers[0].self_attn
        self.head_dim = int(first.head_dim)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.scale = float(first.scaling)
        self.layers = [_fuse_layer(layer) for layer in decoder.layers]
        self.ops = ops or Ops.for_device(self.device)
        self._rotary = decoder.rotary_emb
        self.cos, self.sin = self._tables(1)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.embedding.dtype

    @property
    def qkv_size(self) -> int:
        """Outputs of the packed q, k, v product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def feature_width(self) -> int:
        """Width of the features handed to the drafter."""
        return self.hidden_size * (1 if self.tap_layers is None else len(self.tap_layers))

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """Of each decoder layer."""
        return [LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)] * len(self.layers)

    def new_buffers(self, places: int, nodes: int, logit_rows: int) -> ForwardBuffers:
        """Allocate what a forward of ``places`` times ``nodes`` rows writes, logits for ``logit_rows`` of them."""
        rows = places * nodes
        wide = {"qkv": self.qkv_size, "gate_up": 2 * self.intermediate_size, "gated": self.intermediate_size}
        return ForwardBuffers(
            self, places, nodes, logit_rows,
            residual=(rows, self.hidden_size), normed=(rows, self.hidden_size), delta=(rows, self.hidden_size),
            attended=(rows, self.num_heads * self.head_dim), last=(logit_rows, self.hidden_size),
            **{name: (rows, width) for name, width in wide.items()},
        )  # fmt: skip

    def reserve_positions(self, num_positions: int) -> None:
        """Have rotary tables for positions below ``num_positions``; graphs captured before hold the old tables."""
        if self.cos.shape[0] < num_positions:
            self.cos, self.sin = self._tables(num_positions)

    def _tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cos and sin fp32 [positions, head_dim / 2], by the model's own rotary embedding."""
        like = torch.empty((1, 1), dtype=torch.float32, device=self.device)
        positions = torch.arange(num_positions, device=self.device)[None]
        with torch.inference_mode():
            cos, sin = self._rotary(like, positions)
        half = self.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """Run all rows; writes the cache, ``bufs.features`` [rows, feature_width] and ``bufs.logits``.

        ``last_row`` int64 [n]: only these rows get logits [n, vocab]; None: all of them.
        """
        ops, delta = self.ops, None
        torch.index_select(self.embedding, 0, rows.tokens, out=bufs.residual)
        for index, layer in enumerate(self.layers):
            ops(add_norm)(bufs.residual, delta, layer.norm_in, self.eps, bufs.normed, self._tap(bufs, index))
            torch.mm(bufs.normed, layer.qkv, out=bufs.qkv)
            ops(rotate_append)(
                bufs.qkv, layer.qkv_bias, layer.head_norms, self.eps, self.cos, self.sin, rows.positions,
                rows.attention.slots, rows.kv_rows, *cache.layers[index],
            )  # fmt: skip
            ops(tree_attention)(
                bufs.qkv, *cache.layers[index], rows.attention, self.scale, layer.window,
                bufs.attended, bufs.scratch,
            )  # fmt: skip
            delta = _linear(bufs.attended, layer.o, layer.o_bias, bufs.delta)
            ops(add_norm)(bufs.residual, delta, layer.norm_post, self.eps, bufs.normed)
            _linear(bufs.normed, layer.gate_up, layer.gate_up_bias, bufs.gate_up)
            ops(swiglu)(bufs.gate_up, bufs.gated)
            delta = _linear(bufs.gated, layer.down, layer.down_bias, bufs.delta)
        normed = bufs.features if self.tap_layers is None else bufs.normed
        ops(add_norm)(bufs.residual, delta, self.final_norm, self.eps, normed, self._tap(bufs, len(self.layers)))
        for place, tap in enumerate(self.tap_layers or ()):
            # A layer may be tapped twice: default taps of a small model.
            first = self._tap(bufs, tap)
            block = bufs.features[:, place * self.hidden_size : (place + 1) * self.hidden_size]
            if first is not None and first.data_ptr() != block.data_ptr():
                block.copy_(first)
        if last_row is not None:
            normed = torch.index_select(normed, 0, last_row, out=bufs.last)
        torch.mm(normed, self.lm_head.t(), out=bufs.logits)

    def _tap(self, bufs: ForwardBuffers, layer: int) -> Tensor | None:
        """The column block of the features that holds what enters ``layer``."""
        if self.tap_layers is None or layer not in self.tap_layers:
            return None
        place = self.tap_layers.index(layer)
        return bufs.features[:, place * self.hidden_size : (place + 1) * self.hidden_size]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def unfit_reason(model: nn.Module, tap_layers: Sequence[int] | None) -> str | None:
    """Why this model is not fused, as the end of a sentence; None if it can be.

    Module classes are compared exactly: an adapter, a quantised linear or a subclass may compute something else.
    """
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm

    norms = {
        LlamaForCausalLM: LlamaRMSNorm,
        MistralForCausalLM: MistralRMSNorm,
        Qwen2ForCausalLM: Qwen2RMSNorm,
        Qwen3ForCausalLM: Qwen3RMSNorm,
    }
    name = type(model).__name__
    norm = norms.get(type(model))
    if norm is None:
        return f"{name} is none of {', '.join(kind.__name__ for kind in norms)}"
    config: Any = model.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    dtypes, devices = ({getattr(p, what) for p in model.parameters()} for what in ("dtype", "device"))
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}, not one of float32, bfloat16, float16"
    if len(devices) > 1 or getattr(model, "hf_device_map", None):
        return "its weights are spread over devices"
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in str(rope):
        return "longrope changes its frequencies with the length"
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_guard, hooks)):
            return f"{path or name} has a forward hook"
        if "forward" in vars(module):
            return f"{path or name} has a forward of its own"
        leaf = next(module.children(), None) is None
        known = (nn.Linear, nn.Embedding, norm, nn.SiLU)
        if leaf and next(module.parameters(recurse=False), None) is not None and type(module) not in known:
            return f"{path} is a {type(module).__name__}"
    first: Any = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    if first.head_dim % 2 or first.head_dim > 256:
        return f"its head_dim is {first.head_dim}"
    return None


def _fuse_layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    return FusedLayer(
        norm_in=layer.input_layernorm.weight,
        qkv=_pack([q, k, v], "weight").t(),
        qkv_bias=_pack([q, k, v], "bias") if q.bias is not None else None,
        head_norms=head_norms,
        o=attention.o_proj.weight.t(),
        o_bias=attention.o_proj.bias,
        norm_post=layer.post_attention_layernorm.weight,
        gate_up=_pack([mlp.gate_proj, mlp.up_proj], "weight").t(),
        gate_up_bias=_pack([mlp.gate_proj, mlp.up_proj], "bias") if mlp.gate_proj.bias is not None else None,
        down=mlp.down_proj.weight.t(),
        down_bias=mlp.down_proj.bias,
        window=_window_of(attention),
    )


def _window_of(attention: Any) -> int | None:
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        # Mistral's layers ask the configuration; Llama's know no window.
        window = getattr(attention.config, "sliding_window", None)
    return None if window is None else int(window)


def _pack(modules: Sequence[nn.Module], name: str) -> Tensor:
    """Join parameters along their first axis in one storage of which they become views; done already, it is found."""
    parts = [getattr(module, name).data for module in modules]
    first = parts[0]
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    joined = all(part.is_contiguous() for part in parts) and all(
        part.data_ptr() == end and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for part, end in zip(parts[1:], ends[:-1], strict=True)
    )
    if joined:
        rows = sum(part.shape[0] for part in parts)
        whole: Tensor = first.as_strided((rows, *first.shape[1:]), first.stride())
        return whole
    packed: Tensor = torch.cat(parts)
    for module, view in zip(modules, packed.split([part.shape[0] for part in parts]), strict=True):
        getattr(module, name).data = view
    return packed
