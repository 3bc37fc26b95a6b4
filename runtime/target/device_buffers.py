"""What a target's forward on the device works in, and what the decoding step needs of such a target."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels.tree_attention import AttentionScratch, most_parts
from ..kernels.tree_rows import ForwardRows


class DeviceTarget(Protocol):
    """A target whose forward reads lengths, slots and positions on the device and waits for nothing."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with keys and values of its own."""

    @property
    def feature_width(self) -> int:
        """Width of the features handed to the drafter."""

    def new_buffers(self, places: int, nodes: int, logit_rows: int) -> ForwardBuffers:
        """Allocate what a forward of ``places`` times ``nodes`` rows writes, logits for ``logit_rows`` of them."""

    def reserve_positions(self, num_positions: int) -> None:
        """Get ready for positions below ``num_positions``."""

    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """Run all rows: writes the cache, ``bufs.features`` and ``bufs.logits`` (of ``last_row`` int64 [n] alone)."""


class KVCache:
    """Keys and values of all layers: twice [layers, slots, kv_heads, capacity, head_dim]."""

    def __init__(self, target: DeviceTarget, num_slots: int, capacity: int) -> None:
        shape = (target.num_layers, num_slots, target.num_kv_heads, capacity, target.head_dim)
        # Never read before it is written, so it may hold anything.
        self.keys = torch.empty(shape, dtype=target.dtype, device=target.device)
        self.values = torch.empty_like(self.keys)

    def first(self, num_slots: int) -> KVCache:
        """The same cache for fewer slots."""
        view = object.__new__(KVCache)
        view.keys, view.values = self.keys[:, :num_slots], self.values[:, :num_slots]
        return view

    @property
    def num_slots(self) -> int:
        """Sequences that it holds."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Rows of a slot."""
        return self.keys.shape[3]

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()


class ForwardBuffers:
    """What a forward of up to ``places * nodes`` rows writes besides the cache; static, as graphs hold its addresses.

    ``features`` [rows, feature_width], ``logits`` [logit_rows, vocab], the attention's scratch, and whatever the target
    asks for: ``working`` shapes by name, in the target's type.
    """

    features: Tensor
    logits: Tensor
    scratch: AttentionScratch

    def __init__(
        self, target: DeviceTarget, places: int, nodes: int, logit_rows: int, **working: tuple[int, ...]
    ) -> None:
        shapes = {"features": (places * nodes, target.feature_width), "logits": (logit_rows, target.vocab_size)}
        for name, shape in (shapes | working).items():
            setattr(self, name, torch.empty(shape, dtype=target.dtype, device=target.device))
        heads, kv_heads = target.num_heads, target.num_kv_heads
        parts = most_parts(places, nodes, heads, kv_heads, target.head_dim, target.dtype, target.device)
        self.scratch = AttentionScratch.allocate(parts, nodes, heads, target.head_dim, target.device)

    def __getattr__(self, name: str) -> Tensor:
        # Only reached for names that are not there; tells type checkers what the working tensors are.
        raise AttributeError(name)

    def first(self, rows: int) -> ForwardBuffers:
        """The same buffers for fewer rows, all of which get logits."""
        view = object.__new__(ForwardBuffers)
        for name, tensor in vars(self).items():
            setattr(view, name, tensor[:rows] if isinstance(tensor, Tensor) else tensor)
        return view
