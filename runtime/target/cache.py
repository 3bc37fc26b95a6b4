"""Key and value storage by slot: append at each sequence's own length, then keep only the accepted path.

One buffer per layer, [slots, kv_heads, capacity, head_dim], allocated once for a call. A sequence's committed rows are
0 .. length - 1; a tree's rows are written behind them, in node order, and `commit_path` moves the accepted ones down:

    committed   tree rows                       accepted path: nodes 0, 2, 5
    [c c c c]   [n0 n1 n2 n3 n4 n5 n6]    ->    [c c c c n0 n2 n5] and three more committed rows

Nothing is ever computed twice, and what lies behind the committed rows is never read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..slots import ActiveSlots


class SlotRows:
    """Keys and values of one layer for all slots."""

    def __init__(self, num_slots: int, capacity: int, like_key: Tensor, like_value: Tensor) -> None:
        # Zeros, not empty: rows beyond a sequence's end are masked, and 0 * NaN would still spoil the weighted sum.
        self.keys = like_key.new_zeros((num_slots, like_key.shape[1], capacity, like_key.shape[3]))
        self.values = like_value.new_zeros((num_slots, like_value.shape[1], capacity, like_value.shape[3]))

    @classmethod
    def over(cls, keys: Tensor, values: Tensor) -> SlotRows:
        """Use buffers that exist: twice [slots, kv_heads, capacity, head_dim]."""
        rows = cls.__new__(cls)
        rows.keys, rows.values = keys, values
        return rows

    def write_(self, active: ActiveSlots, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys``/``values`` [active, kv_heads, new, head_dim] at ``rows`` int64 [active, new]."""
        slots = active.active_slots[: active.num_active, None]
        self.keys[slots, :, rows] = keys.transpose(1, 2)
        self.values[slots, :, rows] = values.transpose(1, 2)

    def read(self, active: ActiveSlots, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` rows of the active slots: twice [active, kv_heads, length, head_dim]."""
        return active.gather(self.keys[:, :, :length]), active.gather(self.values[:, :, :length])

    def move_(self, active: ActiveSlots, source: Tensor, destination: Tensor) -> None:
        """Copy rows ``source`` to ``destination``, both int64 [active, moved]; sources are read before any write."""
        slots = active.active_slots[: active.num_active, None]
        for buffer in (self.keys, self.values):
            buffer[slots, :, destination] = buffer[slots, :, source]


class SlotCache(Cache):  # type: ignore[misc]  # transformers carries no types
    """The target's KV cache, in the form transformers' attention layers call: ``update`` writes where `begin` said.

    ``capacity``: rows per slot, tree rows included; the caller never commits more than fits (`generate` sizes it).
    """

    def __init__(self, num_slots: int, capacity: int, device: torch.device | str) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity = capacity
        self.device = torch.device(device)
        self.lengths = [0] * num_slots
        self._rows: dict[int, SlotRows] = {}
        self._active: ActiveSlots | None = None
        self._new_rows: Tensor | None = None
        self._read_length = 0

    def begin(self, active: ActiveSlots, num_new: int) -> None:
        """Announce a forward of ``num_new`` positions for the active slots, behind their committed rows."""
        self._active = active
        self._new_rows = self.length_tensor(active)[:, None] + torch.arange(num_new, device=self.device)
        self._read_length = max(self.lengths[slot] for slot in active.indices) + num_new
        assert self._read_length <= self.capacity, (self._read_length, self.capacity)

    def length_tensor(self, active: ActiveSlots) -> Tensor:
        """Committed rows of the active slots: int64 [active]."""
        return torch.tensor([self.lengths[slot] for slot in active.indices], dtype=torch.int64, device=self.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [active, kv_heads, new, head_dim] of a layer; return all its rows up to the longest slot."""
        assert self._active is not None, "begin() announces every forward"
        assert self._new_rows is not None
        if layer_idx not in self._rows:
            self._rows[layer_idx] = SlotRows(self.num_slots, self.capacity, key_states, value_states)
        rows = self._rows[layer_idx]
        rows.write_(self._active, self._new_rows, key_states, value_states)
        return rows.read(self._active, self._read_length)

    def commit(self, slot: int, num_new: int) -> None:
        """Keep the last forward's first ``num_new`` rows of a slot (a prompt's chunk)."""
        self.lengths[slot] += num_new

    def commit_path(self, active: ActiveSlots, path_nodes: Tensor, num_nodes: list[int]) -> None:
        """Keep an accepted path per slot and forget the rest of the tree.

        ``path_nodes``: int64 [active, width], nodes from the root on, padded with -1; ``num_nodes``: how many of each.
        """
        start = self.length_tensor(active)[:, None]
        destination = start + torch.arange(path_nodes.shape[1], device=self.device)
        source = torch.where(path_nodes < 0, destination, start + path_nodes)
        for rows in self._rows.values():
            rows.move_(active, source, destination)
        for slot, count in zip(active.indices, num_nodes, strict=True):
            self.lengths[slot] += count

    def reset_slot(self, slot: int, num_rows: int = 0) -> None:
        """Forget a slot's sequence, but for its first ``num_rows`` committed rows."""
        self.lengths[slot] = num_rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed sequence, as transformers asks for it."""
        return max(self.lengths)
