"""The kernel behind `drawn_verdicts`: it has the walk follow a path of a drawn length in the drafted tree."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_SLOT_STRIDE = 37
"""Slots begin that far apart in the table of lengths."""


def draw_paths_ref(
    choices: Tensor, draft_tokens: Tensor, parents: Tensor, positions: Tensor, active_slots: Tensor,
    active_count: Tensor, lengths: Tensor, turns: Tensor,
) -> None:  # fmt: skip
    """Have the walk follow a path of the next drawn length in the tree of every active slot.

    ``choices`` int32 [places, nodes]: the target's, overwritten along the path; ``draft_tokens``, ``parents``,
    ``positions`` int64 [slots, nodes]; ``active_slots`` int32 [slots], ``active_count`` int32 [1]; ``lengths`` int32
    [count]; ``turns`` int32 [slots]: lengths that a slot has taken. The path ends at the first of the nodes as deep as
    the drawn length allows: the drafted tokens and the target's own choice there, which stays unless it is a drafted
    child; then it becomes the smallest id that is none.
    """
    for place in range(min(choices.shape[0], int(active_count))):
        slot = int(active_slots[place])
        wanted = int(lengths[(int(turns[slot]) + slot * _SLOT_STRIDE) % len(lengths)])
        turns[slot] += 1
        tokens, up = draft_tokens[slot].tolist(), parents[slot].tolist()
        depths = [depth if depth < wanted else -1 for depth in positions[slot].tolist()]
        at = depths.index(max(depths))
        children = {token for token, parent in zip(tokens, up, strict=True) if parent == at}
        if int(choices[place, at]) in children:
            choices[place, at] = next(token for token in range(len(children) + 1) if token not in children)
        while up[at] >= 0:
            choices[place, up[at]] = tokens[at]
            at = up[at]


@triton.jit
def _draw_paths_kernel(
    choice_ptr, token_ptr, parent_ptr, position_ptr, stride_tree, active_slot_ptr, active_count_ptr, length_ptr,
    turn_ptr, NODES: tl.constexpr, BLOCK: tl.constexpr, LENGTHS: tl.constexpr, STRIDE: tl.constexpr,
    DEEPEST: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if place >= tl.load(active_count_ptr):
        return
    slot = tl.load(active_slot_ptr + place)
    turn = tl.load(turn_ptr + slot)
    tl.store(turn_ptr + slot, turn + 1)
    wanted = tl.load(length_ptr + (turn + slot * STRIDE) % LENGTHS)
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    tree = slot.to(tl.int64) * stride_tree + node
    token = tl.load(token_ptr + tree, mask=inside, other=-1).to(tl.int32)
    parent = tl.load(parent_ptr + tree, mask=inside, other=-2).to(tl.int32)
    depth = tl.load(position_ptr + tree, mask=inside, other=BLOCK).to(tl.int32)
    choice = tl.load(choice_ptr + place * NODES + node, mask=inside, other=-1)
    # Deepest first, then the lowest node.
    rank = tl.where(depth < wanted, depth * BLOCK + (BLOCK - 1 - node), -1)
    at = BLOCK - 1 - tl.max(rank) % BLOCK
    own = tl.sum(tl.where(node == at, choice, 0))
    is_child = parent == at
    taken = tl.sum((is_child[:, None] & (token[:, None] == node[None, :])).to(tl.int32), 0)
    free = tl.min(tl.where(taken == 0, node, BLOCK))
    is_drafted = tl.sum((is_child & (token == own)).to(tl.int32)) > 0
    choice = tl.where(node == at, tl.where(is_drafted, free, own), choice)
    for _ in tl.static_range(DEEPEST):
        above = tl.sum(tl.where(node == at, parent, 0))
        drafted = tl.sum(tl.where(node == at, token, 0))
        choice = tl.where(node == above, drafted, choice)
        at = tl.where(above >= 0, above, at)
    tl.store(choice_ptr + place * NODES + node, choice, mask=inside)


def draw_paths(
    choices: Tensor, draft_tokens: Tensor, parents: Tensor, positions: Tensor, active_slots: Tensor,
    active_count: Tensor, lengths: Tensor, turns: Tensor,
) -> None:  # fmt: skip
    """Run `draw_paths_ref` as one launch, a program a place; trees of at most 16 levels."""
    places, nodes = choices.shape
    _draw_paths_kernel[(places,)](
        choices, draft_tokens, parents, positions, draft_tokens.stride(0), active_slots, active_count, lengths, turns,
        NODES=nodes, BLOCK=max(16, triton.next_power_of_2(nodes)), LENGTHS=len(lengths), STRIDE=_SLOT_STRIDE,
        DEEPEST=15, num_warps=4,
    )  # fmt: skip
