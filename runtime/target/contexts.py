"""Attention of transformers' layers in one forward: over rows of our cache, or a probe that notes their shapes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from .attention import masked_attention, tree_attention_mask
from .cache import ForwardBuffers, KVCache, LayerShape
from .kernels.attention import tree_attention
from .kernels.tree_rows import ForwardRows


class ShapeProbe:
    """Notes the shapes of a model's layers over one token; in the place of a `CacheContext`."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.attended: set[int] = set()
        """Layers whose keys were attended to."""
        self._stored: dict[int, tuple[int, Tensor]] = {}
        self._last = -1

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheContext.store`."""
        # Kept, so that no other tensor takes its place in memory meanwhile.
        self._stored[keys.data_ptr()] = (layer, keys)
        self._last = layer
        self.shapes[layer] = LayerShape(0, keys.shape[1], keys.shape[3], values.shape[3])
        return keys, values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> Tensor:
        """Give zeros, as wide as the values."""
        if self._last < 0:
            raise UnsupportedModelError("A layer attends to keys that it did not hand to the KV cache.")
        layer, _ = self._stored.get(key.data_ptr(), (self._last, key))
        is_direct = key.data_ptr() in self._stored
        self.attended.add(layer)
        self.shapes[layer] = self.shapes[layer]._replace(heads=query.shape[1], is_direct=is_direct)
        return query.new_zeros((*query.shape[:3], value.shape[3]))


class CacheContext:
    """One forward over rows of the cache.

    With the kernel (``bufs.scratch``) layers get their new keys back, and attention reads the cache; else they get all
    rows, and PyTorch attends to what they hand on.
    """

    def __init__(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        self.rows, self.cache, self.bufs, self.last_row = rows, cache, bufs, last_row
        self._layers_attended = 0
        self._layer_of: dict[int, tuple[int, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}
        self._slots = rows.attention.slots.clamp(min=0).long()
        # A row that is not kept goes to the last one of the slot, which no sequence reaches.
        self._kv_rows = torch.where(rows.kv_rows < 0, cache.capacity - 1, rows.kv_rows).long()

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values [places, kv_heads, nodes, head_dim]; returns what to attend to."""
        nodes, place = self.rows.nodes, len(self._layer_of)
        slots = self._slots.repeat_interleave(nodes, output_size=self.rows.places * nodes)
        # Kept with their place, so that no other tensor takes theirs in memory meanwhile.
        self._layer_of[keys.data_ptr()] = (place, keys)
        for buffer, new in zip(self.cache.layers[place], (keys, values), strict=True):
            buffer[slots, :, self._kv_rows] = new.transpose(1, 2).flatten(0, 1).to(buffer.dtype)
        if self.bufs.scratch is not None:
            return keys, values
        all_keys, all_values = (self._read(buffer) for buffer in self.cache.layers[place])
        return all_keys, all_values

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attend with ``query`` [places, heads, nodes, head_dim]; same shape, but as wide as the values.

        ``key`` and ``value`` are what `store` returned, to this layer or, where layers share them, another; or what a
        layer made of it, where it keeps keys and values in a compressed form.
        """
        scratch = self.bufs.scratch
        if self.bufs.queries is not None:
            queries = query.transpose(1, 2).flatten(2).flatten(0, 1)
            self.bufs.keep_queries(self._layers_attended, queries, self.last_row)
        self._layers_attended += 1
        if scratch is None:
            # Under autocast a layer computes in another type than the cache's.
            key, value = key.to(query.dtype), value.to(query.dtype)
            return masked_attention(query, key, value, self._mask(window), scale, softcap, sinks)
        keys, values = self.cache.layers[self._layer_of[key.data_ptr()][0]]
        places, heads, nodes, head_dim = query.shape
        flat = query.transpose(1, 2).reshape(places * nodes, heads * head_dim).to(keys.dtype)
        out = torch.empty_like(flat)
        tree_attention(
            flat, keys, values, self.rows.attention, scale, window, out, scratch, softcap=softcap, sinks=sinks
        )
        return out.to(query.dtype).view(places, nodes, heads, head_dim).transpose(1, 2)

    @cached_property
    def _lengths(self) -> Tensor:
        """Committed rows of each place's sequence, int64 [places]."""
        return self.rows.attention.lengths[self._slots].long()

    @cached_property
    def _kv_length(self) -> int:
        """Rows of the longest sequence, those of this forward included; waits for the device."""
        return int((self._lengths + self.rows.attention.counts).max())

    def _mask(self, window: int | None) -> Tensor:
        """Bool [places, 1, nodes, rows]: which row each node may see."""
        if window not in self._masks:
            attention = self.rows.attention
            self._masks[window] = tree_attention_mask(
                self._lengths, attention.tree_mask(), attention.depths.long(), self._kv_length, window
            )
        return self._masks[window]

    def _read(self, buffer: Tensor) -> Tensor:
        """All rows in use of each place's slot, up to the longest: [places, kv_heads, rows, head_dim]."""
        rows = buffer[:, :, : self._kv_length]
        return rows[: len(self._slots)] if self._are_first_slots else rows[self._slots]

    @cached_property
    def _are_first_slots(self) -> bool:
        """Whether place i is slot i, so that nothing has to be gathered; waits for the device."""
        return self._slots.tolist() == list(range(len(self._slots)))
