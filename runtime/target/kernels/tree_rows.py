"""Token, position, cache row and ancestors of every row of a forward, by place.

A place is one running sequence; place i is slot ``active_slots[i]``. Everything is read and written on the device, so
that a captured step follows lengths and slots as they change.

The tree of `eagle_slim.runtime.tree` at length 9 (root 0; A, B; C, D under A; E under B; G under C)::

    node          0   1    2    3     4     5     6
    parents      -1   0    0    1     1     2     3
    position      9  10   10   11    11    11    12
    cache row     9  10   11   12    13    14    15
    path          0  01   02  013    014    025    0136     (the node's ancestor at each depth)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tree import Trees
from .attention import AttentionRows
from .attention_kernels import REACH


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
    def allocate(cls, places: int, nodes: int, lengths: Tensor, is_path: bool = False) -> ForwardRows:
        """Allocate for a tree; ``is_path``: for a chain or a prompt's chunk. ``lengths`` int32 [slots] is shared."""
        device = lengths.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        paths = None if is_path else ints(places, nodes, min(nodes, REACH + 1))
        attention = AttentionRows(ints(places), lengths, ints(places), paths, ints(places, nodes))
        return cls(ints(places * nodes), ints(places * nodes), ints(places * nodes), attention)


def tree_rows_ref(trees: Trees, out: ForwardRows) -> None:
    """Lay out the nodes of the active slots' trees."""
    attention, places, nodes = out.attention, out.places, out.nodes
    device = trees.active_slots.device
    is_active = torch.arange(places, device=device) < trees.active_count  # [places]
    slots = torch.where(is_active, trees.active_slots[:places], -1)
    tree = slots.clamp(min=0).long()
    length, depth = attention.lengths[tree][:, None], trees.positions[tree].to(torch.int32)
    node = torch.arange(nodes, dtype=torch.int32, device=device)
    active = is_active[:, None]
    attention.slots.copy_(slots)
    attention.counts.copy_(is_active * nodes)
    out.tokens.copy_(torch.where(active, trees.draft_tokens[tree], 0).flatten())
    out.positions.copy_(torch.where(active, length + depth, 0).flatten())
    out.kv_rows.copy_(torch.where(active, length + node, -1).flatten())
    depth = torch.where(active, depth, 0)
    attention.depths.copy_(depth)
    if attention.paths is None:
        return
    attention.paths.zero_()
    ancestor = torch.where(active, node, -1).long()  # [places, nodes]
    for up in range(int(depth.max()) + 1):
        at = (depth - up).clamp(min=0).long()[..., None]
        kept = torch.where(ancestor < 0, attention.paths.gather(2, at)[..., 0], ancestor.int())
        attention.paths.scatter_(2, at, kept[..., None])
        ancestor = torch.where(ancestor < 0, -1, trees.parents[tree].gather(1, ancestor.clamp(min=0)))


@triton.jit
def _tree_rows_kernel(
    trees,
    length_ptr,
    out_token_ptr,
    out_position_ptr,
    out_kv_row_ptr,
    slot_ptr,
    count_ptr,
    path_ptr,
    depth_ptr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    is_active = place < tl.load(trees.active_count)
    slot = tl.maximum(tl.load(trees.active_slots + place), 0).to(tl.int64)
    length = tl.load(length_ptr + slot)
    valid = node < tl.where(is_active, NODES, 0)
    at = slot * NODES + node
    token = tl.load(trees.draft_tokens + at, mask=valid, other=0)
    depth = tl.load(trees.positions + at, mask=valid, other=0).to(tl.int32)
    to = place * NODES + node
    tl.store(out_token_ptr + to, token.to(tl.int32), mask=inside)
    tl.store(out_position_ptr + to, tl.where(valid, length + depth, 0), mask=inside)
    tl.store(out_kv_row_ptr + to, tl.where(valid, length + node, -1), mask=inside)
    tl.store(depth_ptr + to, depth, mask=inside)
    tl.store(slot_ptr + place, tl.where(is_active, slot, -1).to(tl.int32))
    tl.store(count_ptr + place, tl.where(is_active, NODES, 0))
    if WIDTH > 0:
        ancestor = tl.where(valid, node, -1)
        at_depth = depth
        left = tl.max(depth) + 1
        while left > 0:
            tl.store(path_ptr + to * WIDTH + at_depth, ancestor, mask=(ancestor >= 0) & (at_depth < WIDTH))
            ancestor = tl.load(trees.parents + slot * NODES + ancestor, mask=ancestor >= 0, other=-1).to(tl.int32)
            at_depth -= 1
            left -= 1


def tree_rows(trees: Trees, out: ForwardRows) -> None:
    """Run `tree_rows_ref` as one launch, a program a place."""
    slots, lengths, counts, paths, depths = out.attention
    to = slots, counts, depths if paths is None else paths, depths
    given = trees, lengths, out.tokens, out.positions, out.kv_rows, *to
    block, width = max(2, triton.next_power_of_2(out.nodes)), 0 if paths is None else paths.shape[2]
    _tree_rows_kernel[(out.places,)](*given, NODES=out.nodes, BLOCK=block, WIDTH=width, num_warps=1)
