"""Attention of a forward's rows as kernels: what a row gets depends on its own position and keys alone.

Nothing is cut by how long a sequence happens to be. A row at position p sees the keys up to `tail_start` (p) in its
main part and those from there to itself in its tail, at most two blocks of `BLOCK` keys:

    main    0 .. tail_start(p) - 1: all committed, whoever asks, as a tree is at most `REACH` deep. Cut at absolute
            places into splits (`split_start`), each a chain of blocks with a running maximum
    tail    tail_start(p) .. p: gathered by position, from the committed rows or from the row's ancestors

Splits are merged in order within a group of `GROUP`, then groups in order, then the tail. So a program may leave the
state of a split, where there are few rows, or that of a group, or of all it has seen. A block that is masked for a row
changes no bit of its state, so rows of other positions may share a tile. Probabilities are summed as integers (2^23 of
each), so that no sum has an order; a block has 64 keys, so that they stay below 2^31.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .machine import let_next_begin, prefetch, wait_for_previous

BLOCK = 64
"""Keys of a block."""
REACH = 32
"""Deepest node of a tree that branches: keys farther back than that are committed."""
_BLOCK, _REACH = tl.constexpr(BLOCK), tl.constexpr(REACH)
_NONE = tl.constexpr(-1.0e30)
_FAR = tl.constexpr(1 << 30)
GROUP = 4
"""Splits that are merged with one another first."""
_SPLITS = tl.constexpr(GROUP)
TAIL_ROWS = 16
"""Query rows of a tail's program."""
MAIN_ROWS = 64
"""Query rows of a main part's program."""


class AttentionNumbers(NamedTuple):
    """Numbers of a layer, distances in elements (of queries' rows, and of slots and heads in the cache), and sizes.

    ``nodes``: rows of a place; ``path_width``: places of each one's path.
    """

    scale: float
    softcap: float
    window: int
    nodes: int
    path_width: int
    stride_query: int
    stride_slot: int
    stride_head: int


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels are compiled for; ``block_d``: ``head_dim`` to a power of two; ``is_path``: no branches."""

    group: int
    kv_heads: int
    head_dim: int
    block_d: int
    is_path: bool
    has_window: bool
    is_capped: bool
    precision: str


@triton.jit
def tail_start(position):
    """The first key of a position's tail."""
    return tl.maximum(position - _REACH, 0) // _BLOCK * _BLOCK


@triton.jit
def split_start(split):
    """The first key of a split: 128 keys each up to 512, then 256."""
    return 128 * split + 128 * tl.maximum(split - 4, 0)


@triton.jit
def split_of(key):
    """The split that a key is in."""
    return tl.minimum(key, 512) // 128 + tl.maximum(key - 512, 0) // 256


@triton.jit
def _sharing(length, programs, numbers, SHAPE: tl.constexpr, WALKS: tl.constexpr):
    """How many splits a place's states are of, 1 or GROUP, and the first state that its rows may have.

    Of one split where groups would leave multiprocessors without work. By the place's length, so that whoever writes
    states and whoever reads them agree.
    """
    last = split_of(length + numbers.nodes) // _SPLITS
    first = 0
    if SHAPE.has_window:
        first = split_of(tl.maximum(length - numbers.window + 1, 0)) // _SPLITS
    if WALKS:
        return _SPLITS, first
    else:
        width = tl.where(16 * (last - first + 1) < 3 * programs, 1, _SPLITS)
        return width, first * (_SPLITS // width)


@triton.jit
def _scores(q, key, numbers, SHAPE: tl.constexpr):
    """Scores in powers of two."""
    score = tl.dot(q, tl.trans(key), input_precision=SHAPE.precision) * (numbers.scale * 1.4426950408889634)
    if SHAPE.is_capped:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        cap = numbers.softcap * 1.4426950408889634
        score = cap - 2.0 * cap / (tl.exp2(score * (2.0 / numbers.softcap)) + 1.0)
    return score


@triton.jit
def _see(best, total, acc, score, seen, value, SHAPE: tl.constexpr):
    """Go on with a state through one block: ``score``, ``seen`` [rows, BLOCK], ``value`` [BLOCK, block_d]."""
    score = tl.where(seen, score, _NONE)
    new_best = tl.maximum(best, tl.max(score, 1))
    decay = tl.exp2(best - new_best)
    weight = tl.where(seen, tl.exp2(score - new_best[:, None]), 0.0)
    # From 2^23 to 2^24 floats are whole numbers, and their bits count up with them.
    scale = tl.full(weight.shape, 8388608.0, tl.float32)
    units = tl.fma(weight, scale, scale).to(tl.int32, bitcast=True) - 0x4B000000
    total = tl.fma(total, decay, tl.sum(units, 1).to(tl.float32))
    acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision=SHAPE.precision)
    return new_best, total, acc


