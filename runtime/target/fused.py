"""A fused target: our own forward over a loaded model of `FAMILIES`, made for CUDA graphs.

The weights stay the model's: q, k, v and gate, up are packed side by side and the modules' parameters become views of
the packed storage, so that nothing is held twice and the model's own ``generate`` works as before. A layer is six
kernels, which overlap (`kernels.products`, `kernels.attention`), one with experts seven (`kernels.experts`); nothing in
it waits for the host, and lengths, slots and positions are read on the device. On a GPU a row's logits, keys and values
depend on its own tokens and positions alone, to the last bit (docs/text.md, *Why rows agree*).

`choose_forward` says whether it runs a model; `known.unfit_reason` why it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError, check_choice
from ..ops import REHEARSES, Ops
from .cache import ForwardBuffers, KVCache, LayerShape, Target
from .expert_loading import PackedExperts
from .fp8 import Fp8Linear, Fp8Weight, Weight
from .kernels.attention import AttentionParams, tree_attention
from .kernels.experts import Biases, Clamp, Experts, Routing, add_experts, gated_experts, route
from .kernels.products import (
    HeadRows,
    Norm,
    NormedRows,
    add_product,
    embed,
    gated_product,
    head_product,
    lift_of,
    norm_rows,
    num_groups,
    product_shape,
    qkv_product,
    split_scratch,
    tiled_heads,
    tiled_size,
)
from .kernels.tree_rows import ForwardRows
from .mxfp4 import ExpertWeight

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "GptOss")
FUSED_ON = ("cuda",)
"""Types of devices on which "auto" is the fused forward."""


class Choice(NamedTuple):
    """Name of the forward that was chosen, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_forward(asked: str, other: str, unfit: Callable[[], str | None], device: torch.device) -> Choice:
    """Choose between "fused" and ``other``; "auto" takes the fused one on devices of the types `FUSED_ON`.

    ``unfit`` says why a model is not fused, as the end of a sentence. Raises `UsageError` for an unknown name,
    `UnsupportedModelError` for "fused" where the model cannot be fused.
    """
    check_choice("target_backend", asked, ("auto", "fused", other))
    reason = None if asked == other else unfit()
    if asked == "fused" and reason is not None:
        problem = f"target_backend = 'fused' cannot run this model: {reason}"
        raise UnsupportedModelError(f"{problem}. Use target_backend={other!r}.")
    if asked != "auto":
        return Choice(asked, "asked for")
    is_fused = reason is None and device.type in FUSED_ON
    return Choice("fused" if is_fused else other, reason or f"the model is on {device}")


def family_of(model: nn.Module) -> str | None:
    """Return which of `FAMILIES` a model, a base class of it or what it wraps is of."""
    names = {kind.__name__ for module in (model, *model.children()) for kind in type(module).__mro__}
    return next((each for each in FAMILIES if f"{each}ForCausalLM" in names), None)


def unfit_kind(model: Any) -> str | None:
    """Say what of a model as configured the fused forward does not compute, as the end of a sentence; None: nothing."""
    config, decoder = model.config, model.model
    if family_of(model) == "Llama" and getattr(config, "sliding_window", None) is not None:
        return "its configuration has a sliding window, which Llama's layers do not read"
    if getattr(config, "is_causal", True) is False or getattr(config, "attention_chunk_size", None):
        return "its configuration asks for another attention mask"
    # Frequencies and their scaling are read from the module.
    rope = getattr(getattr(decoder, "rotary_emb", None), "rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"{rope} RoPE changes its frequencies with the length"
    if config.hidden_act not in ("silu", "swish"):
        return f"its hidden_act is {config.hidden_act}"
    head_dim = decoder.layers[0].self_attn.head_dim
    if head_dim % 2 or head_dim > 256:
        return f"its head_dim is {head_dim}"
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_plain = type(tensor) in (nn.Parameter, Tensor, nn.Buffer) and type(tensor.data) is Tensor
        if not is_plain or tensor.layout is not torch.strided or tensor.is_meta:
            kind = type(tensor)
            return f"{path} is a {kind.__qualname__} of {kind.__module__}, {tensor.layout} on {tensor.device}"
    forms = {(weight.dtype, weight.device) for weight in model.parameters()}
    if len(forms) > 1 or not {dtype for dtype, _ in forms} <= {torch.float32, torch.bfloat16, torch.float16}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in forms))
        return f"its weights are {found}, not all float32, bfloat16 or float16 on one device"
    return None


