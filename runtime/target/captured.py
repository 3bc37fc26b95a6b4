"""transformers' own forward, fit for CUDA graphs: its layers attend through our kernel, with lengths on the device.

For targets that are not fused. Weights, norms, rotation and experts stay transformers'; the cache and the attention are
ours. Whether a model's forward can be captured (no wait, no shape that depends on values) is found out by a trial.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..errors import UnsupportedModelError
from ..kernels.tree_attention import tree_attention, tree_attention_ref
from ..kernels.tree_rows import ForwardRows
from .attention import CONTEXT_ARGUMENT
from .device_buffers import ForwardBuffers, KVCache
from .transformers import TargetModel


class DeviceContext:
    """What one forward attends to, for `attention.tree_attention_forward`; the cache it stores keys and values in."""

    def __init__(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers) -> None:
        self.rows, self.cache, self.bufs = rows, cache, bufs
        self.calls = 0
        self._stored: set[int] = set()
        nodes = rows.nodes
        slots = rows.attention.slots.clamp(min=0).long()
        self._slots = slots.repeat_interleave(nodes, output_size=rows.places * nodes)
        # A row that is not kept goes to the last one of the slot, which no sequence reaches.
        self._kv_rows = torch.where(rows.kv_rows < 0, cache.capacity - 1, rows.kv_rows).long()

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new keys and values [places, kv_heads, nodes, head_dim] where the rows say."""
        self._stored.add(layer)
        for buffer, new in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
            buffer[self._slots, :, self._kv_rows] = new.transpose(1, 2).flatten(0, 1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See `attention.ForwardContext.attend`; ``key`` and ``value`` are in the cache already."""
        self.calls += 1
        if query.shape[-1] != value.shape[-1]:
            raise UnsupportedModelError("Values of another width than the keys run in pieces only.")
        if layer not in self._stored:
            raise UnsupportedModelError(f"Layer {layer} attends to keys that another layer computed.")
        places, heads, nodes, head_dim = query.shape
        flat = query.transpose(1, 2).reshape(places * nodes, heads * head_dim)
        out = torch.empty_like(flat)
        run = tree_attention if flat.is_cuda else tree_attention_ref
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        run(
            flat, keys, values, self.rows.attention, scale, window, out, self.bufs.scratch, softcap=softcap, sinks=sinks
        )  # fmt: skip
        return out.view(places, nodes, heads, head_dim).transpose(1, 2)


class _ForwardCache(Cache):  # type: ignore[misc]  # transformers carries no types
    """Hands a forward's keys and values to the device's cache, in the form transformers' layers call."""

    def __init__(self, context: DeviceContext) -> None:
        super().__init__(layers=[])
        self._context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new rows of a layer; attention reads the cache itself."""
        self._context.store(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given with every forward, so nothing needs to know."""
        return 0


class CapturedTarget:
    """A `TargetModel` as the decoding step needs it. Raises `UnsupportedModelError` where the kernel cannot attend."""

    def __init__(self, target: TargetModel) -> None:
        config = target.text_config
        self.target = target
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.num_heads)
        self.vocab_size = target.lm_head.shape[0]
        name = type(target.model).__name__
        if self.head_dim > 256:
            raise UnsupportedModelError(f"{name} has heads of {self.head_dim}; the kernel takes 256 at most.")
        if target.longrope_limit is not None:
            raise UnsupportedModelError(f"{name} changes its rotary frequencies with the length (longrope).")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.target.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with keys and values of its own."""
        return len(self.target.layers)

    @property
    def feature_width(self) -> int:
        """Width of the features handed to the drafter."""
        return self.target.feature_width

    def new_buffers(self, places: int, nodes: int, logit_rows: int) -> ForwardBuffers:
        """See `DeviceTarget.new_buffers`."""
        return ForwardBuffers(self, places, nodes, logit_rows)

    def reserve_positions(self, num_positions: int) -> None:
        """Nothing to do: the model computes its rotation from the positions."""

    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """See `DeviceTarget.forward`."""
        context = DeviceContext(rows, cache, bufs)
        shape = (rows.places, rows.nodes)
        with self.target.tree_attention(), self.target.record_features() as taps:
            output = self.target.model(
                input_ids=rows.tokens.view(shape).long(),
                position_ids=rows.positions.view(shape).long(),
                past_key_values=_ForwardCache(context),
                use_cache=True,
                logits_to_keep=0 if last_row is None else last_row,
                **{CONTEXT_ARGUMENT: context},
            )
        if context.calls != self.num_layers or len(taps) < len(self.target.tap_layers or (None,)):
            raise UnsupportedModelError(
                f"{type(self.target.model).__name__} attends in {context.calls} of its {self.num_layers} layers."
            )
        bufs.logits.copy_(output.logits.flatten(0, 1))
        bufs.features.copy_(torch.cat([taps[place] for place in sorted(taps)], -1).flatten(0, 1))
