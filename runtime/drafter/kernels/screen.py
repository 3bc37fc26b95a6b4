"""The LM head behind a screen: the best few rows of each group by a screened score, scored exactly, in one phase.

    y[n] = factor[n] * (x[n] @ B.T)                                     a phase before: `screen_states`
    rows[n, g] = the best ``per_group`` of ``y[n] @ A.T`` among rows g, g + groups, g + 2 * groups ...
    logits[n, g] = x[n] @ W[rows[n, g]].T

`drafter.screen` has the mathematics, and `best_of_groups` the rule. A group's rows lie with one program, so that it
chooses its candidates alone and scores them in place; a program may have several groups. Each group leaves a list of
its own (`lm_topk.Lists`), and so does the merge see the same lists whatever the grid is.

Screened rows go through `lm_topk.stream_topk`, candidates through a product of gathered rows: all candidates of a
sequence's nodes by all of these nodes, of which the diagonal is used. Bytes moved: A once, and the rows of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .lm_topk import SELECT_ROWS, HeadRows, HeadTiles, Lists, Selection, lists_at, stream_topk
from .selection import LOWEST_KEY, key_index, order_key
from .weight_stream import (
    Operand,
    Tile,
    hidden_zero,
    operand_dot,
    operand_mask,
    operand_rows,
    operand_sum,
    store_activation,
    stream_matmul,
)


@dataclass(frozen=True)
class ScreenShape:
    """A screen, and how its rows are read; ``rank`` 0 for none."""

    rank: int
    groups: int
    choice: Selection
    """Of the candidates of a group."""
    rows: HeadTiles
    """A group's rows of A."""
    exact: Tile
    """Candidates of 16 nodes times the columns of a step."""
    down: Tile
    """The same of B's rows of one program."""
    hidden: int

    @property
    def places(self) -> int:
        """Candidates that a list of a group has places for."""
        return self.choice.max_k

    @property
    def group_size(self) -> int:
        """Elements of a group's rows in a program's stream."""
        return self.rows.owned * self.rank


class ScreenTensors(NamedTuple):
    """What is read of a screen and behind it, beside A, which is in the streams."""

    down: Any
    """B, [rank, hidden]."""
    down_scale: Any
    """fp32 [rank], read when scaled."""
    weight: Any
    """The LM head, [draft_vocab, hidden], of which candidates are gathered."""
    scale: Any
    """fp32 [draft_vocab], read when scaled."""
    ids: Any
    """int32 [draft_vocab]: target id of each row."""
    numbers: Any
    """int32 [groups, rows of a group]: the row that each of a group's is."""


@triton.jit
def screen_states(x_ptr, factor, mask_m, screen, y_ptr, PROGRAMS: tl.constexpr, SCREEN: tl.constexpr):
    """Write this program's columns of the screen's states: ``x_ptr`` [block_m, hidden] to ``y_ptr`` [block_m, rank].

    ``factor`` fp32 [block_m] multiplies each row.
    """
    RANK: tl.constexpr = SCREEN.rank
    HIDDEN: tl.constexpr = SCREEN.hidden
    TILE: tl.constexpr = SCREEN.down
    OWNED: tl.constexpr = (RANK + PROGRAMS - 1) // PROGRAMS
    zero = hidden_zero()
    offs_m = (tl.arange(0, mask_m.shape[0]) + zero).to(tl.int64)
    offs_n = tl.arange(0, TILE.block_n) + zero
    first = tl.program_id(0) * OWNED
    stop = tl.minimum(first + OWNED, RANK)
    for n0 in tl.range(first, stop, TILE.block_n, disable_licm=True):
        x = Operand(x_ptr, offs_m * HIDDEN, offs_m, mask_m, 1, HIDDEN)
        acc = stream_matmul(x, screen.down + n0 * HIDDEN, stop - n0, 0, 0, 1 + zero, False, HIDDEN, TILE)
        column = n0 + offs_n
        mine = column < stop
        if SCREEN.rows.scaled:
            acc *= tl.load(screen.down_scale + column, mask=mine, other=0.0)[:, None]
        acc *= factor[None, :]
        mask = mine[:, None] & mask_m[None, :]
        store_activation(y_ptr, offs_m[None, :], column[:, None], acc, mask, RANK)


