"""Attention of a forward's rows as kernels: what a row gets depends on its own position and keys alone.

Nothing is cut by how long a sequence happens to be. A row at position p sees the keys up to `tail_start` (p) in its
main part and those from there to itself in its tail, one block of `BLOCK` keys:

    main    0 .. tail_start(p) - 1: all committed, whoever asks, as a tree is at most `REACH` deep. Cut at absolute
            places into splits (`split_start`), each a chain of blocks with a running maximum
    tail    tail_start(p) .. p: gathered by position, from the committed rows or from the row's ancestors

Splits are merged in order, then the tail. So a program may leave the state of a split, or go on through all of them. A
block that is masked for a row changes no bit of its state, so rows of other positions may share a tile. Probabilities
are summed as integers (2^23 of each), so that no sum has an order.

Tails need nothing of the main parts, so the second kernel computes them while the first still runs: that one lets it
begin once the kernel before both, which leaves queries, keys and values, has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .machine import let_next_begin, wait_for_previous

BLOCK = 64
"""Keys of a block."""
REACH = 32
"""Deepest node of a tree that branches: keys farther back than that are committed."""
_BLOCK, _REACH = tl.constexpr(BLOCK), tl.constexpr(REACH)
_TAIL = tl.constexpr(BLOCK - REACH)  # what tails begin at whole multiples of
_NONE = tl.constexpr(-1.0e20)
_MASKED = tl.constexpr(-1.0e35)  # a score whose weight is 0 in a state that has seen nothing, too
_FAR = tl.constexpr(1 << 30)
_ALL_ONES = tl.constexpr(0x4B000000 * BLOCK % (1 << 32) - (1 << 32))  # the bits of 2^23, BLOCK times
TAIL_ROWS = 16
"""Query rows of a tail's program."""
MAIN_ROWS = 64
"""Query rows of a main part's program."""


class AttentionNumbers(NamedTuple):
    """Numbers of a layer, and distances in elements: of queries' rows, and of slots and heads in the cache."""

    scale: float
    softcap: float
    window: int
    stride_query: int
    stride_slot: int
    stride_head: int


class QueryRows(NamedTuple):
    """A program's query rows: nodes, heads, whether they are in use, positions, starts of tails, and first keys."""

    node: Any
    head: Any
    in_use: Any
    position: Any
    tail: Any
    first_key: Any


@dataclass(frozen=True)
class AttentionShape:
    """Constants of the kernels; ``block_d``: ``head_dim`` to a power of two; ``is_path``: no branches."""

    group: int
    kv_heads: int
    head_dim: int
    block_d: int
    is_path: bool
    has_window: bool
    is_capped: bool
    precision: str
    lift: float


@triton.jit
def tail_start(position):
    """Return the first key of a position's tail."""
    return tl.maximum(position - _REACH, 0) // _TAIL * _TAIL


@triton.jit
def split_start(split):
    """Return the first key of a split.

    Splits have 128 keys up to 512, 256 up to 1,024, 512 up to 4,096, 1,024 up to 32,768, then 4,096: few where the
    prefix is long, as states are written and read; many where it is short, as they are done side by side.
    """
    more = 128 * tl.maximum(split - 4, 0) + 256 * tl.maximum(split - 6, 0) + 512 * tl.maximum(split - 12, 0)
    return 128 * split + more + 3072 * tl.maximum(split - 40, 0)


@triton.jit
def split_of(key):
    """Return the split that a key is in."""
    first = tl.minimum(key, 512) // 128 + tl.minimum(tl.maximum(key - 512, 0), 512) // 256
    more = tl.minimum(tl.maximum(key - 1024, 0), 3072) // 512 + tl.minimum(tl.maximum(key - 4096, 0), 28672) // 1024
    return first + more + tl.maximum(key - 32768, 0) // 4096


@triton.jit
def _first_state(length, numbers, SHAPE: tl.constexpr):
    """Return the first split that rows of a place may have a state of."""
    if SHAPE.has_window:
        return split_of(tl.maximum(length - numbers.window + 1, 0))
    else:
        return 0


