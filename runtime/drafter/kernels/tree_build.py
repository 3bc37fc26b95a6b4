"""Tree build on the device: all drafted candidates in, the draft tree in its fixed shapes out; one program a sequence.

The definition is `eagle_slim.runtime.tree.build_tree` (its docstring has the worked example): the best
``total_tokens - 1`` candidates by (fp32 score descending, candidate index ascending), in candidate order, below the
root. A chosen candidate's parent is always chosen, so a parent's node index is found by a table from candidate to node.

Limits: total_tokens <= 128, candidates <= 4096.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...settings import TreeConfig
from .selection import best_k_mask
from .weight_stream import hidden_zero


@dataclass(frozen=True)
class TreeBounds:
    """Most candidates and nodes of a sequence, powers of two: trees of like size share a compiled kernel."""

    candidates: int
    total: int
    """Nodes, the root included; at least 16."""
    width: int
    """Longest path."""

    @classmethod
    def of(cls, tree: TreeConfig) -> TreeBounds:
        """Return the bounds of a tree."""
        sizes = tree.num_candidates, max(16, tree.total_tokens), tree.path_width
        return cls(*(triton.next_power_of_2(size) for size in sizes))


class TreeSize(NamedTuple):
    """Shape of the trees of one launch, within a `TreeBounds`."""

    candidates: Any
    total: Any
    """Nodes, the root included."""
    width: Any
    """Columns of the retrieve rows: the longest path."""


class TreeCandidates(NamedTuple):
    """Everything drafted for one sequence, by candidate index."""

    token: Any
    """int32 [candidates]."""
    score: Any
    """fp32 [candidates]."""
    parent: Any
    """int32 [candidates]: candidate index, -1 for the root's children."""
    node_of: Any
    """int32 [candidates]: scratch, node of each chosen candidate."""
    chosen: Any
    """int32 [total]: scratch, candidate of each node."""


class TreeOutputs(NamedTuple):
    """The fields of `eagle_slim.runtime.tree.DraftTree`, by slot; nodes and width are those of `TreeSize`."""

    draft_tokens: Any
    parents: Any
    tree_mask: Any
    positions: Any
    retrieve: Any
    num_leaves: Any