@triton.jit
def gather_matmul(x_ptr, x_row, mask_m, screen, number, in_use, HIDDEN: tl.constexpr, TILE: tl.constexpr):
    """fp32 [pairs, rows of x]: rows ``number`` int64 [pairs] of the LM head times rows of x, where they are in use."""
    BLOCK_K: tl.constexpr = TILE.block_k
    offs_k = tl.arange(0, BLOCK_K) + hidden_zero()
    mask_x = operand_mask(x_ptr, mask_m)
    columns = operand_rows(x_ptr, x_row, HIDDEN)
    acc = tl.zeros([number.shape[0], mask_x.shape[0]], tl.float32)
    for k in tl.range(0, HIDDEN // BLOCK_K + hidden_zero(), num_stages=TILE.stages):
        w_offs = number[:, None] * HIDDEN + (k * BLOCK_K + offs_k)[None, :]
        w = tl.load(screen.weight + w_offs, mask=in_use[:, None], other=0.0)
        x = tl.load(x_ptr + columns[None, :] + (k * BLOCK_K + offs_k)[:, None], mask=mask_x[None, :], other=0.0)
        acc = operand_dot(w, x, acc)
    return operand_sum(x_ptr, acc)


@triton.jit
def store_candidates(logits, ids, real, row, in_use, lists, PLACES: tl.constexpr, MAX_K: tl.constexpr):
    """Write one group's list of each node: ``logits``, ``ids`` and ``real`` [nodes * PLACES], ``row`` [nodes]."""
    NODES: tl.constexpr = row.shape[0]
    keys = tl.reshape(tl.where(real, order_key(logits, ids), LOWEST_KEY), [NODES, PLACES])
    logits = tl.reshape(tl.where(real, logits, float("-inf")), [NODES, PLACES])
    top = tl.max(logits, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(lists.maxima + row, top, mask=in_use)
    tl.store(lists.sums + row, tl.sum(tl.exp(logits - shift[:, None]), axis=1), mask=in_use)
    place = tl.arange(0, PLACES)
    # Of equal keys, which are those of places without a candidate, the first comes first.
    ahead = keys[:, None, :] > keys[:, :, None]
    ahead |= (keys[:, None, :] == keys[:, :, None]) & (place[None, None, :] < place[None, :, None])
    rank = tl.sum(ahead.to(tl.int32), axis=2)
    list_ptr = lists.keys + row[:, None] * MAX_K
    tl.store(list_ptr + rank, keys, mask=in_use[:, None] & (rank < MAX_K))
    if MAX_K > PLACES:
        rest = tl.arange(0, MAX_K)[None, :] + row[:, None] * 0
        empty = tl.full([NODES, MAX_K], LOWEST_KEY, tl.int64)
        tl.store(list_ptr + rest, empty, mask=in_use[:, None] & (rest >= PLACES))


@triton.jit
def score_candidates(
    x_ptr, row_scale, nodes, screen, choice_ptr, lists, SELECT: tl.constexpr, SCREEN: tl.constexpr
):  # fmt: skip
    """Score one group's candidates ``choice_ptr`` [block_m, places] of all nodes in use, into the group's list."""
    PLACES: tl.constexpr = SCREEN.places
    HIDDEN: tl.constexpr = SCREEN.hidden
    TILE: tl.constexpr = SCREEN.exact
    zero = hidden_zero()
    pair = tl.arange(0, TILE.block_n) + zero
    offs_m = tl.arange(0, SELECT.block_m) + zero
    node = tl.arange(0, SELECT_ROWS) + zero
    for index in tl.range(0, nodes.groups, disable_licm=True):
        first = (index + zero) * SELECT_ROWS
        in_use = node < nodes.rows
        pair_node = pair // PLACES
        key = tl.load(choice_ptr + first * PLACES + pair, mask=pair_node < nodes.rows, other=LOWEST_KEY)
        real = key != LOWEST_KEY
        number = tl.where(real, key_index(key), 0).to(tl.int64)
        row = (first + node).to(tl.int64)
        products = gather_matmul(x_ptr, row * HIDDEN, in_use, screen, number, real, HIDDEN, TILE)
        logits = tl.sum(tl.where(pair_node[:, None] == node[None, :], products, 0.0), axis=1)
        if SCREEN.rows.scaled:
            logits *= tl.load(screen.scale + number, mask=real, other=0.0)
        own = offs_m[None, :] == (first + pair_node)[:, None]
        logits *= tl.sum(tl.where(own, row_scale[None, :], 0.0), axis=1)
        ids = tl.load(screen.ids + number, mask=real, other=0)
        store_candidates(logits, ids, real, first + node, in_use, lists, PLACES, SELECT.max_k)


@triton.jit
def screen_topk(
    y_ptr,  # [block_m, rank]: the screen's states
    x_ptr,  # [block_m, hidden]: the LM head's
    row_scale,  # fp32 [block_m]: multiplies each row's logits (the folded RMSNorm); y is multiplied already
    mask_m,  # int1 [block_m]: rows in use
    nodes,  # `lm_topk.Nodes`: the same, counted
    stream_ptr,  # this program's rows of A, its groups one after the other
    scale_ptr,  # fp32 [groups of this program, rows of a group], read when scaled
    num_rows,  # of the LM head
    screen,  # `ScreenTensors`
    scratch_ptr,  # fp32 [block_m, block_n], this program's
    choice_ptr,  # int64 [block_m, places], this program's
    lists,  # `Lists` of all groups
    PROGRAMS: tl.constexpr,
    SELECT: tl.constexpr,  # `Selection`
    SCREEN: tl.constexpr,  # `ScreenShape`
):
    """Fill the lists of this program's groups for every node in use; a group without rows has empty lists."""
    ROWS: tl.constexpr = SCREEN.rows
    CHOICE: tl.constexpr = SCREEN.choice
    GROUPS: tl.constexpr = SCREEN.groups
    zero = hidden_zero()
    own_row = (tl.arange(0, SELECT.block_m) + zero).to(tl.int64)
    ones = tl.full([SELECT.block_m], 1.0, tl.float32)
    for index in tl.range(tl.program_id(0), GROUPS, PROGRAMS, disable_licm=True):
        group = index + zero
        unit = group // PROGRAMS
        own = lists_at(lists, group.to(tl.int64) * SELECT.block_m, SELECT)
        head = HeadRows(
            stream_ptr + unit * SCREEN.group_size, scale_ptr + unit * ROWS.owned, screen.numbers + group * ROWS.owned,
            (num_rows - group + GROUPS - 1) // GROUPS,
        )  # fmt: skip
        # Maxima and sums are those of candidates in the end.
        chosen = Lists(choice_ptr, own.maxima, own.sums)
        stream_topk(
            y_ptr, ones, own_row * SCREEN.rank, mask_m, nodes, head, scratch_ptr, chosen, CHOICE, ROWS
        )  # fmt: skip
        tl.debug_barrier()
        score_candidates(x_ptr, row_scale, nodes, screen, choice_ptr, own, SELECT, SCREEN)
        tl.debug_barrier()
