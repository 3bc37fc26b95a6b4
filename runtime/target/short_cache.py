"""A part of a KV cache, laid out as a cache of its own: for each KV head the blocks that matter most to it.

A partial pass is the target's usual forward over this cache. Keys carry their rotation, so attention does not mind that
rows have moved up; new rows are rotated by their true positions (`ShortCache.offsets`). Of each slot it holds::

    [ chosen blocks, ascending | recent rows ]  new rows follow
      the first block, then the   the last whole blocks
      best of those before the    and what began since
      recent ones

Scores are Quest's (arXiv 2406.10774): a block's bound of q · k from its keys' smallest and largest numbers, the largest
of the queries of the last rows that passed the whole cache and of the heads that share the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import KVCache, Target
from .kernels.attention_kernels import BLOCK

RECENT = 4
"""Whole blocks before the last row that are always there."""
SINKS = 1
"""First blocks that are always there."""
_SLICE = 4096
ROWS = 4
"""Last rows of a pass whose queries choose."""


def full_passes_reason(target: Target) -> str | None:
    """Return why partial passes cannot run a target, as the end of a sentence; None if they can."""
    shapes = set(target.layer_shapes)
    if len(shapes) > 1 or not all(shape.is_direct for shape in shapes):
        return "its layers' keys and values are of different shapes, or cached in a compressed form"
    kinds = getattr(target.text_config, "layer_types", None)
    has_window = getattr(target.text_config, "sliding_window", None) is not None
    if has_window if kinds is None else "sliding_attention" in kinds:
        return "layers with a sliding window read few keys already"
    return None


class ShortCache:
    """The part of ``whole`` that partial passes see; see the module. Nothing here waits for the device.

    ``num_blocks``: blocks of 64 keys that are chosen; ``num_new``: rows that partial passes may add; ``num_changed``:
    most rows of the whole cache that are written between two calls of `take`.
    """

    def __init__(self, target: Target, whole: KVCache, num_blocks: int, num_new: int, num_changed: int) -> None:
        (self.keys, self.values), self.num_changed = whole.stacks[0], num_changed
        layers, slots, kv_heads, capacity, head_dim = self.keys.shape
        total = -(-capacity // BLOCK)
        self.num_blocks = min(num_blocks, total)
        # The last block has begun, and is not whole.
        self.cache = KVCache.allocate(target, slots, (self.num_blocks + RECENT + 1) * BLOCK + num_new)
        self.offsets = torch.zeros(slots, dtype=torch.int32, device=target.device)
        """int32 [slots]: position minus row of the new rows."""
        self.lengths = torch.zeros_like(self.offsets)
        """int32 [slots]: rows taken."""
        shape = layers, slots, kv_heads, ROWS * target.layer_shapes[0].heads // kv_heads, head_dim
        self.queries = torch.zeros(shape, dtype=target.dtype, device=target.device)
        """Queries of each slot's last rows; heads that share keys lie side by side."""
        # Blocks beyond the cache are bounded too, and never chosen.
        shape = (layers, slots, kv_heads, total + self._spanned(_SLICE), head_dim)
        self._lowest, self._highest = (torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in range(2))

    @staticmethod
    def _spanned(rows: int) -> int:
        """Return the most blocks that a run of rows can touch."""
        return (rows + BLOCK - 2) // BLOCK + 1

    def keep_queries(self, queries: Tensor, had_pass: Tensor) -> None:
        """Keep the queries of last rows, [slots, `ROWS`, layers, heads * head_dim], of slots that ``had_pass``."""
        layers, slots, kv_heads, shared, head_dim = self.queries.shape
        split = queries.reshape(slots, ROWS, layers, kv_heads, shared // ROWS, head_dim)
        taken = split.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        self.queries.copy_(torch.where(had_pass[:, None, None, None], taken, self.queries))

    def bound(self, slots: Tensor, first: Tensor, num_rows: int) -> None:
        """Update bounds of the blocks of rows ``first`` [places] to ``first + num_rows - 1`` of ``slots`` [places]."""
        blocks = first.long()[:, None] // BLOCK + torch.arange(self._spanned(num_rows), device=first.device)
        rows = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=first.device)).flatten(1)
        slots = slots.long()[:, None]
        # [places, rows, layers, kv_heads, head_dim], as indices stand before and behind a slice.
        keys = self.keys[:, slots, :, rows.clamp(max=self.keys.shape[3] - 1)]
        keys = keys.unflatten(1, (-1, BLOCK))
        self._lowest[:, slots, :, blocks] = keys.amin(2)
        self._highest[:, slots, :, blocks] = keys.amax(2)

    def bound_slot(self, slot: Tensor) -> None:
        """Update the bounds of all blocks of a slot, int32 [1], in which a new sequence begins."""
        for first in range(0, self.keys.shape[3], _SLICE):
            self.bound(slot, torch.full_like(slot, first), _SLICE)

    def take(self, lengths: Tensor) -> None:
        """Gather the part for slots with ``lengths`` int32 [slots] committed rows."""
        slots, device = torch.arange(len(lengths), device=lengths.device), lengths.device
        self.bound(slots, (lengths - self.num_changed).clamp(min=0), self.num_changed)
        recent = (lengths.long() // BLOCK - RECENT).clamp(min=0)
        chosen = self._choose(recent)
        count = recent.clamp(max=self.num_blocks)[:, None]
        row = torch.arange(self.cache.capacity, device=device)
        in_block = chosen[..., (row // BLOCK).clamp(max=self.num_blocks - 1)] * BLOCK + row % BLOCK
        since = (row + (recent[:, None] - count) * BLOCK)[:, None]
        source = torch.where((row < count * BLOCK)[:, None], in_block, since).clamp(max=self.keys.shape[3] - 1)
        for whole, part in zip((self.keys, self.values), self.cache.stacks[0], strict=True):
            torch.gather(whole, 3, source[..., None].expand(*source.shape, whole.shape[4]), out=part)
        self.offsets.copy_((recent - count[:, 0]) * BLOCK)
        self.lengths.copy_(lengths - self.offsets)

    def _choose(self, recent: Tensor) -> Tensor:
        """Choose among the blocks before ``recent`` int64 [slots]: ascending, [layers, slots, kv_heads, blocks].

        Padded with the number of all blocks, which is no block.
        """
        total = -(-self.keys.shape[3] // BLOCK)
        lowest, highest = (bound[:, :, :, :total].transpose(3, 4) for bound in (self._lowest, self._highest))
        scores = (self.queries.clamp(min=0) @ highest + self.queries.clamp(max=0) @ lowest).amax(3).float()
        block = torch.arange(total, device=recent.device)
        there = (block < recent[:, None])[:, None]
        scores = torch.where(there, torch.where(block < SINKS, torch.inf, scores), -torch.inf)
        chosen = scores.topk(self.num_blocks, -1).indices
        return torch.where(chosen < recent[:, None, None], chosen, total).sort(-1).values