@triton.jit
def _scores(q, key, numbers, SHAPE: tl.constexpr):
    """Return scores, and the factor that makes them powers of two."""
    score = tl.dot(q, tl.trans(key), input_precision=SHAPE.precision)
    unit = numbers.scale * 1.4426950408889634
    if SHAPE.is_capped:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        cap = numbers.softcap * 1.4426950408889634
        score = cap - 2.0 * cap / (tl.exp2(score * unit * (2.0 / numbers.softcap)) + 1.0)
        unit = 1.0
    return score, unit


@triton.jit
def _unseeing(ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """Return the state of rows that have seen nothing: largest score, sum, and weighted values."""
    BLOCK_D: tl.constexpr = SHAPE.block_d
    return tl.full([ROWS], _NONE, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def _see(state, score, unit, value, SHAPE: tl.constexpr):
    """Go on with a state through a block: ``score`` [rows, BLOCK], `_MASKED` if unseen; ``value`` [BLOCK, block_d]."""
    best, total, acc = state
    new_best = tl.maximum(best, tl.max(score, 1) * unit)
    decay = tl.exp2(best - new_best)
    units = tl.full(score.shape, 1.0, tl.float32) * unit
    weight = tl.exp2(tl.fma(score, units, tl.broadcast_to(-new_best[:, None], score.shape)))
    # From 2^23 to 2^24 floats are whole numbers, and their bits count up with them.
    scale = tl.full(weight.shape, 8388608.0, tl.float32)
    bits = tl.fma(weight, scale, scale).to(tl.int32, bitcast=True)
    counted = tl.sum(bits, 1) - _ALL_ONES  # both modulo 2^32
    total = tl.fma(total, decay, counted.to(tl.float32))
    acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision=SHAPE.precision)
    return new_best, total, acc


@triton.jit
def _merge(first, second):
    """Merge the states of two runs of keys, the earlier one first."""
    best, total, acc = first
    best_2, total_2, acc_2 = second
    new_best = tl.maximum(best, best_2)
    one, two = tl.exp2(best - new_best), tl.exp2(best_2 - new_best)
    total = tl.fma(total, one, total_2 * two)
    acc = tl.fma(acc, tl.broadcast_to(one[:, None], acc.shape), acc_2 * two[:, None])
    return new_best, total, acc


@triton.jit
def _first_key(position, numbers, SHAPE: tl.constexpr):
    """Return the first key that a position's window leaves it."""
    if SHAPE.has_window:
        return tl.maximum(position - numbers.window + 1, 0)
    else:
        return tl.zeros_like(position)


@triton.jit
def _positions(rows, place, node, in_use, length, nodes, SHAPE: tl.constexpr):
    """Load the positions of rows in their sequence."""
    if SHAPE.is_path:
        return length + node
    else:
        return length + tl.load(rows.depths + place * nodes + node, mask=in_use, other=0)


@triton.jit
def _queries(q_ptr, place, queries, nodes, numbers, SHAPE: tl.constexpr):
    d = tl.arange(0, SHAPE.block_d)
    at = (place * nodes + queries.node)[:, None] * numbers.stride_query
    at = at + (queries.head * SHAPE.head_dim)[:, None] + d[None, :]
    mask = queries.in_use[:, None] & (d < SHAPE.head_dim)[None, :]
    return tl.load(q_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _see_blocks(
    state,
    q,
    key_at,
    value_at,
    start,
    stop,
    queries,
    numbers,
    blocks_ptr,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKS: tl.constexpr,
):
    """Go on with a state from key ``start`` to ``stop``; without MASKS every row sees all of them."""
    in_head = (tl.arange(0, SHAPE.block_d) < SHAPE.head_dim)[None, :]
    for at in tl.range(start, stop, _BLOCK, num_stages=STAGES):
        k = at + tl.arange(0, _BLOCK)
        # Rows behind the longest tail may not be committed.
        there = in_head
        if MASKS:
            there = in_head & (k < stop)[:, None]
        key = tl.load(key_at + at * SHAPE.head_dim, mask=there, other=0.0)
        value = tl.load(value_at + at * SHAPE.head_dim, mask=there, other=0.0)
        score, unit = _scores(q, key, numbers, SHAPE)
        if MASKS:
            seen = (k[None, :] < queries.tail[:, None]) & (k[None, :] >= queries.first_key[:, None])
            score = tl.where(seen, score, _MASKED)
        state = _see(state, score, unit, value, SHAPE)
        if blocks_ptr is not None:
            tl.atomic_add(blocks_ptr, 1)
    return state


@triton.jit
def _split_state(
    q, key_at, value_at, split, queries, common, numbers, blocks_ptr, SHAPE: tl.constexpr, STAGES: tl.constexpr
):
    """Compute the state of rows over one split: each row sees its keys from its first one to before its tail.

    All rows see those before ``common``, whole blocks of them.
    """
    # A row that is not in use has no tail, and no first key.
    start = tl.maximum(split_start(split), tl.min(queries.first_key, 0) // _BLOCK * _BLOCK)
    stop = tl.minimum(split_start(split + 1), tl.max(queries.tail, 0))
    state = _unseeing(q.shape[0], SHAPE)
    middle = tl.minimum(stop, common)
    if not SHAPE.has_window:
        state = _see_blocks(
            state, q, key_at, value_at, start, middle, queries, numbers, blocks_ptr, SHAPE, STAGES, False
        )
        start = tl.maximum(start, middle)
    return _see_blocks(state, q, key_at, value_at, start, stop, queries, numbers, blocks_ptr, SHAPE, STAGES, True)


@triton.jit
def _put_state(scratch, part, queries, state, nodes, SHAPE: tl.constexpr):
    best, total, acc = state
    d = tl.arange(0, SHAPE.block_d)
    heads: tl.constexpr = SHAPE.group * SHAPE.kv_heads
    to = (part * nodes + queries.node) * heads + queries.head
    mask = queries.in_use[:, None] & (d < SHAPE.head_dim)[None, :]
    tl.store(scratch.out + to[:, None] * SHAPE.head_dim + d[None, :], acc, mask=mask)
    tl.store(scratch.stats + to * 2, best, mask=queries.in_use)
    tl.store(scratch.stats + to * 2 + 1, total, mask=queries.in_use)


@triton.jit
def _state(scratch, part, queries, had, nodes, SHAPE: tl.constexpr):
    """Load a state of `_put_state`; one that has seen nothing for rows without."""
    d = tl.arange(0, SHAPE.block_d)
    at = (part * nodes + queries.node) * (SHAPE.group * SHAPE.kv_heads) + queries.head
    best = tl.load(scratch.stats + at * 2, mask=had, other=_NONE)
    total = tl.load(scratch.stats + at * 2 + 1, mask=had, other=0.0)
    mask = had[:, None] & (d < SHAPE.head_dim)[None, :]
    return best, total, tl.load(scratch.out + at[:, None] * SHAPE.head_dim + d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["nodes", "parts"])
def main_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    rows,
    scratch,
    numbers,
    nodes,
    parts,
    blocks_ptr,
    SHAPE: tl.constexpr,
    SINGLE: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend to main parts by ``ROWS`` query rows of a key head: states of some splits, or one of all (ALL_SPLITS).

    A place has ``nodes`` rows, one where SINGLE, and ``parts`` states.
    ``blocks_ptr`` int32 [1] counts the blocks that all programs go through; None counts nothing.
    """
    nodes = 1 if SINGLE else nodes
    kv_head = tl.program_id(0) % SHAPE.kv_heads
    block = tl.program_id(0) // SHAPE.kv_heads
    place = tl.program_id(2).to(tl.int64)
    # Rows are laid out before the pass begins, so they can be read before the kernel before has ended.
    slot = tl.load(rows.slots + place).to(tl.int64)
    length = tl.load(rows.lengths + tl.maximum(slot, 0))
    count = tl.where(slot < 0, 0, tl.minimum(tl.load(rows.counts + place), nodes))
    row = block * ROWS + tl.arange(0, ROWS)
    node = row // SHAPE.group
    head = kv_head * SHAPE.group + row % SHAPE.group
    in_use = node < count
    position = _positions(rows, place, node, in_use, length, nodes, SHAPE)
    tail = tl.where(in_use, tail_start(position), 0)
    first_key = tl.where(in_use, _first_key(position, numbers, SHAPE), _FAR)
    end = tl.max(tail, 0)
    common = tl.min(tl.where(in_use, tail, _FAR), 0) // _BLOCK * _BLOCK
    first = tl.min(first_key, 0)
    queries = QueryRows(node, head, in_use, position, tail, first_key)
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)
    # Windows may end behind main parts.
    if end > first:
        q = _queries(q_ptr, place, queries, nodes, numbers, SHAPE)
        d = tl.arange(0, SHAPE.block_d)
        in_block = tl.arange(0, _BLOCK)[:, None] * SHAPE.head_dim + d[None, :]
        base = slot * numbers.stride_slot + kv_head * numbers.stride_head
        key_at, value_at = key_ptr + base + in_block, value_ptr + base + in_block
        first_split = split_of(first)
        last_split = split_of(end - 1)
        count = last_split - first_split + 1
        for index in tl.range(tl.program_id(1), count, tl.num_programs(1)):
            # In order, or the longest ones first.
            split = first_split + index if ALL_SPLITS else last_split - index
            state = _split_state(q, key_at, value_at, split, queries, common, numbers, blocks_ptr, SHAPE, STAGES)
            if ALL_SPLITS:
                had = tl.where(index > 0, tail, 0) > 0
                state = _merge(_state(scratch, place, queries, had, nodes, SHAPE), state)
                _put_state(scratch, place, queries, state, nodes, SHAPE)
                # Other threads may read it.
                tl.debug_barrier()
            else:
                part = place * parts + split - _first_state(length, numbers, SHAPE)
                _put_state(scratch, part, queries, state, nodes, SHAPE)


@triton.jit
def _see_tail(state, q, key_ptr, value_ptr, base, path_ptr, begin, queries, length, numbers, SHAPE: tl.constexpr):
    """Go on with the state of rows whose ``tail`` begins at ``begin``; past the L1: nothing was waited for."""
    d = tl.arange(0, SHAPE.block_d)
    k = begin + tl.arange(0, _BLOCK)
    mine = queries.tail == begin
    there = k <= tl.max(tl.where(mine, queries.position, -1), 0)
    row = k
    if not SHAPE.is_path:
        # One node's own tail: its ancestors' rows lie behind the committed ones, in the tree's order.
        own = there & (k >= length)
        row = tl.where(own, length + tl.load(path_ptr + k - length, mask=own, other=0), k)
    at = base + row.to(tl.int64)[:, None] * SHAPE.head_dim + d[None, :]
    # Masked: a row that was never written may hold NaN.
    mask = there[:, None] & (d < SHAPE.head_dim)[None, :]
    key = tl.load(key_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    value = tl.load(value_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    score, unit = _scores(q, key, numbers, SHAPE)
    seen = (k[None, :] >= queries.first_key[:, None]) & (k[None, :] <= queries.position[:, None]) & mine[:, None]
    return _see(state, tl.where(seen, score, _MASKED), unit, value, SHAPE)


@triton.jit
def _main_state(scratch, part, split, queries, nodes, SHAPE: tl.constexpr):
    """Load the state of a split that main parts have left."""
    tail, first_key = queries.tail, queries.first_key
    had = queries.in_use & (tail > first_key) & (split_start(split) < tail) & (split_start(split + 1) > first_key)
    return _state(scratch, part + split, queries, had, nodes, SHAPE)


@triton.jit(do_not_specialize=["nodes", "path_width", "parts"])
def tail_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    rows,
    scratch,
    sink_ptr,
    out_ptr,
    numbers,
    nodes,
    path_width,
    parts,
    SHAPE: tl.constexpr,
    SINGLE: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    IN_TILE: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend to tails by ``ROWS`` query rows of a key head, of IN_TILE nodes; merge main parts, and write the result.

    A place has ``nodes`` rows, one where SINGLE, each with a path of ``path_width`` places, and ``parts`` states of
    main parts. Rows of nodes that are not in use, and of empty places, become 0.
    """
    nodes = 1 if SINGLE else nodes
    let_next_begin(OVERLAP)
    PER_NODE: tl.constexpr = ROWS // IN_TILE
    GROUPS: tl.constexpr = (SHAPE.group + PER_NODE - 1) // PER_NODE
    kv_head = tl.program_id(1) // GROUPS
    place = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    node = tl.program_id(0) * IN_TILE + row // PER_NODE
    of_group = tl.program_id(1) % GROUPS * PER_NODE + row % PER_NODE
    head = kv_head * SHAPE.group + of_group
    there = (node < nodes) & (of_group < SHAPE.group)
    d = tl.arange(0, SHAPE.block_d)
    slot = tl.load(rows.slots + place).to(tl.int64)
    length = tl.load(rows.lengths + tl.maximum(slot, 0))
    count = tl.where(slot < 0, 0, tl.load(rows.counts + place))
    in_use = there & (node < count)
    position = _positions(rows, place, node, in_use, length, nodes, SHAPE)
    tail = tl.where(in_use, tail_start(position), -1)
    first_key = _first_key(position, numbers, SHAPE)
    base = slot * numbers.stride_slot + kv_head * numbers.stride_head
    queries = QueryRows(node, head, in_use, position, tail, first_key)
    own = _unseeing(ROWS, SHAPE)
    end = tl.max(tail, 0)
    if end >= 0:
        q = _queries(q_ptr, place, queries, nodes, numbers, SHAPE)
        begin = tl.min(tl.where(in_use, tail, _FAR), 0)
        path_ptr = rows.paths + (place * nodes + tl.program_id(0)) * path_width
        own = _see_tail(own, q, key_ptr, value_ptr, base, path_ptr, begin, queries, length, numbers, SHAPE)
        # A tile's positions are few: their tails begin at one place or at two.
        if IN_TILE > 1 and end > begin:
            own = _see_tail(own, q, key_ptr, value_ptr, base, path_ptr, end, queries, length, numbers, SHAPE)
    wait_for_previous(OVERLAP)
    state = _unseeing(ROWS, SHAPE)
    first = tl.min(tl.where(in_use, first_key, _FAR), 0)
    if end > first:
        if ALL_SPLITS:
            state = _state(scratch, place, queries, in_use & (tail > first_key), nodes, SHAPE)
        else:
            part = place * parts - _first_state(length, numbers, SHAPE)
            for split in tl.range(split_of(first), split_of(end - 1) + 1, 4):
                # All four are on their way before the first is merged.
                one = _main_state(scratch, part, split, queries, nodes, SHAPE)
                two = _main_state(scratch, part, split + 1, queries, nodes, SHAPE)
                three = _main_state(scratch, part, split + 2, queries, nodes, SHAPE)
                four = _main_state(scratch, part, split + 3, queries, nodes, SHAPE)
                state = _merge(_merge(_merge(_merge(state, one), two), three), four)
    best, total, acc = _merge(state, own)
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(best, sink)
        decay = tl.exp2(best - largest)
        total = tl.fma(total, decay, tl.exp2(sink - largest) * 8388608.0)
        acc = acc * decay[:, None]
    UNIT: tl.constexpr = 1.1920928955078125e-07 / SHAPE.lift
    result = tl.where(in_use[:, None], acc / (tl.where(in_use, total, 1.0) * UNIT)[:, None], 0.0)
    to = (place * nodes + node) * (SHAPE.group * SHAPE.kv_heads) + head
    mask = there[:, None] & (d < SHAPE.head_dim)[None, :]
    tl.store(out_ptr + to[:, None] * SHAPE.head_dim + d[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
