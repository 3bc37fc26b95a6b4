"""The frontier: the best candidates of a level become the nodes of the next one.

The definition is `eagle_slim.runtime.tree.ranked_topk`: the best ``top_k`` of a level's candidates by (fp32 score
descending, candidate index ascending). A node's *ancestor chain* names, for each earlier level, the tree slot of its
ancestor there: ``chain[n, e] = e * top_k + (the node of level e + 1 above n)``, the slots that it attends to
(`ancestor_attention`).

The worked example of `eagle_slim.runtime.tree`, top_k 2. The nodes of level 1 are A and B, with empty chains; its
candidates are C, D (A's children) and E, F (B's), numbers 2 to 5 of the tree. The best two are C (-1.5, of node 0) and
E (-1.75, of node 1): the frontier of level 2, with chains [0] and [1], as A lies in tree slot 0 and B in slot 1. If
there were a level 3, its nodes would be G (C's child) and I (E's), with chains [0, 2] and [1, 3].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .selection import LOWEST_KEY, count_greater, key_index, key_value
from .weight_stream import hidden_zero

MAX_DEPTH = 16
"""Columns of the ancestor chains: a power of two above the largest depth."""
CHAIN_COLUMNS = tl.constexpr(MAX_DEPTH)
ROWS = tl.constexpr(16)
"""Most rows of a sequence: new tokens of the extend pass, or nodes of a level."""


class Frontier(NamedTuple):
    """The nodes of a level, of one sequence or of all."""

    score: Any
    """fp32 [ROWS]: cumulative log-probability."""
    candidate: Any
    """int32 [ROWS]: candidate index in the tree."""
    parent: Any
    """int32 [ROWS]: node of the level before whose child it is."""
    child: Any
    """int32 [ROWS]: and which child."""


@triton.jit
def chain_at(chain_ptr, level, row, STRIDE: tl.constexpr):
    """Return the ancestor chains of a level's nodes, from a row on; two levels of STRIDE sequences take turns."""
    return chain_ptr + ((level % 2) * STRIDE * ROWS + row) * CHAIN_COLUMNS


@triton.jit
def choose_frontier(
    key_ptr,  # int64 [nodes, max_k]: children of this level's nodes of one sequence, by score and candidate
    num_nodes,
    first_candidate,  # candidate index of this level's first
    level,
    frontier,  # `Frontier` of this sequence, written
    chain_ptr,  # int32 [ROWS, MAX_DEPTH] of this level's nodes
    next_chain_ptr,  # of the next level's
    SELECT: tl.constexpr,  # `lm_topk.Selection`
):
    """Choose the best top_k candidates of a level as the next level's nodes, and extend their ancestor chains."""
    TOP_K: tl.constexpr = SELECT.top_k
    MAX_K: tl.constexpr = SELECT.max_k
    zero = hidden_zero()
    offs_k = tl.arange(0, MAX_K) + zero
    offs_e = tl.arange(0, CHAIN_COLUMNS) + zero
    place = tl.arange(0, SELECT.pairs) + zero
    num_keys = num_nodes * MAX_K
    key = tl.load(key_ptr + place, mask=place < num_keys, other=LOWEST_KEY)
    rank = count_greater(key, key_ptr, num_keys, 1, MAX_K)
    chosen = (key != LOWEST_KEY) & (rank < TOP_K)
    candidate = key_index(key)
    tl.store(frontier.score + rank, key_value(key), mask=chosen)
    tl.store(frontier.candidate + rank, first_candidate + candidate, mask=chosen)
    tl.store(frontier.parent + rank, candidate // TOP_K, mask=chosen)
    tl.store(frontier.child + rank, candidate % TOP_K, mask=chosen)
    tl.debug_barrier()
    mask_k = offs_k < TOP_K
    parent = tl.load(frontier.parent + offs_k, mask=mask_k, other=0)
    older = (offs_e < level - 1)[None, :] & mask_k[:, None]
    chain = tl.load(chain_ptr + parent[:, None] * CHAIN_COLUMNS + offs_e[None, :], mask=older, other=-1)
    chain = tl.where((offs_e == level - 1)[None, :], (level - 1) * TOP_K + parent[:, None], chain)
    tl.store(next_chain_ptr + offs_k[:, None] * CHAIN_COLUMNS + offs_e[None, :], chain, mask=mask_k[:, None])
