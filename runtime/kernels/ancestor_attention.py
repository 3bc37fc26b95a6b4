"""Attention of drafted nodes over a prefix and each node's own ancestors, with a running maximum.

Nodes of one level share the prefix but not their ancestors, which are not contiguous. Keys come from three places:

* *prefix*: cached positions ``[0, prefix)``, seen by every node;
* *tree*: cached nodes of earlier levels, slot ``j = (level - 1) * top_k + node`` at position ``prefix + j``; node n
  sees slot j when its chain names it: ``chain[n, j // top_k] == j`` (one slot of each earlier level);
* *fresh*: rows of this very pass, not yet cached: the node itself, or, in the extend pass, all new tokens.

Keys in the cache are already rotated; queries and fresh keys are rotated here (rotate-half, cos and sin tables of
``head_dim / 2`` columns). One unit of work is (sequence, kv head, group of query heads, part of the keys); parts are
merged, one query at a time, in a second step.

Worked example, top_k 2, level 3: slots 0 1 | 2 3 hold the nodes expanded at levels 1 and 2. A node whose parent is slot
3, whose parent is slot 0, has chain [0, 3]: it sees slots 0 and 3, never 1 or 2.

Limits: head_dim <= 256 and even; rows of one pass <= 16.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_tensors
from .weight_stream import hidden_zero, store_activation

ROWS = tl.constexpr(16)
"""Rows of one pass per sequence: new tokens of the extend pass, or nodes of a level."""


@triton.jit
def _rotate(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _fold(scores, visible, values, running_max, running_sum, acc, cache_ptr):
    """Fold one tile of scores (in units of log2) and values into the running softmax."""
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(running_max - shift)
    running_sum = running_sum * decay + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(cache_ptr.dtype.element_ty), values, acc * decay[:, None], input_precision="ieee")
    return new_max, running_sum, acc


@triton.jit
def attend_unit(
    qkv_ptr,  # fp32 [rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM], this sequence's ROWS rows
    key_ptr,  # cache of this slot and kv head: [positions, HEAD_DIM]
    value_ptr,
    cos_ptr,  # fp32 [positions, HEAD_DIM / 2]
    sin_ptr,
    chain_ptr,  # int32 [ROWS, MAX_DEPTH], this sequence's
    part_stat_ptr,  # fp32 [parts, 2, GROUP_ROWS] of this unit's group: running maximum and sum
    part_acc_ptr,  # fp32 [parts, GROUP_ROWS, BLOCK_D]: the weighted sum of values
    kv_head,
    head_group,
    part,
    num_parts,
    prefix,  # cached positions before this pass
    num_new,  # extend pass: new tokens; level >= 1: the positions they took
    level,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    HEADS_PER_UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, at least HEAD_DIM
    BLOCK_H: tl.constexpr,  # power of two, at least HEAD_DIM / 2 and 16
):
    """Do one unit of work; the last part also takes in the fresh keys, and caches them. `merge_parts` comes after."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    GROUP_ROWS: tl.constexpr = HEADS_PER_UNIT * ROWS
    SCALE: tl.constexpr = 1.4426950408889634 / HEAD_DIM**0.5
    dtype = key_ptr.dtype.element_ty
    zero = hidden_zero()
    offs_r = tl.arange(0, GROUP_ROWS) + zero
    offs_h = tl.arange(0, BLOCK_H) + zero
    offs_d = tl.arange(0, BLOCK_D) + zero
    offs_f = tl.arange(0, ROWS) + zero
    offs_t = tl.arange(0, BLOCK_T) + zero
    mask_h = offs_h < HALF
    mask_d = offs_d < HEAD_DIM
    is_extend = level == 0
    num_queries = tl.where(is_extend, 1, TOP_K)
    num_fresh = tl.where(is_extend, num_new, TOP_K)
    cached = tl.where(is_extend, prefix, prefix + num_new)  # keys that every query of this pass sees in the cache
    node = offs_r % ROWS
    head_in_group = head_group * HEADS_PER_UNIT + offs_r // ROWS
    mask_r = (node < num_queries) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    # In the extend pass the only query is the last new token.
    query_row = tl.where(is_extend, num_new - 1, node)
    position = prefix + num_new - 1 + level
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + offs_h, mask=mask_h, other=0.0)
    q_offs = query_row[:, None] * WIDTH + head[:, None] * HEAD_DIM + offs_h[None, :]
    mask_q = mask_r[:, None] & mask_h[None, :]
    q_low, q_high = _rotate(
        tl.load(qkv_ptr + q_offs, mask=mask_q, other=0.0) * SCALE,
        tl.load(qkv_ptr + q_offs + HALF, mask=mask_q, other=0.0) * SCALE,
        cos[None, :],
        sin[None, :],
    )
    q_low, q_high = q_low.to(dtype), q_high.to(dtype)
    running_max = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)

    # The last part takes the fresh keys, the one before it the tree's; the others share the prefix tile by tile.
    fresh_part = num_parts - 1
    tree_part = tl.maximum(num_parts - 2, 0)
    tiles = tl.cdiv(tl.cdiv(cached, BLOCK_T), tl.maximum(num_parts - 2, 1))
    start = part * tiles * BLOCK_T
    stop = tl.where((part >= tree_part) & (part > 0), 0, tl.minimum(start + tiles * BLOCK_T, cached))
    for t0 in range(start, stop, BLOCK_T):
        mask_t = t0 + offs_t < stop
        row = (t0 + offs_t).to(tl.int64) * HEAD_DIM
        mask_ht = mask_h[:, None] & mask_t[None, :]
        k_low = tl.load(key_ptr + row[None, :] + offs_h[:, None], mask=mask_ht, other=0.0)
        k_high = tl.load(key_ptr + row[None, :] + offs_h[:, None] + HALF, mask=mask_ht, other=0.0)
        v = tl.load(value_ptr + row[:, None] + offs_d[None, :], mask=mask_t[:, None] & mask_d[None, :], other=0.0)
        scores = tl.dot(q_low, k_low, input_precision="ieee")
        scores = tl.dot(q_high, k_high, scores, input_precision="ieee")
        running_max, running_sum, acc = _fold(
            scores, mask_t[None, :] & mask_r[:, None], v, running_max, running_sum, acc, key_ptr
        )

    num_slots = tl.maximum(level - 1, 0) * TOP_K
    if part == tree_part:
        for j0 in tl.range(0, num_slots, BLOCK_T, num_stages=1):
            slot = j0 + offs_t
            mask_t = slot < num_slots
            row = (cached + slot).to(tl.int64) * HEAD_DIM
            mask_ht = mask_h[:, None] & mask_t[None, :]
            link = tl.load(
                chain_ptr + node[:, None] * MAX_DEPTH + (slot // TOP_K)[None, :],
                mask=mask_r[:, None] & mask_t[None, :],
                other=-1,
            )
            k_low = tl.load(key_ptr + row[None, :] + offs_h[:, None], mask=mask_ht, other=0.0)
            k_high = tl.load(key_ptr + row[None, :] + offs_h[:, None] + HALF, mask=mask_ht, other=0.0)
            v = tl.load(value_ptr + row[:, None] + offs_d[None, :], mask=mask_t[:, None] & mask_d[None, :], other=0.0)
            scores = tl.dot(q_low, k_low, input_precision="ieee")
            scores = tl.dot(q_high, k_high, scores, input_precision="ieee")
            running_max, running_sum, acc = _fold(
                scores, link == slot[None, :], v, running_max, running_sum, acc, key_ptr
            )
    if part == fresh_part:
        fresh_position = (position + tl.where(is_extend, offs_f - num_new + 1, offs_f * 0)).to(tl.int64)
        mask_f = offs_f < num_fresh
        mask_fh = mask_f[:, None] & mask_h[None, :]
        mask_fd = mask_f[:, None] & mask_d[None, :]
        fresh_cos = tl.load(cos_ptr + fresh_position[:, None] * HALF + offs_h[None, :], mask=mask_fh, other=0.0)
        fresh_sin = tl.load(sin_ptr + fresh_position[:, None] * HALF + offs_h[None, :], mask=mask_fh, other=0.0)
        k_offs = offs_f[:, None] * WIDTH + (HEADS + kv_head) * HEAD_DIM + offs_h[None, :]
        fresh_low = tl.load(qkv_ptr + k_offs, mask=mask_fh, other=0.0)
        fresh_high = tl.load(qkv_ptr + k_offs + HALF, mask=mask_fh, other=0.0)
        v_offs = offs_f[:, None] * WIDTH + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + offs_d[None, :]
        fresh_v = tl.load(qkv_ptr + v_offs, mask=mask_fd, other=0.0)
        k_low, k_high = _rotate(fresh_low, fresh_high, fresh_cos, fresh_sin)
        k_low, k_high = k_low.to(dtype), k_high.to(dtype)
        v = fresh_v.to(dtype)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
        visible = mask_r[:, None] & mask_f[None, :] & (is_extend | (node[:, None] == offs_f[None, :]))
        running_max, running_sum, acc = _fold(scores, visible, v, running_max, running_sum, acc, key_ptr)
        if head_group == 0:
            place = cached + offs_f + num_slots
            cache_row = place.to(tl.int64)[:, None] * HEAD_DIM
            tl.store(key_ptr + cache_row + offs_h[None, :], k_low, mask=mask_fh)
            tl.store(key_ptr + cache_row + offs_h[None, :] + HALF, k_high, mask=mask_fh)
            tl.store(value_ptr + cache_row + offs_d[None, :], v, mask=mask_fd)

    stat = part_stat_ptr + part * 2 * GROUP_ROWS + offs_r
    tl.store(stat, running_max)
    tl.store(stat + GROUP_ROWS, running_sum)
    acc_offs = offs_r[:, None] * BLOCK_D + offs_d[None, :]
    mask_out = mask_r[:, None] & mask_d[None, :]
    tl.store(part_acc_ptr + part * GROUP_ROWS * BLOCK_D + acc_offs, acc, mask=mask_out)


@triton.jit
def query_place(a, node, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_PER_UNIT: tl.constexpr):
    """Which group of units, and which of its rows, holds a query of the a-th sequence."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GROUPS: tl.constexpr = (GROUP + HEADS_PER_UNIT - 1) // HEADS_PER_UNIT
    in_group = head % GROUP
    group = (a * KV_HEADS + head // GROUP) * GROUPS + in_group // HEADS_PER_UNIT
    return group, in_group % HEADS_PER_UNIT * ROWS + node


@triton.jit
def merge_parts(
    part_stat_ptr,
    part_acc_ptr,
    first_part,  # int64 [queries]: number of the first part of each query's group
    row,  # [queries]: its row in the group
    num_parts,  # [queries]
    mask_q,
    out_ptr,  # [rows, ROW_SIZE], see `weight_stream.store_activation`
    out_row,  # [queries]
    out_column,  # [queries]: first column of the query's head
    ROW_SIZE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Merge the parts of some queries: the softmax-weighted sum of what each part saw."""
    zero = hidden_zero()
    offs_p = tl.arange(0, MAX_PARTS) + zero
    offs_d = tl.arange(0, BLOCK_D) + zero
    mask_d = (offs_d < HEAD_DIM)[None, :]
    part = first_part[:, None] + offs_p[None, :]  # [queries, parts]
    mask = (offs_p[None, :] < num_parts[:, None]) & mask_q[:, None]
    part_max = tl.load(part_stat_ptr + part * 2 * GROUP_ROWS + row[:, None], mask=mask, other=float("-inf"))
    part_sum = tl.load(part_stat_ptr + part * 2 * GROUP_ROWS + GROUP_ROWS + row[:, None], mask=mask, other=0.0)
    place = (part * GROUP_ROWS + row[:, None])[:, :, None] * BLOCK_D + offs_d[None, None, :]
    part_acc = tl.load(part_acc_ptr + place, mask=mask[:, :, None] & mask_d[:, None, :], other=0.0)
    top = tl.max(part_max, axis=1)
    weight = tl.exp2(part_max - tl.where(mask_q, top, 0.0)[:, None])
    norm = tl.where(mask_q, tl.sum(part_sum * weight, axis=1), 1.0)
    total = tl.sum(part_acc * weight[:, :, None], axis=1) / norm[:, None]
    column = out_column[:, None] + offs_d[None, :]
    store_activation(out_ptr, out_row.to(tl.int64)[:, None], column, total, mask_q[:, None] & mask_d, ROW_SIZE)


@triton.jit
def count_parts(num_active, NUM_CTAS: tl.constexpr, GROUPS: tl.constexpr, MAX_PARTS: tl.constexpr):
    """Most parts that a group of GROUPS per sequence is split into, so that every program has work once."""
    return tl.minimum(tl.maximum(NUM_CTAS // (num_active * GROUPS), 1), MAX_PARTS)


@triton.jit
def of_sequence(value, seq, a):
    """The value of sequence ``a`` among ``value`` [rows], whose rows belong to ``seq`` [rows]; int32, not negative.

    Kept in registers, such values need not be read again after each barrier.
    """
    return tl.max(tl.where(seq == a, value, 0), axis=0)


@triton.jit
def attend(
    qkv_ptr, key_ptr, value_ptr, stride_cache_slot, stride_cache_head, cos_ptr, sin_ptr, chain_ptr,
    part_stat_ptr, part_acc_ptr, seq, row_slot, row_prefix, row_new, num_active, level,
    NUM_CTAS: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TOP_K: tl.constexpr, MAX_DEPTH: tl.constexpr, PART_KEYS: tl.constexpr, MAX_PARTS: tl.constexpr,
    HEADS_PER_UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Do this program's units of one level: all active sequences and heads, prefixes split in parts.

    ``seq``, ``row_slot``, ``row_prefix``, ``row_new`` int32 [rows]: the active sequence each row belongs to, and that
    sequence's slot, cached positions and number of new tokens.
    """
    HEAD_GROUPS: tl.constexpr = (HEADS // KV_HEADS + HEADS_PER_UNIT - 1) // HEADS_PER_UNIT
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    num_groups = num_active * (KV_HEADS * HEAD_GROUPS)
    most_parts = count_parts(num_active, NUM_CTAS, KV_HEADS * HEAD_GROUPS, MAX_PARTS)
    for index in tl.range(tl.program_id(0), num_groups * most_parts, NUM_CTAS, disable_licm=True):
        unit = index + num_active * 0
        group = unit % num_groups
        part = unit // num_groups
        kv_head = (group // HEAD_GROUPS) % KV_HEADS
        a = group // (HEAD_GROUPS * KV_HEADS)
        prefix = of_sequence(row_prefix, seq, a)
        num_parts = tl.minimum(most_parts, tl.cdiv(prefix, PART_KEYS) + 2)
        if part < num_parts:
            slot = of_sequence(row_slot, seq, a).to(tl.int64)
            cache = slot * stride_cache_slot + kv_head.to(tl.int64) * stride_cache_head
            row = (a * ROWS).to(tl.int64)
            parts = (group * most_parts).to(tl.int64) * HEADS_PER_UNIT * ROWS
            attend_unit(
                qkv_ptr + row * WIDTH, key_ptr + cache, value_ptr + cache, cos_ptr, sin_ptr,
                chain_ptr + ((level % 2) * SLOTS * ROWS + row) * MAX_DEPTH,
                part_stat_ptr + parts * 2, part_acc_ptr + parts * BLOCK_D,
                kv_head, group % HEAD_GROUPS, part, num_parts, prefix, of_sequence(row_new, seq, a), level,
                HEADS, KV_HEADS, HEAD_DIM, TOP_K, MAX_DEPTH, HEADS_PER_UNIT, BLOCK_T, BLOCK_D, BLOCK_H,
            )  # fmt: skip


@triton.jit
def merge_heads(
    part_stat_ptr, part_acc_ptr, out_ptr, seq, row_prefix, num_active, num_nodes,
    NUM_CTAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PART_KEYS: tl.constexpr, MAX_PARTS: tl.constexpr, QUERIES: tl.constexpr, HEADS_PER_UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge what `attend` left, QUERIES queries at a time, into the operand of the output projection."""
    HEAD_GROUPS: tl.constexpr = (HEADS // KV_HEADS + HEADS_PER_UNIT - 1) // HEADS_PER_UNIT
    most_parts = count_parts(num_active, NUM_CTAS, KV_HEADS * HEAD_GROUPS, MAX_PARTS)
    num_queries = num_active * num_nodes * HEADS
    for first in tl.range(tl.program_id(0) * QUERIES, num_queries, NUM_CTAS * QUERIES, disable_licm=True):
        query = first + tl.arange(0, QUERIES) + hidden_zero()
        a = query // (num_nodes * HEADS)
        node = query // HEADS % num_nodes
        head = query % HEADS
        mask = query < num_queries
        prefix = tl.max(tl.where(seq[None, :] == a[:, None], row_prefix[None, :], 0), axis=1)
        num_parts = tl.minimum(most_parts, tl.cdiv(prefix, PART_KEYS) + 2)
        group, row = query_place(a, node, head, HEADS, KV_HEADS, HEADS_PER_UNIT)
        merge_parts(
            part_stat_ptr, part_acc_ptr, (group * most_parts).to(tl.int64), row, num_parts, mask,
            out_ptr, a * ROWS + node, head * HEAD_DIM, HEADS * HEAD_DIM,
            HEADS_PER_UNIT * ROWS, HEAD_DIM, BLOCK_D, MAX_PARTS,
        )  # fmt: skip


@triton.jit
def _attention_kernel(
    qkv_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, chain_ptr, part_stat_ptr, part_acc_ptr,
    prefix_ptr, num_new_ptr, level, stride_slot, stride_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOP_K: tl.constexpr, MAX_DEPTH: tl.constexpr,
    HEADS_PER_UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (HEADS // KV_HEADS + HEADS_PER_UNIT - 1) // HEADS_PER_UNIT
    group = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    kv_head = (group // GROUPS) % KV_HEADS
    slot = group // (GROUPS * KV_HEADS)
    cache = slot.to(tl.int64) * stride_slot + kv_head.to(tl.int64) * stride_head
    parts = group.to(tl.int64) * num_parts * HEADS_PER_UNIT * ROWS
    attend_unit(
        qkv_ptr + slot * ROWS * (HEADS + 2 * KV_HEADS) * HEAD_DIM, key_ptr + cache, value_ptr + cache,
        cos_ptr, sin_ptr, chain_ptr + slot * ROWS * MAX_DEPTH, part_stat_ptr + parts * 2, part_acc_ptr + parts *
        BLOCK_D, kv_head, group % GROUPS, part, num_parts, tl.load(prefix_ptr + slot), tl.load(num_new_ptr + slot),
        level + slot * 0,
        HEADS, KV_HEADS, HEAD_DIM, TOP_K, MAX_DEPTH, HEADS_PER_UNIT, BLOCK_T, BLOCK_D, BLOCK_H,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    part_stat_ptr, part_acc_ptr, out_ptr, num_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    slot, node = tl.program_id(0), tl.program_id(1)
    head = tl.program_id(2) + tl.arange(0, 1)
    group, row = query_place(slot, node, head, HEADS, KV_HEADS, HEADS_PER_UNIT)
    merge_parts(
        part_stat_ptr, part_acc_ptr, group.to(tl.int64) * num_parts, row, head * 0 + num_parts, head >= 0,
        out_ptr, head * 0 + slot * ROWS + node, head * HEAD_DIM, HEADS * HEAD_DIM,
        HEADS_PER_UNIT * ROWS, HEAD_DIM, BLOCK_D, MAX_PARTS,
    )  # fmt: skip


def ancestor_attention_ref(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, chain: Tensor,
    prefix: Tensor, num_new: Tensor, level: int, heads: int, kv_heads: int, top_k: int,
) -> Tensor:  # fmt: skip
    """Definition, one node and one head at a time in fp32; arguments as `ancestor_attention`, the cache is filled
    too."""
    slots, _, _, head_dim = keys.shape
    half = head_dim // 2
    out = torch.zeros(slots, 16, heads, head_dim)
    for slot in range(slots):
        past, new = int(prefix[slot]), int(num_new[slot])
        rows = qkv[slot].float().unflatten(-1, (-1, head_dim))  # [rows, heads + 2 kv_heads, head_dim]
        num_rows = new if level == 0 else top_k
        first = past if level == 0 else past + new + (level - 1) * top_k
        for i in range(num_rows):
            position = past + i if level == 0 else past + new - 1 + level
            c, s = cos[position].float(), sin[position].float()
            low, high = rows[i, : heads + kv_heads, :half].clone(), rows[i, : heads + kv_heads, half:].clone()
            rows[i, : heads + kv_heads, :half] = low * c - high * s
            rows[i, : heads + kv_heads, half:] = high * c + low * s
            keys[slot, :, first + i] = rows[i, heads : heads + kv_heads].to(keys.dtype)
            values[slot, :, first + i] = rows[i, heads + kv_heads :].to(values.dtype)
        for node in range(1 if level == 0 else top_k):
            query = rows[new - 1 if level == 0 else node]
            seen = list(range(past + new))
            if level > 0:
                seen += [past + new + int(chain[slot, node, e]) for e in range(level - 1)] + [first + node]
            for head in range(heads):
                k = keys[slot, head // (heads // kv_heads), seen].float()
                v = values[slot, head // (heads // kv_heads), seen].float()
                out[slot, node, head] = torch.softmax(k @ query[head] / math.sqrt(head_dim), 0) @ v
    return out.flatten(2)


def ancestor_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, chain: Tensor,
    prefix: Tensor, num_new: Tensor, level: int, heads: int, kv_heads: int, top_k: int,
    num_parts: int = 1, block_t: int = 64,
) -> Tensor:  # fmt: skip
    """Attend one pass of drafted nodes, and append their keys and values to the cache.

    ``qkv`` fp32 [slots, 16, (heads + 2 kv_heads) * head_dim], not rotated; ``keys``, ``values`` [slots, kv_heads,
    positions, head_dim] of one dtype; ``cos``, ``sin`` fp32 [positions, head_dim / 2]; ``chain`` int32 [slots, 16,
    max_depth]; ``prefix``, ``num_new`` int32 [slots]. Level 0 is the extend pass: rows are the new tokens, only the
    last one queries. Returns [slots, 16, heads * head_dim] of the cache's dtype; rows that do not query are undefined.
    Raises `ValueError` for other tensors and levels; that all positions are within the cache is the caller's to see to.
    """
    if keys.dim() != 4 or heads % kv_heads or not 1 <= top_k <= 16 or not 0 <= level <= chain.shape[-1] + 1:
        raise ValueError(
            f"keys {list(keys.shape)} must have 4 dimensions, {heads=} be a multiple of {kv_heads=}, {top_k=} be 1..16 "
            f"and {level=} within the {chain.shape[-1]} levels of chain and one more"
        )
    slots, _, positions, head_dim = keys.shape
    cache = (slots, kv_heads, positions, head_dim)
    turns = (cos.shape[0] if cos.dim() == 2 else None, head_dim // 2)
    check_tensors(
        qkv.device, qkv=(qkv, torch.float32, (slots, 16, (heads + 2 * kv_heads) * head_dim)),
        keys=(keys, keys.dtype, cache), values=(values, keys.dtype, cache),
        cos=(cos, torch.float32, turns), sin=(sin, torch.float32, turns),
        chain=(chain, torch.int32, (slots, 16, None)),
        prefix=(prefix, torch.int32, (slots,)), num_new=(num_new, torch.int32, (slots,)),
    )  # fmt: skip
    heads_per_unit = heads_per_attention_unit(heads // kv_heads, head_dim)
    groups = slots * kv_heads * -(-(heads // kv_heads) // heads_per_unit)
    block_d = triton.next_power_of_2(head_dim)
    device = qkv.device
    out = torch.empty(slots, 16, heads * head_dim, dtype=keys.dtype, device=device)
    stats = torch.empty(groups, num_parts, 2, heads_per_unit * 16, dtype=torch.float32, device=device)
    accs = torch.empty(groups, num_parts, heads_per_unit * 16, block_d, dtype=torch.float32, device=device)
    _attention_kernel[(groups, num_parts)](
        qkv, keys, values, cos, sin, chain, stats, accs, prefix, num_new, level,
        keys.stride(0), keys.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, TOP_K=top_k, MAX_DEPTH=chain.shape[-1],
        HEADS_PER_UNIT=heads_per_unit, BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_H=max(16, block_d // 2), num_warps=8,
    )  # fmt: skip
    _merge_kernel[(slots, 1 if level == 0 else top_k, heads)](
        stats, accs, out, num_parts,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HEADS_PER_UNIT=heads_per_unit, BLOCK_D=block_d,
        MAX_PARTS=max(2, triton.next_power_of_2(num_parts)), num_warps=4,
    )  # fmt: skip
    return out


def heads_per_attention_unit(group: int, head_dim: int) -> int:
    """Query heads handled together: a power of two that keeps the accumulator within 128 rows of 128 columns."""
    return min(int(triton.next_power_of_2(group)), 8 if head_dim <= 128 else 4)