@dataclass(frozen=True)
class DenseMlp:
    """Gate and up, and down, of a layer without experts."""

    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer; matrices are the model's [out, in], in its type or in FP8."""

    norm_in: Norm
    qkv: Weight
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    o: Weight
    o_bias: Tensor | None
    norm_post: Norm
    mlp: DenseMlp | Experts
    window: int | None
    sinks: Tensor | None = None


class FusedTarget(Target):
    """The fused forward of a loaded model; see the module. Raises nothing: ask `known.unfit_reason` first.

    ``tap_layers`` as in `TargetModel`: the features are the hidden states entering these layers, or None for the last
    hidden state after the final norm. ``ops`` default to kernels on a GPU and to twins elsewhere. ``rotary``: has
    ``inv_freq`` and ``attention_scaling``; None takes the decoder's ``rotary_emb``.
    """

    def __init__(
        self, model: nn.Module, tap_layers: Sequence[int] | None, ops: Ops | None = None, rotary: Any = None
    ) -> None:
        config: Any = model.config
        decoder: Any = model.model
        self.model = model
        self.tap_layers = None if tap_layers is None else tuple(tap_layers)
        eps = float(config.rms_norm_eps)
        self.final_norm = Norm.of(decoder.norm.weight, eps)
        first = decoder.layers[0].self_attn
        self.head_dim = int(first.head_dim)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.scale = float(getattr(first, "scaling", self.head_dim**-0.5))
        self.layers = [_fuse_layer(layer, eps) for layer in decoder.layers]
        mlps = [layer.mlp for layer in self.layers]
        self.intermediate_size = max((mlp.down.shape[1] for mlp in mlps if isinstance(mlp, DenseMlp)), default=0)
        self.experts = next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)
        self.ops = ops or Ops.for_device(self.device)
        self._rotary = decoder.rotary_emb if rotary is None else rotary
        self._old_tables: list[tuple[Tensor, Tensor]] = []
        self.cos, self.sin = self._tables(1)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """Shapes of all decoder layers."""
        return [LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)] * len(self.layers)

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """See `Target.chunk_rows`: a long chunk of a mixture reads every expert, so it is longer there."""
        return super().chunk_rows if self.experts is None else (*super().chunk_rows, 2048)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the experts that a token does not go to."""
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        return sum(each.size_bytes * (each.count - each.top_k) // each.count for each in mixtures)

    def new_buffers(self, places: int, nodes: int, logit_rows: int, capacity: int) -> ForwardBuffers:
        """See `Target.new_buffers`."""
        rows, hidden = places * nodes, self.hidden_size
        width = self.num_heads * self.head_dim
        widths = {"residual": hidden, "scaled": hidden, "query": width, "attended": width}
        working = {name: (rows, size) for name, size in (widths | {"gated": self.intermediate_size}).items()}
        working["last"] = logit_rows, hidden
        bufs = ForwardBuffers.allocate(self, places, nodes, logit_rows, capacity, self.ops.use_kernels, **working)
        counts, groups = (rows, logit_rows), num_groups(hidden)
        squares = (torch.empty((count, groups), dtype=torch.float32, device=self.device) for count in counts)
        bufs.squares, bufs.last_squares = squares
        if self.ops.use_kernels:
            layer, heads = self.layers[0], self.num_heads + 2 * self.num_kv_heads
            dense = next((each.mlp for each in self.layers if isinstance(each.mlp, DenseMlp)), None)
            others = [layer.o, *([] if dense is None else [dense.gate_up, dense.down])]
            shapes = [(product_shape(weight), tiled_size(weight.shape[0])) for weight in others]
            shapes.append((product_shape(layer.qkv), tiled_heads(heads, self.head_dim)))
            bufs.splits = split_scratch(shapes, rows, self.device)
        if self.experts is not None:
            bufs.routing = Routing.allocate(self.experts, rows)
        return bufs

    def reserve_positions(self, num_positions: int) -> None:
        """Extend the rotary tables to ``num_positions`` positions."""
        if self.cos.shape[0] < num_positions:
            # Graphs of other caches may still read the old ones.
            self._old_tables.append((self.cos, self.sin))
            self.cos, self.sin = self._tables(num_positions)

    def _tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Compute cos and sin fp32 [positions, head_dim / 2]; an entry's bits do not depend on the table's length.

        The model's own embedding multiplies matrices, and there they do.
        """
        positions = torch.arange(num_positions, dtype=torch.float32, device=self.device)
        angles = positions[:, None] * self._rotary.inv_freq.to(self.device, torch.float32)
        scaling = float(self._rotary.attention_scaling)
        return angles.cos() * scaling, angles.sin() * scaling

    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """See `Target.forward`."""
        ops, scratch = self.ops, bufs.splits
        normed = NormedRows(bufs.residual, bufs.scaled, bufs.squares)
        heads = HeadRows(self.cos, self.sin, rows.positions, rows.attention.slots, rows.kv_rows, bufs.query)
        ops(embed)(self.embedding, rows.tokens, self.layers[0].norm_in, normed, self._tap(bufs, 0))
        norms = [*(layer.norm_in for layer in self.layers[1:]), self.final_norm]
        taps = [self._tap(bufs, index + 1) for index in range(len(self.layers))]
        layers = [*enumerate(zip(self.layers, cache.layers, norms, taps, strict=True))]
        if REHEARSES.get():
            layers = [*{_kind_of(layer): (index, layer) for index, layer in layers}.values()]
        for index, (layer, kv, norm, tap) in layers:
            ops(qkv_product)(normed, layer.norm_in, layer.qkv, layer.qkv_bias, layer.head_norms, heads, *kv, scratch)
            params = AttentionParams(self.scale, layer.window, None, layer.sinks, lift_of(layer.o, self.dtype))
            ops(tree_attention)(bufs.query, *kv, rows.attention, params, bufs.attended, bufs.scratch)
            bufs.keep_queries(index, bufs.query, last_row)
            ops(add_product)(bufs.attended, layer.o, layer.o_bias, layer.norm_post, normed, None, scratch)
            mlp, lift = layer.mlp, lift_of(layer.mlp.down, self.dtype)
            if isinstance(mlp, Experts):
                assert bufs.routing is not None
                ops(route)(normed, layer.norm_post, mlp, rows.kv_rows, bufs.routing)
                ops(gated_experts)(normed, layer.norm_post, mlp, bufs.routing, lift)
                ops(add_experts)(mlp, bufs.routing, norm, normed, tap)
            else:
                ops(gated_product)(normed, layer.norm_post, mlp.gate_up, mlp.gate_up_bias, bufs.gated, scratch, lift)
                ops(add_product)(bufs.gated, mlp.down, mlp.down_bias, norm, normed, tap, scratch)
        if self.tap_layers is None:
            ops(norm_rows)(normed, self.final_norm, bufs.features)
        tapped, blocks = self.tap_layers or (), bufs.features.split(self.hidden_size, 1)
        for place, index in enumerate(tapped):
            # A layer may be tapped twice: default taps of a small model.
            if (first := tapped.index(index)) != place:
                blocks[place].copy_(blocks[first])
        if last_row is not None:
            torch.index_select(normed.scaled, 0, last_row, out=bufs.last)
            torch.index_select(normed.squares, 0, last_row, out=bufs.last_squares)
            normed = NormedRows(normed.residual, bufs.last, bufs.last_squares)
        ops(head_product)(normed, self.final_norm, self.lm_head, bufs.logits)

    def _tap(self, bufs: ForwardBuffers, layer: int) -> Tensor | None:
        """Return the column block of the features for the input of ``layer``; None if it is not tapped."""
        if self.tap_layers is None or layer not in self.tap_layers:
            return None
        return bufs.features.narrow(1, self.tap_layers.index(layer) * self.hidden_size, self.hidden_size)


