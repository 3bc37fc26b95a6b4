"""Attention over a committed prefix and a tree, as an attention function that transformers' layers call.

Every sequence b holds ``lengths[b]`` committed rows; the new positions of this forward are nodes of a tree (a prompt is
a tree without branches). Node n attends to the whole prefix and to its own ancestors, where a sliding window ``w``
allows a key only if ``query position - key position < w``; positions count from the root along the path, so two nodes
of one depth share a position. The mask is built once per forward and window, from positions, never from row numbers.

transformers passes keyword arguments of ``forward`` down to the attention function: so a `CacheContext` gets here.
Which window a layer has is said by its mask: transformers' own mask functions make it, and some models pass the window
no other way. So our mask function hands down a mark for each window, in the mask's place.
"""

from __future__ import annotations

import threading
import weakref
from functools import cached_property
from typing import Any

import torch
from eagle_slim.vocab_tools.compat import forget_attention
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .cache import ForwardBuffers, KVCache, LayerShape, read_rows
from .kernels.attention import AttentionParams, masked_attention, tree_attention
from .kernels.tree_rows import ForwardRows

ATTENTION_NAME = "eagle_slim_tree"
CONTEXT_ARGUMENT = "tree_context"
_USERS: set[int] = set()
_USERS_LOCK = threading.RLock()


def tree_attention_mask(
    lengths: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    kv_length: int,
    sliding_window: int | None,
    row_positions: Tensor | None = None,
) -> Tensor:
    """Build the mask of prefix, ancestors and window (module docstring): bool [batch, 1, nodes, kv_length].

    ``lengths`` int64 [batch]: committed rows. ``tree_mask`` bool [batch, nodes, rows]: node attends to row after the
    prefix, the nodes' own rows last; ``positions`` int64 [batch, nodes]: distance from the root. Where rows of earlier
    nodes lie between prefix and nodes, ``row_positions`` int64 [batch, rows] are the positions of all. Example: prefix
    of 2, root with two children, no window::

        column   0 1   2    3       4       5
                 prefix root child 1 child 2 (row of a longer sequence)
        root     1 1   1    0       0       0
        child 1  1 1   1    1       0       0
        child 2  1 1   1    0       1       0
    """
    batch, nodes = positions.shape
    column = torch.arange(kv_length, device=positions.device).expand(batch, kv_length)
    tree_rows = tree_mask.shape[2]
    node = column - lengths[:, None]  # [batch, kv_length]: which node a column holds, < 0 in the prefix
    in_tree = (node >= 0) & (node < tree_rows)
    node = node.clamp(0, tree_rows - 1)
    seen = tree_mask.gather(2, node[:, None].expand(batch, nodes, kv_length)) & in_tree[:, None]
    seen = seen | (column < lengths[:, None])[:, None]
    if sliding_window is not None:
        row_positions = positions if row_positions is None else row_positions
        key_position = torch.where(in_tree, lengths[:, None] + row_positions.gather(1, node), column)
        query_position = lengths[:, None] + positions
        seen = seen & (query_position[:, :, None] - key_position[:, None] < sliding_window)
    return seen[:, None]


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve one attention layer of the target; transformers' attention-function signature.

    Raises `UnsupportedModelError` if the model hands no keyword arguments down, or computes a mask or bias of its own.
    """
    context: Any = kwargs.get(CONTEXT_ARGUMENT)
    if context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not receive the keyword arguments of forward, so the tree mask cannot reach "
            "it. Use a model whose attention takes **kwargs (Llama, Qwen2, Qwen3, Mistral and most others do)."
        )
    is_mark = attention_mask is None or (attention_mask.shape, attention_mask.dtype) == ((1, 1, 1, 1), torch.int64)
    if not is_mark or not getattr(module, "is_causal", True) or kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes an attention mask of its own, by rows of the cache or over tokens that "
            "follow; tree verification needs a causal mask, with or without a sliding window."
        )
    window = None if attention_mask is None else int(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = context.attend(query, key, value, AttentionParams(scale, window, softcap, s_aux))
    return out.transpose(1, 2).contiguous(), None


class ShapeProbe:
    """Records the shapes of a model's layers in a forward over one token, in the place of a `CacheContext`."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.attended: set[int] = set()
        self.windows: set[int | None] = set()
        self._stored: dict[int, tuple[int, Tensor]] = {}
        self._last = -1

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheContext.store`."""
        # Kept, so that no other tensor takes its place in memory meanwhile.
        self._stored[keys.data_ptr()] = (layer, keys)
        self._last = layer
        self.shapes[layer] = LayerShape(0, keys.shape[1], keys.shape[3], values.shape[3])
        return keys, values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Give zeros, as wide as the values."""
        if self._last < 0:
            raise UnsupportedModelError("A layer attends to keys that it did not hand to the KV cache.")
        layer, _ = self._stored.get(key.data_ptr(), (self._last, key))
        is_direct = key.data_ptr() in self._stored
        self.attended.add(layer)
        self.windows.add(params.window)
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
        read = self._slots, self._kv_length, self._are_first_slots
        keys, values = (read_rows(buffer, *read) for buffer in self.cache.layers[place])
        return keys, values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
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
            return masked_attention(query, key, value, self._mask(params.window), params)
        keys, values = self.cache.layers[self._layer_of[key.data_ptr()][0]]
        places, heads, nodes, head_dim = query.shape
        flat = query.transpose(1, 2).reshape(places * nodes, heads * head_dim).to(keys.dtype)
        out = torch.empty_like(flat)
        tree_attention(flat, keys, values, self.rows.attention, params, out, scratch)
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
        """Return bool [places, 1, nodes, rows]: which row each node may see."""
        if window not in self._masks:
            attention = self.rows.attention
            self._masks[window] = tree_attention_mask(
                self._lengths, attention.tree_mask(), attention.depths.long(), self._kv_length, window
            )
        return self._masks[window]

    @cached_property
    def _are_first_slots(self) -> bool:
        """Whether place i is slot i, so that nothing has to be gathered; waits for the device."""
        return self._slots.tolist() == list(range(len(self._slots)))


def mark_window(local_size: int | None = None, allow_is_causal_skip: bool = False, **_: Any) -> Tensor | None:
    """Stand in for a mask that transformers asks for: None, or the size of its window as int64 [1, 1, 1, 1].

    ``allow_is_causal_skip``: the mask is no more than that; any other gives no mark, and its layer is refused.
    """
    if not allow_is_causal_skip:
        return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device="cpu")
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size, device="cpu")


def is_built_in(name: str) -> bool:
    """Report whether a name is transformers' softmax attention; one with a slash is a repository of its kernels."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = str(getattr(ALL_ATTENTION_FUNCTIONS.get(name), "__module__", ""))
    return "/" in name or name == "eager" or module.startswith("transformers.")


def register(user: object) -> None:
    """Make the functions known to transformers for as long as ``user`` lives; afterwards no trace of them is left."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # First, so that an interrupt leaves nothing either.
    weakref.finalize(user, _release, id(user)).atexit = False
    with _USERS_LOCK:
        _USERS.add(id(user))
        AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)
        AttentionMaskInterface.register(ATTENTION_NAME, mark_window)


def _release(user: int) -> None:
    with _USERS_LOCK:
        _USERS.discard(user)
        if not _USERS:
            forget_attention(ATTENTION_NAME)