@triton.jit
def _merge(best, total, acc, best_2, total_2, acc_2):
    """The state of two runs of keys, the earlier one first."""
    new_best = tl.maximum(best, best_2)
    one, two = tl.exp2(best - new_best), tl.exp2(best_2 - new_best)
    total = tl.fma(total, one, total_2 * two)
    acc = tl.fma(acc, tl.broadcast_to(one[:, None], acc.shape), acc_2 * two[:, None])
    return new_best, total, acc


@triton.jit
def _first_key(position, numbers, SHAPE: tl.constexpr):
    """The first key that a position's window leaves it."""
    if SHAPE.has_window:
        return tl.maximum(position - numbers.window + 1, 0)
    else:
        return tl.zeros_like(position)


@triton.jit
def _positions(rows, place, node, in_use, length, numbers, SHAPE: tl.constexpr):
    """Where rows stand in their sequence."""
    if SHAPE.is_path:
        return length + node
    else:
        return length + tl.load(rows.depths + place * numbers.nodes + node, mask=in_use, other=0)


@triton.jit
def _queries(q_ptr, place, node, head, in_use, numbers, SHAPE: tl.constexpr):
    d = tl.arange(0, SHAPE.block_d)
    at = (place * numbers.nodes + node)[:, None] * numbers.stride_query + (head * SHAPE.head_dim)[:, None] + d[None, :]
    return tl.load(q_ptr + at, mask=in_use[:, None] & (d < SHAPE.head_dim)[None, :], other=0.0)