def _kind_of(value: Any) -> object:
    """Return what kernels of a launch with a value are compiled for: equal for values that differ in numbers alone."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple):
        return tuple(map(_kind_of, value))
    if is_dataclass(value):
        return tuple(_kind_of(getattr(value, each.name)) for each in fields(value))
    return float if isinstance(value, float) else value


def _fuse_layer(layer: Any, eps: float) -> FusedLayer:
    attention = layer.self_attn
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    qkv, mlp = _pack_weights([q, k, v]), _fuse_mlp(layer.mlp)
    return FusedLayer(
        norm_in=Norm.of(layer.input_layernorm.weight, eps, qkv),
        qkv=qkv,
        qkv_bias=_pack([q, k, v], "bias") if q.bias is not None else None,
        head_norms=head_norms,
        o=attention.o_proj.weight,
        o_bias=attention.o_proj.bias,
        norm_post=Norm.of(layer.post_attention_layernorm.weight, eps, mlp.gate_up),
        mlp=mlp,
        # Mistral's layers ask the configuration.
        window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        sinks=getattr(attention, "sinks", None),
    )


def _fuse_mlp(mlp: Any) -> DenseMlp | Experts:
    if hasattr(mlp, "experts"):
        experts, router = mlp.experts, mlp.router if hasattr(mlp, "router") else mlp.gate
        packed: Any = experts if isinstance(experts, PackedExperts) else None
        plain, biases, clamp = packed.plain if packed else experts, None, None
        if hasattr(plain, "limit"):  # gpt-oss
            biases = Biases(router.bias, experts.gate_up_proj_bias.flatten(), experts.down_proj_bias.flatten())
            clamp = Clamp(float(plain.alpha), float(plain.limit))
        weights: tuple[ExpertWeight, ExpertWeight]
        if packed:
            weights = packed.gate_up, packed.down
        else:
            gate_up, down = experts.gate_up_proj, experts.down_proj
            weights = (_turned(gate_up), _turned(down)) if clamp else (gate_up.flatten(0, 1), down.flatten(0, 1))
        normalises = bool(getattr(router, "norm_topk_prob", False))
        return Experts(router.weight, *weights, int(router.top_k), normalises, biases, clamp)
    both = [mlp.gate_proj, mlp.up_proj]
    bias = _pack(both, "bias") if mlp.gate_proj.bias is not None else None
    return DenseMlp(_pack_weights(both), bias, mlp.down_proj.weight, mlp.down_proj.bias)


def _turned(experts: nn.Parameter) -> Tensor:
    """Lay out matrices [experts, in, out] as [experts * out, in], of which the parameter becomes a view."""
    turned = experts.data.transpose(1, 2)
    if not turned.is_contiguous():
        turned = turned.contiguous()
        experts.data = turned.transpose(1, 2)
    return turned.flatten(0, 1)


def _pack_weights(modules: Sequence[nn.Module]) -> Weight:
    """Pack the weights of linear layers, which are all in FP8 or all in the model's type."""
    if isinstance(modules[0], Fp8Linear):
        return Fp8Weight(_pack(modules, "words"), _pack(modules, "scales"))
    return _pack(modules, "weight")


def _pack(modules: Sequence[nn.Module], name: str) -> Tensor:
    """Concatenate modules' tensors along their first axis; they become views of the result, unless they lie so."""
    parts = [getattr(module, name).data for module in modules]
    first = parts[0]
    ends = [part.data_ptr() + part.nbytes for part in parts]
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
