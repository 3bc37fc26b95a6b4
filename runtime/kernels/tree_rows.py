"""What a forward needs to know of its rows: token, position, cache row and ancestors of every node, by place.

A place is one running sequence; place i is slot ``active_slots[i]``. Everything is read and written on the device, so
that a captured step follows lengths and slots as they change.

The tree of `eagle_slim.runtime.tree` at length 9 (root 0; A, B; C, D under A; E under B; G under C)::

    node          0   1    2    3     4     5     6
    parents      -1   0    0    1     1     2     3
    position      9  10   10   11    11    11    12
    cache row     9  10   11   12    13    14    15
    ancestors     1  11  101  1011 10011 100101 1001011     (bit m, from the right: m is the node or an ancestor)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree_attention import NODES_PER_WORD, AttentionRows


@dataclass(frozen=True)
class ForwardRows:
    """The rows of one forward, ``places`` times ``nodes`` of them.

    ``tokens``, ``positions``, ``kv_rows`` int32 [places * nodes]; an unused row has token 0, position 0 and KV row -1.
    """

    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    attention: AttentionRows

    @property
    def places(self) -> int:
        """Sequences side by side."""
        return len(self.attention.slots)

    @property
    def nodes(self) -> int:
        """Rows of each sequence."""
        return len(self.tokens) // self.places

    @classmethod
    def allocate(cls, places: int, nodes: int, lengths: Tensor, is_chunk: bool = False) -> ForwardRows:
        """Allocate for a tree (or a prompt's chunk); ``lengths`` int32 [slots] is shared."""
        device = lengths.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        words = -(-nodes // NODES_PER_WORD)
        ancestors = None if is_chunk else torch.zeros((places, nodes, words), dtype=torch.int64, device=device)
        attention = AttentionRows(ints(places), lengths, ints(places), ancestors, ints(places, nodes))
        return cls(ints(places * nodes), ints(places * nodes), ints(places * nodes), attention)


def tree_rows_ref(
    active_slots: Tensor,
    active_count: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    out: ForwardRows,
) -> None:
    """Lay out the nodes of the active slots' trees.

    ``active_slots`` int32 [slots], ``active_count`` int32 [1]; ``draft_tokens``, ``parents``, ``positions`` int64
    [slots, nodes] (`tree.DraftTree`), node 0 the root.
    """
    attention, places, nodes = out.attention, out.places, out.nodes
    assert attention.ancestors is not None
    for place in range(places):
        rows = slice(place * nodes, (place + 1) * nodes)
        is_active = place < int(active_count)
        slot = int(active_slots[place]) if is_active else -1
        attention.slots[place] = slot
        attention.counts[place] = nodes if is_active else 0
        out.tokens[rows], out.positions[rows], out.kv_rows[rows] = 0, 0, -1
        attention.ancestors[place], attention.depths[place] = 0, 0
        if not is_active:
            continue
        length = attention.lengths[slot]
        out.tokens[rows] = draft_tokens[slot].to(torch.int32)
        out.positions[rows] = (length + positions[slot]).to(torch.int32)
        out.kv_rows[rows] = length + torch.arange(nodes, dtype=torch.int32, device=length.device)
        attention.depths[place] = positions[slot].to(torch.int32)
        for node in range(nodes):
            ancestor = node
            while ancestor >= 0:
                attention.ancestors[place, node, ancestor // NODES_PER_WORD] |= _bit(ancestor % NODES_PER_WORD)
                ancestor = int(parents[slot, ancestor])


def _bit(position: int) -> int:
    """2 ** position as a signed 64-bit number."""
    return (1 << position) - (1 << 64 if position == 63 else 0)


@triton.jit
def _tree_rows_kernel(
    active_slot_ptr, active_count_ptr, length_ptr, token_ptr, parent_ptr, position_ptr,
    out_token_ptr, out_position_ptr, out_kv_row_ptr, slot_ptr, count_ptr, ancestor_ptr, depth_ptr,
    NODES: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    is_active = place < tl.load(active_count_ptr)
    slot = tl.maximum(tl.load(active_slot_ptr + place), 0).to(tl.int64)
    length = tl.load(length_ptr + slot)
    valid = node < tl.where(is_active, NODES, 0)
    at = slot * NODES + node
    token = tl.load(token_ptr + at, mask=valid, other=0)
    depth = tl.load(position_ptr + at, mask=valid, other=0).to(tl.int32)
    to = place * NODES + node
    tl.store(out_token_ptr + to, token.to(tl.int32), mask=inside)
    tl.store(out_position_ptr + to, tl.where(valid, length + depth, 0), mask=inside)
    tl.store(out_kv_row_ptr + to, tl.where(valid, length + node, -1), mask=inside)
    tl.store(depth_ptr + to, depth, mask=inside)
    tl.store(slot_ptr + place, tl.where(is_active, slot, -1).to(tl.int32))
    tl.store(count_ptr + place, tl.where(is_active, NODES, 0))
    low = tl.zeros((BLOCK,), tl.int64)
    high = tl.zeros((BLOCK,), tl.int64)
    one = tl.full((BLOCK,), 1, tl.int64)
    ancestor = tl.where(valid, node, -1)
    left = tl.max(depth) + 1
    while left > 0:
        bit = one << (tl.maximum(ancestor, 0) % 64).to(tl.int64)
        low |= tl.where((ancestor >= 0) & (ancestor < 64), bit, 0)
        high |= tl.where(ancestor >= 64, bit, 0)
        ancestor = tl.load(parent_ptr + slot * NODES + ancestor, mask=ancestor >= 0, other=-1).to(tl.int32)
        left -= 1
    tl.store(ancestor_ptr + to * WORDS, low, mask=inside)
    if WORDS == 2:
        tl.store(ancestor_ptr + to * WORDS + 1, high, mask=inside)


def tree_rows(
    active_slots: Tensor,
    active_count: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    out: ForwardRows,
) -> None:
    """Run `tree_rows_ref` as one launch, a program a place; at most 128 nodes."""
    attention = out.attention
    assert attention.ancestors is not None
    _tree_rows_kernel[(out.places,)](
        active_slots, active_count, attention.lengths, draft_tokens, parents, positions,
        out.tokens, out.positions, out.kv_rows, attention.slots, attention.counts, attention.ancestors,
        attention.depths, NODES=out.nodes, BLOCK=max(2, triton.next_power_of_2(out.nodes)),
        WORDS=attention.ancestors.shape[2], num_warps=1,
    )  # fmt: skip
