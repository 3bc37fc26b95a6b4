"""KV cache and forward buffers of a target, and what a decoding step needs of one.

A sequence's committed rows are 0 .. length - 1 of its slot; a tree's rows are written after them, in node order, and
`step.kernels.acceptance.commit_kv` moves the accepted ones down::

    committed   tree rows                       accepted path: nodes 0, 2, 5
    [c c c c]   [n0 n1 n2 n3 n4 n5 n6]    ->    [c c c c n0 n2 n5] and three more committed rows

Nothing is ever computed twice, and what lies after the committed rows is never read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels.attention import AttentionScratch
from .kernels.experts import Experts, Routing
from .kernels.product_kernels import SplitScratch
from .kernels.tree_rows import ForwardRows

Size = tuple[int, ...]
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


class Target(ABC):
    """A target whose forward reads lengths, slots and positions on the device."""

    model: Any
    tap_layers: tuple[int, ...] | None
    """Layers whose inputs are the features, side by side; None: the last hidden state after the final norm."""
    experts: Experts | None = None
    """Those of the first layer that has any; all have the same sizes."""

    @property
    def embedding(self) -> Tensor:
        """Input embedding [target_vocab, hidden]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> Tensor:
        """LM-head rows [target_vocab, hidden] (the embedding itself when tied)."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def device(self) -> torch.device:
        """Device of the input embedding."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        """Logits per position."""
        return self.lm_head.shape[0]

    @property
    def feature_width(self) -> int:
        """Width of the features handed to the drafter."""
        return self.hidden_size * (1 if self.tap_layers is None else len(self.tap_layers))

    @property
    def hidden_size(self) -> int:
        """Width of one hidden state."""
        return self.embedding.shape[1]

    @property
    @abstractmethod
    def layer_shapes(self) -> Sequence[LayerShape]:
        """Shapes of the decoder layers that have keys and values of their own."""

    @property
    def text_config(self) -> Any:
        """The decoder's configuration."""
        return self.model.config.get_text_config()

    @property
    def is_mixture(self) -> bool:
        """Whether rows of a pass that go to other experts read other weights."""
        return self.experts is not None

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows of a captured prompt chunk: the smallest that holds the rest of the prompt, else the largest."""
        return (64, 512)

    @abstractmethod
    def new_buffers(self, places: int, nodes: int, logit_rows: int, capacity: int) -> ForwardBuffers:
        """Allocate what a forward of ``places`` times ``nodes`` rows writes, logits for ``logit_rows`` of them.

        ``capacity``: rows of a slot of the cache.
        """

    def reserve_positions(self, num_positions: int) -> None:  # noqa: B027  # most have nothing to prepare
        """Prepare for positions below ``num_positions``."""

    @abstractmethod
    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """Run all rows; writes the cache, ``bufs.features`` [rows, feature_width] and ``bufs.logits``.

        ``last_row`` int64 [n]: only these rows get logits [n, vocab]; None: all of them.
        """


class KVCache:
    """Keys and values of all layers, in ``capacity`` rows for each of ``num_slots`` sequences.

    Those of layers of one shape lie in one pair of tensors. ``stacks``: the pairs, each [layers, slots, kv_heads,
    capacity, head_dim]; ``places``: each layer's pair and index.
    """

    def __init__(self, stacks: Sequence[tuple[Tensor, Tensor]], places: Sequence[tuple[int, int]]) -> None:
        self.stacks, self._places = list(stacks), list(places)
        self.layers = [(stacks[stack][0][place], stacks[stack][1][place]) for stack, place in places]
        """By layer: keys and values [slots, kv_heads, capacity, head_dim]."""
        _, self.num_slots, _, self.capacity, _ = stacks[0][0].shape

    @classmethod
    def allocate(cls, target: Target, num_slots: int, capacity: int) -> KVCache:
        """Allocate ``capacity`` rows for each slot."""
        shapes = [(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in target.layer_shapes]
        kinds, stacks = list(dict.fromkeys(shapes)), []
        for kind in kinds:
            kv_heads, *widths = kind
            sizes = ((shapes.count(kind), num_slots, kv_heads, capacity, width) for width in widths)
            # Zeros, not empty: PyTorch's attention masks rows of others, and 0 * NaN would still spoil its sums.
            keys, values = (torch.zeros(size, dtype=target.dtype, device=target.device) for size in sizes)
            stacks.append((keys, values))
        return cls(stacks, [(kinds.index(kind), shapes[:layer].count(kind)) for layer, kind in enumerate(shapes)])

    @classmethod
    def over(cls, keys: Tensor, values: Tensor) -> KVCache:
        """Wrap existing tensors: keys and values [layers, slots, kv_heads, capacity, head_dim]."""
        return cls([(keys, values)], [(0, layer) for layer in range(len(keys))])

    def first(self, num_slots: int) -> KVCache:
        """Return the same cache for fewer slots."""
        return KVCache([(keys[:, :num_slots], values[:, :num_slots]) for keys, values in self.stacks], self._places)

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(tensor.nbytes for stack in self.stacks for tensor in stack)


def read_rows(stack: Tensor, slots: Tensor, length: int, are_first: bool) -> Tensor:
    """Read ``slots`` int64 [n] of a stack, not copied if they are its first: [n, kv_heads, length, head_dim]."""
    rows = stack[:, :, :length]
    return rows[: len(slots)] if are_first else rows[slots]


class ForwardBuffers:
    """Outputs and scratch of a forward of up to ``places * nodes`` rows; static, as graphs hold its addresses.

    ``features`` [rows, feature_width], ``logits`` [logit_rows, vocab], the attention's scratch (None without the
    kernel), and what the fused forward works in. Buffers that were not allocated are for a forward that allocates by
    itself, which no graph holds: it sets ``features`` and ``logits``.
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
    scratch: AttentionScratch | None = None
    splits: SplitScratch | None = None
    routing: Routing | None = None
    queries: Tensor | None = None
    """[rows, layers, heads * head_dim]: where a forward leaves its queries, or those of a prompt's last rows, the last
    one first; None: not recorded."""
    is_dynamic: bool = True
    """Whether a forward sets tensors here rather than filling them."""

    @classmethod
    def allocate(
        cls, target: Target, places: int, nodes: int, logit_rows: int, capacity: int, use_kernels: bool, **working: Size
    ) -> ForwardBuffers:
        """Allocate outputs, scratch for kernels, and ``working`` shapes by name, in the target's type."""
        bufs = cls()
        bufs.is_dynamic = False
        shapes = {"features": (places * nodes, target.feature_width), "logits": (logit_rows, target.vocab_size)}
        for name, shape in (shapes | working).items():
            setattr(bufs, name, torch.empty(shape, dtype=target.dtype, device=target.device))
        kinds = set(target.layer_shapes)
        if use_kernels and all(kind.fits_kernel for kind in kinds):
            sizes = [(kind.heads, kind.kv_heads, kind.key_dim) for kind in kinds]
            bufs.scratch = AttentionScratch.allocate(places, nodes, sizes, capacity, target.device)
        return bufs

    def keep_queries(self, layer: int, queries: Tensor, last_row: Tensor | None) -> None:
        """Record a layer's queries [rows, heads * head_dim] if ``queries`` is set; ``last_row`` as in `forward`."""
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
