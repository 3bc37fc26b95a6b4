"""Attention of drafted nodes over a prefix and each node's own ancestors, with a running maximum.

Nodes of one level share the prefix but not their ancestors, which are not contiguous. Keys come from three places:

* *prefix*: cached positions ``[0, prefix)``, seen by every node;
* *tree*: cached nodes of earlier levels, slot ``j = (level - 1) * top_k + node`` at position ``prefix + j``; node n
  sees slot j when its chain names it: ``chain[n, j // top_k] == j`` (one slot of each earlier level);
* *fresh*: rows of this very pass, not yet cached: the node itself, or, in the extend pass, all new tokens.

Keys in the cache are already rotated; queries and fresh keys are rotated here (rotate-half, cos and sin tables of
``head_dim / 2`` columns), where the head says so after an RMSNorm over each of them (Qwen3)::

    x = weight * x / sqrt(mean(x^2) + eps)

A sliding window hides keys whose position, on the node's path, is ``window`` or more before the query's, and tiles that
lie before it are not read. Position p lies in row ``p % rows``, so a cache of fewer rows than positions holds the last
ones. One unit of work is (sequence, kv head, group of query heads, split of the keys); splits are merged, one
query at a time, in a second step.

The worked example of `eagle_slim.runtime.tree`, top_k 2, at a third level: tree slots 0 1 | 2 3 hold A, B and C, E, the
nodes expanded before. G, the child of C, which is a child of A, has chain [0, 2]: it sees A, C and itself, never B or
E. I has chain [1, 3] and sees B and E.

Limits: head_dim <= 256 and even; rows of one pass <= 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .frontier import CHAIN_COLUMNS, ROWS, chain_at
from .weight_stream import hidden_zero, store_activation


@dataclass(frozen=True)
class DraftAttentionShape:
    """Heads of a layer, and how the work on them is cut.

    Query heads of one kv head (a *group*) are handled ``heads_per_unit`` at a time: a *head group* is one unit's heads,
    and its rows are ``heads_per_unit * ROWS`` queries.
    """

    heads: int
    kv_heads: int
    head_dim: int
    top_k: int
    heads_per_unit: int
    block_keys: int
    """Keys of one tile."""
    stride: int = 1
    """Rows from one of a sequence to its next, see `persistent`."""
    part_keys: int = 1
    """Prefix keys from which attention is split over programs."""
    max_splits: int = 16
    """Largest number of splits of one unit's keys; a power of two."""
    queries: int = 4
    """Queries merged at a time."""
    window: int = 0
    """A key is seen if query position - key position is below it; 0 for no window."""
    sinks: int = 0
    """First positions that are seen, too, as if they lay right before the window."""
    head_norms: bool = False
    """Whether queries and keys pass an RMSNorm each, before they are rotated."""
    norm_eps: float = 0.0
    """Added to the mean of squares there."""

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.heads // self.kv_heads

    @property
    def head_groups(self) -> int:
        """Units that share a kv head."""
        return -(-self.group // self.heads_per_unit)

    @property
    def groups(self) -> int:
        """Units of one sequence, before their keys are cut into splits."""
        return self.kv_heads * self.head_groups

    @property
    def group_rows(self) -> int:
        """Rows of one unit."""
        return self.heads_per_unit * int(ROWS.value)

    @property
    def half(self) -> int:
        """Columns of the RoPE tables."""
        return self.head_dim // 2

    @property
    def qkv_size(self) -> int:
        """Values in a row of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def block_d(self) -> int:
        """Power of two that holds a head."""
        return int(triton.next_power_of_2(self.head_dim))

    @property
    def block_half(self) -> int:
        """Power of two that holds half a head; matrix units want 16."""
        return max(16, self.block_d // 2)


class DraftCache(NamedTuple):
    """Cached keys, rotated, and values: [slots, kv_heads, rows, head_dim]."""

    key: Any
    value: Any
    stride_slot: Any
    stride_head: Any


class Rope(NamedTuple):
    """Rotary tables: fp32 [positions, head_dim / 2]."""

    cos: Any
    sin: Any
    norm: Any
    """[2 * head_dim]: weights of the RMSNorms before, of queries and of keys; read where there are."""


class AttentionSplits(NamedTuple):
    """Partial softmax of each split of a unit's keys, for the merge."""

    stats: Any
    """fp32 [splits, 2, group_rows]: running maximum and sum."""
    weighted: Any
    """fp32 [splits, group_rows, block_d]: the weighted sum of values."""


class Rows(NamedTuple):
    """The sequence that each row of a pass belongs to, int32 [rows]; kept in registers from barrier to barrier."""

    seq: Any
    """Number among the active sequences."""
    slot: Any
    prefix: Any
    """Positions cached before this draft."""
    num_new: Any


class Unit(NamedTuple):
    """One unit of work of a sequence."""

    kv_head: Any
    head_group: Any
    split: Any
    num_splits: Any


class Keys(NamedTuple):
    """The keys that a pass sees of a sequence."""

    level: Any
    is_extend: Any
    num_new: Any
    num_queries: Any
    num_fresh: Any
    """Keys of this very pass."""
    cached: Any
    """Keys that every query sees in the cache."""
    position: Any
    """Position of the queries."""
    first_seen: Any
    """First position that a query sees."""
    num_rows: Any
    """Rows of the cache; with a window alone."""


class Queries(NamedTuple):
    """Rotated queries of a unit, in halves [group_rows, block_half]."""

    low: Any
    high: Any
    mask: Any
    """int1 [group_rows]: rows in use."""
    node: Any
    """int32 [group_rows]: node of each row."""


class Offsets(NamedTuple):
    """Index vectors of a unit, displaced by `hidden_zero`."""

    row: Any
    half: Any
    dim: Any
    fresh: Any
    key: Any
    in_half: Any
    """int1 [block_half]."""
    in_head: Any
    """int1 [block_d]."""


class Running(NamedTuple):
    """State of a running softmax."""

    maximum: Any
    """fp32 [group_rows], in units of log2."""
    sum: Any
    """fp32 [group_rows]."""
    weighted: Any
    """fp32 [group_rows, block_d]: the weighted sum of values."""


@triton.jit
def _rotate(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _norm_heads(low, high, SCALE: tl.constexpr, weight_ptr, offs_h, SHAPE: tl.constexpr):
    """Put heads, in halves [rows, block_half], through the RMSNorm of ``weight_ptr`` [head_dim].

    They are multiplied by SCALE, before and after.
    """
    mask_h = offs_h < SHAPE.half
    weight_low = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    weight_high = tl.load(weight_ptr + SHAPE.half + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    factor = SCALE * tl.rsqrt(squares / SHAPE.head_dim + SHAPE.norm_eps * SCALE * SCALE)[:, None]
    return low * factor * weight_low[None, :], high * factor * weight_high[None, :]


@triton.jit
def _fold(scores, visible, values, running, cache):
    """Fold one tile of scores (in units of log2) and values into the running softmax."""
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running.maximum, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(running.maximum - shift)
    running_sum = running.sum * decay + tl.sum(weight, axis=1)
    dtype = cache.key.dtype.element_ty
    acc = tl.dot(weight.to(dtype), values, running.weighted * decay[:, None], input_precision="ieee")
    return Running(new_max, running_sum, acc)


@triton.jit
def _score(q_low, q_high, k_low, k_high):
    """Multiply queries by keys, from the halves of both: fp32 [group_rows, keys]."""
    scores = tl.dot(q_low, k_low, input_precision="ieee")
    return tl.dot(q_high, k_high, scores, input_precision="ieee")


@triton.jit
def _row_of(position, keys, SHAPE: tl.constexpr):
    """Return the cache's rows of positions, int64, which are less than ``num_rows`` behind the first one seen."""
    if SHAPE.window > 0:
        ring = keys.num_rows - SHAPE.sinks
        position -= tl.maximum(keys.first_seen - SHAPE.sinks, 0) // ring * ring
        position = tl.where(position >= keys.num_rows, position - ring, position)
    return position.to(tl.int64)


@triton.jit
def _load_tile(cache, row, mask_t, offs_h, offs_d, SHAPE: tl.constexpr):
    """Load cached keys, in halves [block_half, block_keys], and values [block_keys, block_d] from these rows."""
    row = row * SHAPE.head_dim
    mask_ht = (offs_h < SHAPE.half)[:, None] & mask_t[None, :]
    k_low = tl.load(cache.key + row[None, :] + offs_h[:, None], mask=mask_ht, other=0.0)
    k_high = tl.load(cache.key + row[None, :] + offs_h[:, None] + SHAPE.half, mask=mask_ht, other=0.0)
    mask_td = mask_t[:, None] & (offs_d < SHAPE.head_dim)[None, :]
    v = tl.load(cache.value + row[:, None] + offs_d[None, :], mask=mask_td, other=0.0)
    return k_low, k_high, v


@triton.jit
def _load_queries(qkv_ptr, rope, unit, keys, offs, dtype, SHAPE: tl.constexpr):
    """Load the queries of a unit and rotate them: its `Queries`, in the type of the cache."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HALF: tl.constexpr = SHAPE.half
    STRIDE: tl.constexpr = SHAPE.qkv_size * SHAPE.stride
    SCALE: tl.constexpr = 1.4426950408889634 / HEAD_DIM**0.5
    node = offs.row % ROWS
    head_in_group = unit.head_group * SHAPE.heads_per_unit + offs.row // ROWS
    mask_r = (node < keys.num_queries) & (head_in_group < SHAPE.group)
    head = unit.kv_head * SHAPE.group + head_in_group
    # In the extend pass the only query is the last new token.
    query_row = tl.where(keys.is_extend, keys.num_new - 1, node)
    table_row = keys.position.to(tl.int64) * HALF
    cos = tl.load(rope.cos + table_row + offs.half, mask=offs.in_half, other=0.0)
    sin = tl.load(rope.sin + table_row + offs.half, mask=offs.in_half, other=0.0)
    q_offs = query_row[:, None] * STRIDE + head[:, None] * HEAD_DIM + offs.half[None, :]
    mask_q = mask_r[:, None] & offs.in_half[None, :]
    low = tl.load(qkv_ptr + q_offs, mask=mask_q, other=0.0) * SCALE
    high = tl.load(qkv_ptr + q_offs + HALF, mask=mask_q, other=0.0) * SCALE
    if SHAPE.head_norms:
        low, high = _norm_heads(low, high, SCALE, rope.norm, offs.half, SHAPE)
    low, high = _rotate(low, high, cos[None, :], sin[None, :])
    return Queries(low.to(dtype), high.to(dtype), mask_r, node)


@triton.jit
def _fold_prefix(queries, cache, unit, keys, offs, running, SHAPE: tl.constexpr, ALL_SPLITS: tl.constexpr):
    """Fold this unit's tiles of the prefix into the running softmax.

    The last split takes the fresh keys, the one before it the tree's; the others the prefix, tile by tile. Where there
    are few splits, these two are too many to leave a long prefix to the others.
    """
    BLOCK_T: tl.constexpr = SHAPE.block_keys
    first_seen = 0
    if SHAPE.window > 0:
        first_seen = tl.minimum(keys.first_seen, keys.cached)
    num_tiles = tl.cdiv(keys.cached - first_seen, BLOCK_T)
    splits = tl.maximum(unit.num_splits - 2, 1)
    if ALL_SPLITS:
        splits = tl.where(num_tiles > splits, unit.num_splits, splits)
    tiles = tl.cdiv(num_tiles, splits)
    start = first_seen + unit.split * tiles * BLOCK_T
    stop = tl.where(unit.split >= splits, 0, tl.minimum(start + tiles * BLOCK_T, keys.cached))
    for t0 in range(start, stop, BLOCK_T):
        mask_t = t0 + offs.key < stop
        row = _row_of(t0 + offs.key, keys, SHAPE)
        k_low, k_high, v = _load_tile(cache, row, mask_t, offs.half, offs.dim, SHAPE)
        scores = _score(queries.low, queries.high, k_low, k_high)
        running = _fold(scores, mask_t[None, :] & queries.mask[:, None], v, running, cache)
    return running


@triton.jit
def _fold_sinks(queries, cache, rope, keys, offs, running, SHAPE: tl.constexpr):
    """Fold the first positions into the running softmax, turned on to where they would lie right before the window."""
    gap = (keys.first_seen - SHAPE.sinks).to(tl.int64)
    # Where a scaling puts a factor on the tables, position 0 has it alone.
    factor = tl.load(rope.cos)
    cos = tl.load(rope.cos + gap * SHAPE.half + offs.half, mask=offs.in_half, other=0.0)[:, None] / factor
    sin = tl.load(rope.sin + gap * SHAPE.half + offs.half, mask=offs.in_half, other=0.0)[:, None] / factor
    for t0 in tl.range(0, SHAPE.sinks, SHAPE.block_keys, num_stages=1):
        mask_t = t0 + offs.key < SHAPE.sinks
        row = (t0 + offs.key).to(tl.int64)
        k_low, k_high, v = _load_tile(cache, row, mask_t, offs.half, offs.dim, SHAPE)
        dtype = k_low.dtype
        k_low, k_high = _rotate(k_low.to(tl.float32), k_high.to(tl.float32), cos, sin)
        scores = _score(queries.low, queries.high, k_low.to(dtype), k_high.to(dtype))
        running = _fold(scores, mask_t[None, :] & queries.mask[:, None], v, running, cache)
    return running


@triton.jit
def _fold_tree(queries, cache, chain_ptr, num_tree, keys, offs, running, SHAPE: tl.constexpr):
    """Fold the ``num_tree`` cached nodes of earlier levels into the running softmax, as the chains name them."""
    TOP_K: tl.constexpr = SHAPE.top_k
    for j0 in tl.range(0, num_tree, SHAPE.block_keys, num_stages=1):
        slot = j0 + offs.key
        mask_t = slot < num_tree
        link = tl.load(
            chain_ptr + queries.node[:, None] * CHAIN_COLUMNS + (slot // TOP_K)[None, :],
            mask=queries.mask[:, None] & mask_t[None, :],
            other=-1,
        )
        row = _row_of(keys.cached + slot, keys, SHAPE)
        k_low, k_high, v = _load_tile(cache, row, mask_t, offs.half, offs.dim, SHAPE)
        scores = _score(queries.low, queries.high, k_low, k_high)
        visible = link == slot[None, :]
        if SHAPE.window > 0:
            visible = visible & ((keys.level - 1 - slot // TOP_K < SHAPE.window) | (keys.first_seen == 0))[None, :]
        running = _fold(scores, visible, v, running, cache)
    return running


@triton.jit
def _fold_fresh(queries, qkv_ptr, cache, rope, num_tree, unit, keys, offs, running, SHAPE: tl.constexpr):
    """Fold the keys of this very pass into the running softmax, and cache them behind the tree's."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HALF: tl.constexpr = SHAPE.half
    STRIDE: tl.constexpr = SHAPE.qkv_size * SHAPE.stride
    dtype = cache.key.dtype.element_ty
    offs_h, offs_d, offs_f = offs.half, offs.dim, offs.fresh
    position = (keys.position + tl.where(keys.is_extend, offs_f - keys.num_new + 1, offs_f * 0)).to(tl.int64)
    mask_f = offs_f < keys.num_fresh
    mask_fh = mask_f[:, None] & offs.in_half[None, :]
    mask_fd = mask_f[:, None] & offs.in_head[None, :]
    cos = tl.load(rope.cos + position[:, None] * HALF + offs_h[None, :], mask=mask_fh, other=0.0)
    sin = tl.load(rope.sin + position[:, None] * HALF + offs_h[None, :], mask=mask_fh, other=0.0)
    k_offs = offs_f[:, None] * STRIDE + (SHAPE.heads + unit.kv_head) * HEAD_DIM + offs_h[None, :]
    low = tl.load(qkv_ptr + k_offs, mask=mask_fh, other=0.0)
    high = tl.load(qkv_ptr + k_offs + HALF, mask=mask_fh, other=0.0)
    if SHAPE.head_norms:
        low, high = _norm_heads(low, high, 1.0, rope.norm + HEAD_DIM, offs_h, SHAPE)
    v_offs = offs_f[:, None] * STRIDE + (SHAPE.heads + SHAPE.kv_heads + unit.kv_head) * HEAD_DIM + offs_d[None, :]
    v = tl.load(qkv_ptr + v_offs, mask=mask_fd, other=0.0)
    k_low, k_high = _rotate(low, high, cos, sin)
    k_low, k_high = k_low.to(dtype), k_high.to(dtype)
    v = v.to(dtype)
    scores = _score(queries.low, queries.high, tl.trans(k_low), tl.trans(k_high))
    visible = queries.mask[:, None] & mask_f[None, :] & (keys.is_extend | (queries.node[:, None] == offs_f[None, :]))
    if SHAPE.window > 0:
        before = tl.where(keys.is_extend, keys.num_new - 1 - offs_f, 0)
        visible = visible & ((before < SHAPE.window) | (keys.first_seen == 0))[None, :]
    running = _fold(scores, visible, v, running, cache)
    if unit.head_group == 0:
        cache_row = _row_of(keys.cached + offs_f + num_tree, keys, SHAPE)[:, None] * HEAD_DIM
        tl.store(cache.key + cache_row + offs_h[None, :], k_low, mask=mask_fh)
        tl.store(cache.key + cache_row + offs_h[None, :] + HALF, k_high, mask=mask_fh)
        tl.store(cache.value + cache_row + offs_d[None, :], v, mask=mask_fd)
    return running


@triton.jit
def attend_unit(
    qkv_ptr,  # fp32 [ROWS, stride, qkv_size], from this sequence's first row on
    cache,  # `DraftCache` of this slot and kv head: [rows, head_dim]
    rope,  # `Rope`
    chain_ptr,  # int32 [ROWS, CHAIN_COLUMNS], this sequence's
    splits,  # `AttentionSplits` of this unit's group
    unit,  # `Unit`
    prefix,  # cached positions before this pass
    num_new,  # extend pass: new tokens; level >= 1: the positions they took
    level,
    SHAPE: tl.constexpr,  # `DraftAttentionShape`
    ALL_SPLITS: tl.constexpr,  # whether all splits may take part of a long prefix: where they can be few
):
    """Do one unit of work; the last split also takes in the fresh keys, and caches them. `merge_heads` comes after."""
    GROUP_ROWS: tl.constexpr = SHAPE.group_rows
    BLOCK_D: tl.constexpr = SHAPE.block_d
    zero = hidden_zero()
    offs_r = tl.arange(0, GROUP_ROWS) + zero
    offs_h = tl.arange(0, SHAPE.block_half) + zero
    offs_d = tl.arange(0, BLOCK_D) + zero
    offs_f = tl.arange(0, ROWS) + zero
    offs_t = tl.arange(0, SHAPE.block_keys) + zero
    offs = Offsets(offs_r, offs_h, offs_d, offs_f, offs_t, offs_h < SHAPE.half, offs_d < SHAPE.head_dim)
    is_extend = level == 0
    num_queries = tl.where(is_extend, 1, SHAPE.top_k)
    num_fresh = tl.where(is_extend, num_new, SHAPE.top_k)
    cached = tl.where(is_extend, prefix, prefix + num_new)
    position = prefix + num_new - 1 + level
    first_seen, num_rows = 0, 0
    if SHAPE.window > 0:
        first_seen = tl.maximum(position - SHAPE.window + 1, 0)
        first_seen = tl.where(first_seen <= SHAPE.sinks, 0, first_seen)
        num_rows = (cache.stride_head // SHAPE.head_dim).to(tl.int32)
    keys = Keys(level, is_extend, num_new, num_queries, num_fresh, cached, position, first_seen, num_rows)
    queries = _load_queries(qkv_ptr, rope, unit, keys, offs, cache.key.dtype.element_ty, SHAPE)
    running = Running(
        tl.full([GROUP_ROWS], float("-inf"), tl.float32),
        tl.zeros([GROUP_ROWS], tl.float32),
        tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32),
    )
    fresh_split = unit.num_splits - 1
    tree_split = tl.maximum(unit.num_splits - 2, 0)
    running = _fold_prefix(queries, cache, unit, keys, offs, running, SHAPE, ALL_SPLITS)
    num_tree = tl.maximum(level - 1, 0) * SHAPE.top_k
    if unit.split == tree_split:
        running = _fold_tree(queries, cache, chain_ptr, num_tree, keys, offs, running, SHAPE)
        if SHAPE.sinks > 0:  # noqa: SIM102 - this one is decided by the compiler
            if first_seen > 0:
                running = _fold_sinks(queries, cache, rope, keys, offs, running, SHAPE)
    if unit.split == fresh_split:
        running = _fold_fresh(queries, qkv_ptr, cache, rope, num_tree, unit, keys, offs, running, SHAPE)
    stat = splits.stats + unit.split * 2 * GROUP_ROWS + offs_r
    tl.store(stat, running.maximum)
    tl.store(stat + GROUP_ROWS, running.sum)
    acc_offs = offs_r[:, None] * BLOCK_D + offs_d[None, :]
    mask_out = queries.mask[:, None] & offs.in_head[None, :]
    tl.store(splits.weighted + unit.split * GROUP_ROWS * BLOCK_D + acc_offs, running.weighted, mask=mask_out)


@triton.jit
def splits_per_group(num_active, PROGRAMS: tl.constexpr, SHAPE: tl.constexpr):
    """Return the largest number of splits per group of units, so that every program has one unit."""
    return tl.minimum(tl.maximum(PROGRAMS // (num_active * SHAPE.groups), 1), SHAPE.max_splits)


@triton.jit
def splits_of(prefix, max_splits, SHAPE: tl.constexpr):
    """Splits of a sequence's keys: one for the fresh keys, one for the tree's, the others share the prefix."""
    if SHAPE.window > 0:
        prefix = tl.minimum(prefix, SHAPE.window)
    return tl.minimum(max_splits, tl.cdiv(prefix, SHAPE.part_keys) + 2)


@triton.jit
def of_sequence(value, seq, a):
    """Return the value of sequence ``a`` among ``value`` [rows], int32 and not negative; ``seq`` [rows]: whose each is.

    Kept in registers, such values need not be read again after each barrier.
    """
    return tl.max(tl.where(seq == a, value, 0), axis=0)


@triton.jit
def attend(
    qkv_ptr,  # fp32 [ROWS, stride, qkv_size]
    cache,  # `DraftCache`
    rope,  # `Rope`
    chain_ptr,  # int32 [2, stride, ROWS, CHAIN_COLUMNS], see `frontier.chain_at`
    splits,  # `AttentionSplits`
    rows,  # `Rows`
    num_active,
    level,
    PROGRAMS: tl.constexpr,
    SHAPE: tl.constexpr,  # `DraftAttentionShape`
):
    """Do this program's units of one level: all active sequences and heads, prefixes cut into splits."""
    num_groups = num_active * SHAPE.groups
    max_splits = splits_per_group(num_active, PROGRAMS, SHAPE)
    for index in tl.range(tl.program_id(0), num_groups * max_splits, PROGRAMS, disable_licm=True):
        place = index + num_active * 0
        group = place % num_groups
        split = place // num_groups
        kv_head = (group // SHAPE.head_groups) % SHAPE.kv_heads
        a = group // (SHAPE.head_groups * SHAPE.kv_heads)
        prefix = of_sequence(rows.prefix, rows.seq, a)
        num_splits = splits_of(prefix, max_splits, SHAPE)
        if split < num_splits:
            slot = of_sequence(rows.slot, rows.seq, a).to(tl.int64)
            row = (a * ROWS).to(tl.int64)
            source_ptr = qkv_ptr + a.to(tl.int64) * SHAPE.qkv_size
            at = slot * cache.stride_slot + kv_head.to(tl.int64) * cache.stride_head
            mine = DraftCache(cache.key + at, cache.value + at, cache.stride_slot, cache.stride_head)
            chains = chain_at(chain_ptr, level, row, SHAPE.stride)
            first = (group * max_splits).to(tl.int64) * SHAPE.heads_per_unit * ROWS
            parts = AttentionSplits(splits.stats + first * 2, splits.weighted + first * SHAPE.block_d)
            unit = Unit(kv_head, group % SHAPE.head_groups, split, num_splits)
            num_new = of_sequence(rows.num_new, rows.seq, a)
            ALL_SPLITS: tl.constexpr = PROGRAMS // (SHAPE.stride * SHAPE.groups) < SHAPE.max_splits
            attend_unit(source_ptr, mine, rope, chains, parts, unit, prefix, num_new, level, SHAPE, ALL_SPLITS)


@triton.jit
def merge_heads(splits, out_ptr, rows, num_active, num_nodes, PROGRAMS: tl.constexpr, SHAPE: tl.constexpr):
    """Merge the splits of `attend` into the operand of the output projection: their softmax-weighted sums.

    ``out_ptr`` [rows, heads * head_dim], see `weight_stream.store_activation`.
    """
    HEADS: tl.constexpr = SHAPE.heads
    QUERIES: tl.constexpr = SHAPE.queries
    GROUP_ROWS: tl.constexpr = SHAPE.group_rows
    max_splits = splits_per_group(num_active, PROGRAMS, SHAPE)
    num_queries = num_active * num_nodes * HEADS
    for first in tl.range(tl.program_id(0) * QUERIES, num_queries, PROGRAMS * QUERIES, disable_licm=True):
        query = first + tl.arange(0, QUERIES) + hidden_zero()
        a = query // (num_nodes * HEADS)
        node = query // HEADS % num_nodes
        head = query % HEADS
        mask_q = query < num_queries
        prefix = tl.max(tl.where(rows.seq[None, :] == a[:, None], rows.prefix[None, :], 0), axis=1)
        # The group of units, and its row, that holds the query: as `attend` numbers them.
        in_group = head % SHAPE.group
        group = (a * SHAPE.kv_heads + head // SHAPE.group) * SHAPE.head_groups + in_group // SHAPE.heads_per_unit
        row = in_group % SHAPE.heads_per_unit * ROWS + node
        first_split = (group * max_splits).to(tl.int64)
        num_splits = splits_of(prefix, max_splits, SHAPE)
        out_row = node * SHAPE.stride + a
        zero = hidden_zero()
        offs_s = tl.arange(0, SHAPE.max_splits) + zero
        offs_d = tl.arange(0, SHAPE.block_d) + zero
        mask_d = (offs_d < SHAPE.head_dim)[None, :]
        split = first_split[:, None] + offs_s[None, :]  # [queries, splits]
        mask = (offs_s[None, :] < num_splits[:, None]) & mask_q[:, None]
        split_max = tl.load(splits.stats + split * 2 * GROUP_ROWS + row[:, None], mask=mask, other=float("-inf"))
        split_sum = tl.load(splits.stats + split * 2 * GROUP_ROWS + GROUP_ROWS + row[:, None], mask=mask, other=0.0)
        place = (split * GROUP_ROWS + row[:, None])[:, :, None] * SHAPE.block_d + offs_d[None, None, :]
        split_acc = tl.load(splits.weighted + place, mask=mask[:, :, None] & mask_d[:, None, :], other=0.0)
        top = tl.max(split_max, axis=1)
        weight = tl.exp2(split_max - tl.where(mask_q, top, 0.0)[:, None])
        norm = tl.where(mask_q, tl.sum(split_sum * weight, axis=1), 1.0)
        total = tl.sum(split_acc * weight[:, :, None], axis=1) / norm[:, None]
        column = (head * SHAPE.head_dim)[:, None] + offs_d[None, :]
        row_size: tl.constexpr = SHAPE.heads * SHAPE.head_dim
        store_activation(out_ptr, out_row.to(tl.int64)[:, None], column, total, mask_q[:, None] & mask_d, row_size)