@triton.jit
def _split_state(
    q, key_ptr, value_ptr, base, split, first_key, tail, numbers, SHAPE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The state of rows over one split: each row sees its keys from ``first_key`` to before ``tail``."""
    BLOCK_D: tl.constexpr = SHAPE.block_d
    d = tl.arange(0, BLOCK_D)
    in_head = (d < SHAPE.head_dim)[None, :]
    # A row that is not in use has no tail, and no first key.
    start = tl.maximum(split_start(split), tl.min(first_key, 0) // _BLOCK * _BLOCK)
    stop = tl.minimum(split_start(split + 1), tl.max(tail, 0))
    best = tl.full([q.shape[0]], _NONE, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    in_block = tl.arange(0, _BLOCK)[:, None] * SHAPE.head_dim + d[None, :]
    for at in tl.range(start, stop, _BLOCK, num_stages=STAGES):
        k = at + tl.arange(0, _BLOCK)
        block = base + at * SHAPE.head_dim
        # A whole block lies before the longest tail, so all of its rows are committed.
        key = tl.load(key_ptr + block + in_block, mask=in_head, other=0.0)
        value = tl.load(value_ptr + block + in_block, mask=in_head, other=0.0)
        seen = (k[None, :] < tail[:, None]) & (k[None, :] >= first_key[:, None])
        best, total, acc = _see(best, total, acc, _scores(q, key, numbers, SHAPE), seen, value, SHAPE)
    return best, total, acc


@triton.jit
def _put_state(scratch, part, node, head, in_use, best, total, acc, numbers, SHAPE: tl.constexpr):
    d = tl.arange(0, SHAPE.block_d)
    heads: tl.constexpr = SHAPE.group * SHAPE.kv_heads
    to = (part * numbers.nodes + node) * heads + head
    tl.store(
        scratch.out + to[:, None] * SHAPE.head_dim + d[None, :], acc,
        mask=in_use[:, None] & (d < SHAPE.head_dim)[None, :],
    )  # fmt: skip
    tl.store(scratch.stats + to * 2, best, mask=in_use)
    tl.store(scratch.stats + to * 2 + 1, total, mask=in_use)


@triton.jit
def _state(scratch, part, node, head, had, numbers, SHAPE: tl.constexpr):
    """What `_put_state` has left; nothing seen for rows that have none."""
    BLOCK_D: tl.constexpr = SHAPE.block_d
    d = tl.arange(0, BLOCK_D)
    at = (part * numbers.nodes + node) * (SHAPE.group * SHAPE.kv_heads) + head
    best = tl.load(scratch.stats + at * 2, mask=had, other=_NONE)
    total = tl.load(scratch.stats + at * 2 + 1, mask=had, other=0.0)
    mask = had[:, None] & (d < SHAPE.head_dim)[None, :]
    return best, total, tl.load(scratch.out + at[:, None] * SHAPE.head_dim + d[None, :], mask=mask, other=0.0)


@triton.jit
def _ask_for(next_ptr, lines):
    """Have this program's share of the next product's weights, ``lines`` of 128 bytes, brought into the L2."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    start = next_ptr.to(tl.int64)
    for at in range(program * 512, lines, programs * 512):
        line = tl.minimum(at + tl.arange(0, 512), lines - 1)
        prefetch(start + line.to(tl.int64) * 128)


@triton.jit(do_not_specialize=["parts", "programs", "next_lines"])
def main_kernel(
    q_ptr, key_ptr, value_ptr, rows, scratch, numbers, parts, programs, next_ptr, next_lines, SHAPE: tl.constexpr,
    WALKS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Main parts of ``ROWS`` query rows of a key head: states of some splits or groups, or one of all (WALKS)."""
    let_next_begin(OVERLAP)
    BLOCK_D: tl.constexpr = SHAPE.block_d
    kv_head = tl.program_id(0) % SHAPE.kv_heads
    block = tl.program_id(0) // SHAPE.kv_heads
    place = tl.program_id(2).to(tl.int64)
    # Rows are laid out before the pass begins, so they can be read before the kernel before has ended.
    slot = tl.load(rows.slots + place).to(tl.int64)
    length = tl.load(rows.lengths + tl.maximum(slot, 0))
    count = tl.where(slot < 0, 0, tl.minimum(tl.load(rows.counts + place), numbers.nodes))
    row = block * ROWS + tl.arange(0, ROWS)
    node = row // SHAPE.group
    head = kv_head * SHAPE.group + row % SHAPE.group
    in_use = node < count
    position = _positions(rows, place, node, in_use, length, numbers, SHAPE)
    tail = tl.where(in_use, tail_start(position), 0)
    first_key = tl.where(in_use, _first_key(position, numbers, SHAPE), _FAR)
    end = tl.max(tail, 0)
    if OVERLAP:
        _ask_for(next_ptr, next_lines)
    wait_for_previous(OVERLAP)
    if end > 0:
        q = _queries(q_ptr, place, node, head, in_use, numbers, SHAPE)
        base = slot * numbers.stride_slot + kv_head * numbers.stride_head
        first_split = split_of(tl.minimum(tl.min(first_key, 0), end - 1))
        last_split = split_of(end - 1)
        width, first_state = _sharing(length, programs, numbers, SHAPE, WALKS)
        for unit in tl.range(first_split // width + tl.program_id(1), last_split // width + 1, tl.num_programs(1)):
            best = tl.full([ROWS], _NONE, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            from_split = tl.maximum(unit * width, first_split)
            for split in tl.range(from_split, tl.minimum(unit * width + width, last_split + 1)):
                best_2, total_2, acc_2 = _split_state(
                    q, key_ptr, value_ptr, base, split, first_key, tail, numbers, SHAPE, STAGES
                )  # fmt: skip
                best, total, acc = _merge(best, total, acc, best_2, total_2, acc_2)
            if WALKS:
                had = tl.where(unit > first_split // width, tail, 0) > 0
                best_2, total_2, acc_2 = _state(scratch, place, node, head, had, numbers, SHAPE)
                best, total, acc = _merge(best_2, total_2, acc_2, best, total, acc)
                _put_state(scratch, place, node, head, in_use, best, total, acc, numbers, SHAPE)
                # Other threads may read it.
                tl.debug_barrier()
            else:
                part = place * parts + unit - first_state
                _put_state(scratch, part, node, head, in_use, best, total, acc, numbers, SHAPE)


@triton.jit
def _tail_keys(rows, place, begin, last, length, numbers, SHAPE: tl.constexpr):
    """Where the keys of a block lie in their head's rows, and which of them there are."""
    k = begin + tl.arange(0, _BLOCK)
    there = k <= last
    row = k
    if not SHAPE.is_path:
        # One node's own tail: its ancestors' rows lie behind the committed ones, in the tree's order.
        own = there & (k >= length)
        path = (place * numbers.nodes + tl.program_id(0)) * numbers.path_width + k - length
        row = tl.where(own, length + tl.load(rows.paths + path, mask=own, other=0), k)
    return row.to(tl.int64) * SHAPE.head_dim, there


@triton.jit(do_not_specialize=["parts", "programs"])
def tail_kernel(
    q_ptr, key_ptr, value_ptr, rows, scratch, sink_ptr, out_ptr, numbers, parts, programs, SHAPE: tl.constexpr,
    WALKS: tl.constexpr, ROWS: tl.constexpr, IN_TILE: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tails of ``ROWS`` query rows of a key head, of IN_TILE nodes; then the merge with main parts, and the result.

    Rows of nodes that are not in use, and of empty places, become 0.
    """
    let_next_begin(OVERLAP)
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    PER_NODE: tl.constexpr = ROWS // IN_TILE
    GROUPS: tl.constexpr = (SHAPE.group + PER_NODE - 1) // PER_NODE
    kv_head = tl.program_id(1) // GROUPS
    place = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    node = tl.program_id(0) * IN_TILE + row // PER_NODE
    of_group = tl.program_id(1) % GROUPS * PER_NODE + row % PER_NODE
    head = kv_head * SHAPE.group + of_group
    there = (node < numbers.nodes) & (of_group < SHAPE.group)
    d = tl.arange(0, SHAPE.block_d)
    in_head = (d < HEAD_DIM)[None, :]
    slot = tl.load(rows.slots + place).to(tl.int64)
    length = tl.load(rows.lengths + tl.maximum(slot, 0))
    count = tl.where(slot < 0, 0, tl.load(rows.counts + place))
    in_use = there & (node < count)
    position = _positions(rows, place, node, in_use, length, numbers, SHAPE)
    tail = tl.where(in_use, tail_start(position), 0)
    first_key = _first_key(position, numbers, SHAPE)
    # Two blocks hold the tails of all rows: a tail begins at most REACH + BLOCK - 1 keys back, and nodes are few.
    begin = tl.min(tl.where(in_use, tail, _FAR), 0)
    last = tl.max(tl.where(in_use, position, -1), 0)
    offset_1, there_1 = _tail_keys(rows, place, begin, last, length, numbers, SHAPE)
    offset_2, there_2 = _tail_keys(rows, place, begin + _BLOCK, last, length, numbers, SHAPE)
    base = slot * numbers.stride_slot + kv_head * numbers.stride_head + d[None, :]
    wait_for_previous(OVERLAP)
    q = _queries(q_ptr, place, node, head, in_use, numbers, SHAPE)
    # Masked: a row that was never written may hold NaN.
    key_1 = tl.load(key_ptr + base + offset_1[:, None], mask=in_head & there_1[:, None], other=0.0)
    key_2 = tl.load(key_ptr + base + offset_2[:, None], mask=in_head & there_2[:, None], other=0.0)
    value_1 = tl.load(value_ptr + base + offset_1[:, None], mask=in_head & there_1[:, None], other=0.0)
    score_1 = _scores(q, key_1, numbers, SHAPE)
    score_2 = _scores(q, key_2, numbers, SHAPE)
    value_2 = tl.load(value_ptr + base + offset_2[:, None], mask=in_head & there_2[:, None], other=0.0)
    first_seen = tl.maximum(tail, first_key)
    k = begin + tl.arange(0, _BLOCK)
    best_2 = tl.full([ROWS], _NONE, tl.float32)
    total_2 = tl.zeros([ROWS], tl.float32)
    acc_2 = tl.zeros([ROWS, BLOCK_D], tl.float32)
    seen = (k[None, :] >= first_seen[:, None]) & (k[None, :] <= position[:, None]) & in_use[:, None]
    best_2, total_2, acc_2 = _see(best_2, total_2, acc_2, score_1, seen, value_1, SHAPE)
    k += _BLOCK
    seen = (k[None, :] >= first_seen[:, None]) & (k[None, :] <= position[:, None]) & in_use[:, None]
    best_2, total_2, acc_2 = _see(best_2, total_2, acc_2, score_2, seen, value_2, SHAPE)

    best = tl.full([ROWS], _NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    end = tl.max(tail, 0)
    if end > 0:
        if WALKS:
            best, total, acc = _state(scratch, place, node, head, in_use & (tail > 0), numbers, SHAPE)
        else:
            width, first_state = _sharing(length, programs, numbers, SHAPE, WALKS)
            first_unit = split_of(tl.minimum(tl.min(tl.where(in_use, first_key, _FAR), 0), end - 1)) // width
            end_unit = split_of(end - 1) // width + 1
            for group in tl.range(first_unit // _SPLITS * _SPLITS, end_unit, _SPLITS):
                # States of splits are merged with their group's first.
                begun = width > 1
                best_1 = tl.where(begun, best, _NONE)
                total_1 = tl.where(begun, total, 0.0)
                acc_1 = tl.where(begun, acc, 0.0)
                # Two at a time are on their way.
                for unit in tl.range(group, tl.minimum(group + _SPLITS, end_unit), 2):
                    start, middle = split_start(unit * width), split_start((unit + 1) * width)
                    had = in_use & (start < tail) & (middle > first_key)
                    has_next = in_use & (middle < tail) & (split_start((unit + 2) * width) > first_key)
                    part = place * parts + unit - first_state
                    best_3, total_3, acc_3 = _state(scratch, part, node, head, had, numbers, SHAPE)
                    best_4, total_4, acc_4 = _state(scratch, part + 1, node, head, has_next, numbers, SHAPE)
                    best_1, total_1, acc_1 = _merge(best_1, total_1, acc_1, best_3, total_3, acc_3)
                    best_1, total_1, acc_1 = _merge(best_1, total_1, acc_1, best_4, total_4, acc_4)
                best_3, total_3, acc_3 = _merge(best, total, acc, best_1, total_1, acc_1)
                best = tl.where(begun, best_1, best_3)
                total = tl.where(begun, total_1, total_3)
                acc = tl.where(begun, acc_1, acc_3)
    best, total, acc = _merge(best, total, acc, best_2, total_2, acc_2)
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(best, sink)
        decay = tl.exp2(best - largest)
        total = tl.fma(total, decay, tl.exp2(sink - largest) * 8388608.0)
        acc = acc * decay[:, None]
    result = tl.where(in_use[:, None], acc / (tl.where(in_use, total, 1.0) * 1.1920928955078125e-07)[:, None], 0.0)
    to = (place * numbers.nodes + node) * (SHAPE.group * SHAPE.kv_heads) + head
    tl.store(
        out_ptr + to[:, None] * HEAD_DIM + d[None, :], result.to(out_ptr.dtype.element_ty),
        mask=there[:, None] & in_head,
    )  # fmt: skip