@triton.jit
def build_tree(drafted, root_token, slot, out, size, SHAPE: tl.constexpr):
    """Choose the nodes of one sequence, `TreeCandidates`, and write every output of its slot, `TreeOutputs`.

    ``size``: `TreeSize`.
    """
    BLOCK_C: tl.constexpr = SHAPE.candidates
    BLOCK_T: tl.constexpr = SHAPE.total
    BLOCK_W: tl.constexpr = SHAPE.width
    zero = hidden_zero()
    offs_c = tl.arange(0, BLOCK_C) + zero
    real = offs_c < size.candidates
    score = tl.load(drafted.score + offs_c, mask=real, other=float("-inf"))
    chosen = best_k_mask(score, real, size.total - 1)
    node = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(drafted.node_of + offs_c, node, mask=chosen)
    tl.store(drafted.chosen + node, offs_c, mask=chosen)
    tl.debug_barrier()

    offs_t = tl.arange(0, BLOCK_T) + zero
    mask_t = offs_t < size.total
    below_root = mask_t & (offs_t > 0)
    candidate = tl.load(drafted.chosen + offs_t, mask=below_root, other=0)
    token = tl.load(drafted.token + candidate, mask=below_root, other=0)
    parent_candidate = tl.load(drafted.parent + candidate, mask=below_root, other=-1)
    parent = tl.load(drafted.node_of + parent_candidate, mask=below_root & (parent_candidate >= 0), other=0)
    parent = tl.where(below_root, parent, -1)
    row = slot.to(tl.int64) * size.total
    tl.store(out.draft_tokens + row + offs_t, tl.where(below_root, token, root_token).to(tl.int64), mask=mask_t)
    tl.store(out.parents + row + offs_t, parent.to(tl.int64), mask=mask_t)
    tl.debug_barrier()

    # Walk all nodes to the root together: each step marks one more ancestor.
    offs_w = tl.arange(0, BLOCK_W)
    depth = tl.zeros([BLOCK_T], tl.int32)
    current = tl.where(mask_t, offs_t, -1)
    marks = tl.zeros([BLOCK_T, BLOCK_T], tl.int32)
    for _ in range(size.width):
        marks = marks | (offs_t[None, :] == current[:, None]).to(tl.int32)
        above = tl.load(out.parents + row + current, mask=current >= 0, other=-1).to(tl.int32)
        depth += (above >= 0).to(tl.int32)
        current = above
    mask_tt = mask_t[:, None] & mask_t[None, :]
    mask_offs = (row + offs_t[:, None]) * size.total + offs_t[None, :]
    tl.store(out.tree_mask + mask_offs, marks != 0, mask=mask_tt)
    tl.store(out.positions + row + offs_t, depth.to(tl.int64), mask=mask_t)

    is_parent = tl.sum(((parent[:, None] == offs_t[None, :]) & mask_t[:, None]).to(tl.int32), axis=0) > 0
    is_leaf = mask_t & (is_parent == 0)
    leaf_row = tl.cumsum(is_leaf.to(tl.int32), axis=0) - 1
    num_leaves = tl.sum(is_leaf.to(tl.int32), axis=0)
    tl.store(out.num_leaves + slot, num_leaves.to(tl.int64))
    mask_tw = mask_t[:, None] & (offs_w < size.width)[None, :]
    blank = tl.full([BLOCK_T, BLOCK_W], -1, tl.int64)
    unused = mask_tw & (offs_t >= num_leaves)[:, None]
    tl.store(out.retrieve + (row + offs_t[:, None]) * size.width + offs_w[None, :], blank, mask=unused)
    path = tl.full([BLOCK_T, BLOCK_W], -1, tl.int32)
    current = tl.where(mask_t, offs_t, -1)
    for step in range(size.width):
        here = (offs_w[None, :] == (depth - step)[:, None]) & (current >= 0)[:, None]
        path = tl.where(here, current[:, None], path)
        current = tl.load(out.parents + row + current, mask=current >= 0, other=-1).to(tl.int32)
    leaf_offs = (row + leaf_row[:, None]) * size.width + offs_w[None, :]
    tl.store(out.retrieve + leaf_offs, path.to(tl.int64), mask=mask_tw & is_leaf[:, None])


@triton.jit
def blank_tree(slot, out, size, SHAPE: tl.constexpr):
    """Write an inactive slot's outputs: -1 for tokens, parents and paths, 0 for the rest."""
    BLOCK_T: tl.constexpr = SHAPE.total
    BLOCK_W: tl.constexpr = SHAPE.width
    offs_t = tl.arange(0, BLOCK_T)
    offs_w = tl.arange(0, BLOCK_W)
    mask_t = offs_t < size.total
    row = slot.to(tl.int64) * size.total
    minus = tl.full([BLOCK_T], -1, tl.int64)
    tl.store(out.draft_tokens + row + offs_t, minus, mask=mask_t)
    tl.store(out.parents + row + offs_t, minus, mask=mask_t)
    tl.store(out.positions + row + offs_t, minus + 1, mask=mask_t)
    mask_tt = mask_t[:, None] & mask_t[None, :]
    none = tl.zeros([BLOCK_T, BLOCK_T], tl.int32) != 0
    tl.store(out.tree_mask + (row + offs_t[:, None]) * size.total + offs_t[None, :], none, mask=mask_tt)
    mask_tw = mask_t[:, None] & (offs_w < size.width)[None, :]
    blank = tl.full([BLOCK_T, BLOCK_W], -1, tl.int64)
    tl.store(out.retrieve + (row + offs_t[:, None]) * size.width + offs_w[None, :], blank, mask=mask_tw)
    tl.store(out.num_leaves + slot, tl.zeros([], tl.int64))
