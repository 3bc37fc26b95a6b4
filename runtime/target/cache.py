"""The target's keys and values, what its forward works in, and what the decoding step needs of a target.

A sequence's committed rows are 0 .. length - 1 of its slot; a tree's rows are written after them, in node order, and
`step.kernels.acceptance.commit_kv` moves the accepted ones down::

    committed   tree rows                       accepted path: nodes 0, 2, 5
    [c c c c]   [n0 n1 n2 n3 n4 n5 n6]    ->    [c c c c n0 n2 n5] and three more committed rows

Nothing is ever computed twice, and what lies after the committed rows is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops import Ops
from .kernels.attention import AttentionScratch
from .kernels.product_kernels import SplitScratch
from .kernels.tree_rows import ForwardRows

KERNEL_HEAD_DIM = 256
"""The widest head that the attention kernel takes."""


class LayerShape(NamedTuple):
    """One layer's attention: query heads, key heads, and the widths of keys and values."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    is_direct: bool = True
    """Whether it attends to the keys and values that are cached; some models cache a compressed form."""

    @property
    def fits_kernel(self) -> bool:
        """Whether the attention kernel takes it."""
        return self.is_direct and self.key_dim == self.value_dim <= KERNEL_HEAD_DIM


class Target(Protocol):
    """A target whose forward reads lengths, slots and positions on the device."""

    @property
    def vocab_size(self) -> int:
        """Logits per position."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        """Shapes of the decoder layers that have keys and values of their own."""

    @property
    def has_windows(self) -> bool:
        """Whether a layer attends within a sliding window."""

    @property
    def feature_width(self) -> int:
        """Width of the features handed to the drafter."""

    def new_buffers(self, places: int, nodes: int, logit_rows: int, capacity: int) -> ForwardBuffers:
        """Allocate what a forward of ``places`` times ``nodes`` rows writes, logits for ``logit_rows`` of them.

        ``capacity``: rows of a slot of the cache.
        """

    def reserve_positions(self, num_positions: int) -> None:
        """Get ready for positions below ``num_positions``."""

    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """Run all rows: writes the cache, ``bufs.features`` and ``bufs.logits`` (of ``last_row`` int64 [n] alone)."""


def row_bytes(target: Target) -> int:
    """Bytes of a token's keys and values, in all layers."""
    shapes = target.layer_shapes
    return target.dtype.itemsize * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)


class KVCache:
    """Keys and values of all layers, ``capacity`` rows a slot; layers of one shape lie in one pair of tensors."""

    def __init__(self, target: Target, num_slots: int, capacity: int) -> None:
        shapes = [(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in target.layer_shapes]
        self.stacks: list[tuple[Tensor, Tensor]] = []
        """Keys and values, each [layers, slots, kv_heads, capacity, head_dim]."""
        places: dict[int, tuple[int, int]] = {}
        for kv_heads, key_dim, value_dim in dict.fromkeys(shapes):
            own = [layer for layer, shape in enumerate(shapes) if shape == (kv_heads, key_dim, value_dim)]
            places |= {layer: (len(self.stacks), place) for place, layer in enumerate(own)}
            keys, values = (
                # Zeros, not empty: PyTorch's attention masks rows of others, and 0 * NaN would still spoil its sums.
                torch.zeros((len(own), num_slots, kv_heads, capacity, width), dtype=target.dtype, device=target.device)
                for width in (key_dim, value_dim)
            )
            self.stacks.append((keys, values))
        self._places = [places[layer] for layer in range(len(shapes))]
        self._list_layers()

    @classmethod
    def over(cls, keys: Tensor, values: Tensor) -> KVCache:
        """A cache in tensors that are there: keys and values [layers, slots, kv_heads, capacity, head_dim]."""
        cache = object.__new__(cls)
        cache._places = [(0, layer) for layer in range(len(keys))]
        cache.stacks = [(keys, values)]
        cache._list_layers()
        return cache

    def _list_layers(self) -> None:
        pairs = [(self.stacks[stack], place) for stack, place in self._places]
        self.layers = [(keys[place], values[place]) for (keys, values), place in pairs]
        """By layer: keys and values [slots, kv_heads, capacity, head_dim]."""

    def first(self, num_slots: int) -> KVCache:
        """Return the same cache for fewer slots."""
        view = copy(self)
        view.stacks = [(keys[:, :num_slots], values[:, :num_slots]) for keys, values in self.stacks]
        view._list_layers()
        return view

    @property
    def num_slots(self) -> int:
        """Sequences that it holds."""
        return self.stacks[0][0].shape[1]

    @property
    def capacity(self) -> int:
        """Rows of a slot."""
        return self.stacks[0][0].shape[3]

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for stack in self.stacks for tensor in stack)


class ForwardBuffers:
    """Outputs and scratch of a forward of up to ``places * nodes`` rows; static, as graphs hold its addresses.

    ``features`` [rows, feature_width], ``logits`` [logit_rows, vocab], the attention's scratch (None without the
    kernel), and whatever the target asks for: ``working`` shapes by name, in the target's type. A target whose forward
    allocates by itself asks for nothing (`ForwardBuffers.dynamic`) and sets ``features`` and ``logits``.
    """

    features: Tensor
    logits: Tensor
    residual: Tensor
    scaled: Tensor
    query: Tensor
    attended: Tensor
    gated: Tensor
    last: Tensor
    squares: Tensor
    last_squares: Tensor
    scratch: AttentionScratch | None
    splits: SplitScratch | None = None
    queries: Tensor | None = None
    """[rows, layers, heads * head_dim]: where a forward leaves its queries, or those of a prompt's last rows, the last
    one first; None: not recorded."""
    is_dynamic: bool = False
    """Whether a forward sets tensors here rather than filling them."""

    def __init__(
        self, target: Target, places: int, nodes: int, logit_rows: int, capacity: int, **working: tuple[int, ...]
    ) -> None:
        shapes = {"features": (places * nodes, target.feature_width), "logits": (logit_rows, target.vocab_size)}
        for name, shape in (shapes | working).items():
            setattr(self, name, torch.empty(shape, dtype=target.dtype, device=target.device))
        uses_kernels = target.device.type == "cuda" or getattr(target, "ops", None) == Ops(use_kernels=True)
        self.scratch = self._scratch(target, places, nodes, capacity) if uses_kernels else None

    @staticmethod
    def _scratch(target: Target, places: int, nodes: int, capacity: int) -> AttentionScratch | None:
        shapes = set(target.layer_shapes)
        if not all(shape.fits_kernel for shape in shapes):
            return None
        sizes = [(shape.heads, shape.kv_heads, shape.key_dim) for shape in shapes]
        return AttentionScratch.allocate(places, nodes, sizes, capacity, target.device)

    @classmethod
    def dynamic(cls) -> ForwardBuffers:
        """Buffers of a forward that allocates by itself, which no graph holds."""
        bufs = object.__new__(cls)
        bufs.scratch, bufs.is_dynamic = None, True
        return bufs

    def keep_queries(self, layer: int, queries: Tensor, last_row: Tensor | None) -> None:
        """Leave a layer's queries [rows, heads * head_dim] where they are asked for; ``last_row`` as in `forward`."""
        if self.queries is None:
            return
        if last_row is not None:
            back = torch.arange(len(self.queries), device=last_row.device)
            queries = queries[(last_row - back).clamp(min=0)]
        self.queries[:, layer] = queries

    def first(self, rows: int) -> ForwardBuffers:
        """Return the same buffers for fewer rows, all of which get logits."""
        view = copy(self)
        vars(view).update({name: each[:rows] for name, each in vars(self).items() if isinstance(each, Tensor)})
        return view
