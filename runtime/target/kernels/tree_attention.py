"""Attention of a forward's rows over a long prefix and their own ancestors, split over the keys.

A place is one sequence of the batch with ``nodes`` rows: the nodes of a draft tree, or the tokens of a prompt's chunk.
Its keys lie in its slot's cache: ``length`` committed rows, then one row for each of its own. Node n sees the committed
rows and those own rows that its ancestor bits name (bit m of word m // 64: n descends from m, or is m); in a chunk
(no bits) row n sees the rows up to itself.

    softmax(q k^T * scale) v, over key rows 0 .. length + count - 1      (count: rows of the place in use)

``softcap`` c replaces a score s by c tanh(s / c) (Gemma 2); ``sinks`` add to each head's sum the weight of a key that
gives nothing (gpt-oss), which the merge does.

The query heads that share a key head are laid side by side as rows of one product, so a key is read from memory once
and shared by the query blocks through the L2. The keys are cut into splits: at most as many as give the GPU enough
programs (`choose_splits`, by the number of places), of which the device uses those that the length asks for; a second
launch merges them. fp32 accumulation throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NODES_PER_WORD = 64


class AttentionRows(NamedTuple):
    """Which rows attend to what: shared by all layers of a forward; all on one device.

    ``slots`` int32 [places] (-1: an empty place); ``lengths`` int32 [slots]: committed rows, by slot; ``counts`` int32
    [places]: rows in use; ``ancestors`` int64 [places, nodes, words] or None for a chunk; ``depths`` int32
    [places, nodes]: distance of a row from the first in positions, read by sliding windows only.
    """

    slots: Tensor
    lengths: Tensor
    counts: Tensor
    ancestors: Tensor | None
    depths: Tensor

    def tree_mask(self) -> Tensor:
        """Which own row each row sees: bool [places, nodes, nodes]."""
        nodes = self.depths.shape[1]
        node = torch.arange(nodes, device=self.depths.device)
        if self.ancestors is None:
            return (node[:, None] >= node).expand(len(self.slots), nodes, nodes)
        return (self.ancestors[:, :, node // NODES_PER_WORD] >> (node % NODES_PER_WORD)) & 1 == 1


class AttentionScratch(NamedTuple):
    """Partial results, fp32: ``out`` [parts, rows, head_dim], ``stats`` [parts, rows, 2] (largest, sum).

    A part is a split of a place; the splits of a place lie together.
    """

    out: Tensor
    stats: Tensor

    @classmethod
    def allocate(
        cls, parts: int, nodes: int, heads: int, head_dim: int, device: torch.device | str
    ) -> AttentionScratch:
        """Allocate for ``nodes`` rows of ``heads`` query heads in each of ``parts`` (`most_parts`)."""
        shape = (parts, nodes * heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )


def tree_attention_ref(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionRows,
    scale: float,
    window: int | None,
    out: Tensor,
    scratch: AttentionScratch | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attend, in fp32.

    ``qkv`` [places * nodes, >= heads * head_dim]: rotated queries in the first columns; ``keys``, ``values`` [slots,
    kv_heads, capacity, head_dim]; ``window``: a key is seen if query position - key position is below it; ``out``
    [places * nodes, heads * head_dim]. ``sinks`` [heads], of any float type. Rows of empty places and rows from
    ``counts`` on are set to 0.
    """
    places, kv_heads, head_dim = len(rows.slots), keys.shape[1], keys.shape[3]
    nodes, heads = qkv.shape[0] // places, out.shape[1] // head_dim
    out.zero_()
    for place in range(places):
        slot, count = int(rows.slots[place]), int(rows.counts[place])
        if slot < 0 or count == 0:
            continue
        length = int(rows.lengths[slot])
        seen = rows.tree_mask()[place, :count, :count]
        seen = torch.cat((seen.new_ones((count, length)), seen), 1)
        if window is not None:
            depth = rows.depths[place, :count].long()
            at = torch.cat((torch.arange(length, device=qkv.device), length + depth))
            seen &= (length + depth)[:, None] - at < window
        query = qkv[place * nodes : place * nodes + count, : heads * head_dim].view(count, heads, head_dim)
        key, value = (
            cache[slot, :, : length + count].float().repeat_interleave(heads // kv_heads, 0) for cache in (keys, values)
        )
        scores = torch.einsum("nhd,hkd->hnk", query.float(), key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, 1)), -1)
        weights = scores.softmax(-1)[..., : length + count]
        attended = torch.einsum("hnk,hkd->nhd", weights, value).flatten(1)
        out[place * nodes : place * nodes + count] = attended.to(out.dtype)


class AttentionNumbers(NamedTuple):
    """Numbers of a layer, and distances in elements: of queries' rows, and of slots and heads in the cache."""

    scale: float
    softcap: float
    window: int
    stride_query: int
    stride_slot: int
    stride_head: int


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels are compiled for; ``block_d``: ``head_dim`` to a power of two."""

    nodes: int
    group: int
    kv_heads: int
    head_dim: int
    block_d: int
    words: int
    is_causal: bool
    has_window: bool
    is_capped: bool
    precision: str


@dataclass(frozen=True)
class AttentionTiles:
    """How the kernel cuts its work: query rows, keys a tile, warps and pipeline stages."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _scores(q, key, numbers, SHAPE: tl.constexpr):
    """Scores in powers of two."""
    score = tl.dot(q, key, input_precision=SHAPE.precision) * (numbers.scale * 1.4426950408889634)
    if SHAPE.is_capped:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        cap = numbers.softcap * 1.4426950408889634
        score = cap - 2.0 * cap / (tl.exp2(score * (2.0 / numbers.softcap)) + 1.0)
    return score


@triton.jit
def _splits_in_use(total, most, keys_per_split):
    return tl.minimum(tl.maximum(tl.cdiv(total, keys_per_split), 1), most)


# Batches of all sizes share a kernel.
@triton.jit(do_not_specialize=["most", "keys_per_split"])
def _tree_attention_kernel(
    q_ptr, key_ptr, value_ptr, rows, scratch, numbers, most, keys_per_split, SHAPE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    NODES: tl.constexpr = SHAPE.nodes
    GROUP: tl.constexpr = SHAPE.group
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    BLOCK_Q: tl.constexpr = TILES.block_q
    BLOCK_K: tl.constexpr = TILES.block_k
    kv_head = tl.program_id(0) % KV_HEADS
    block = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    place = tl.program_id(2).to(tl.int64)
    slot = tl.load(rows.slots + place).to(tl.int64)
    if slot < 0:
        return
    length = tl.load(rows.lengths + slot)
    count = tl.load(rows.counts + place)
    total = length + count
    splits = _splits_in_use(total, most, keys_per_split)
    if split >= splits:
        return

    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    in_use = node < tl.minimum(count, NODES)
    d = tl.arange(0, SHAPE.block_d)
    in_head = d < HEAD_DIM
    q_at = (place * NODES + node)[:, None] * numbers.stride_query + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + q_at, mask=in_use[:, None] & in_head[None, :], other=0.0)
    if SHAPE.has_window:
        depth = tl.load(rows.depths + place * NODES + node, mask=in_use, other=0)
        query_position = length + depth

    # Each split takes whole tiles, so that the committed keys need no mask.
    per_split = tl.cdiv(tl.cdiv(total, splits), BLOCK_K) * BLOCK_K
    first = split * per_split
    last = tl.minimum(first + per_split, total)
    if SHAPE.is_causal:
        last = tl.minimum(last, length + (block * BLOCK_Q + BLOCK_Q - 1) // GROUP + 1)
    unmasked = tl.minimum(last, length // BLOCK_K * BLOCK_K)
    if SHAPE.has_window:
        first = tl.maximum(first, tl.maximum(length - numbers.window + 1, 0) // BLOCK_K * BLOCK_K)
        unmasked = first

    best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    sum_exp = tl.full([BLOCK_Q], 0.0, tl.float32)
    acc = tl.full([BLOCK_Q, SHAPE.block_d], 0.0, tl.float32)
    base = slot * numbers.stride_slot + kv_head * numbers.stride_head
    for start in range(first, unmasked, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        key = tl.load(key_ptr + base + k[None, :] * HEAD_DIM + d[:, None], mask=in_head[:, None], other=0.0)
        score = _scores(q, key, numbers, SHAPE)
        new_best = tl.maximum(best, tl.max(score, 1))
        decay = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        value = tl.load(value_ptr + base + k[:, None] * HEAD_DIM + d[None, :], mask=in_head[None, :], other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision=SHAPE.precision)
        sum_exp = sum_exp * decay + tl.sum(weight, 1)
        best = new_best
    if not SHAPE.is_causal:
        words = rows.ancestors + (place * NODES + node) * SHAPE.words
        low = tl.load(words, mask=in_use, other=0)
        if SHAPE.words == 2:
            high = tl.load(words + 1, mask=in_use, other=0)
    # A few tiles at most: stages would only cost shared memory.
    for start in tl.range(tl.maximum(first, unmasked), last, BLOCK_K, num_stages=1):
        k = start + tl.arange(0, BLOCK_K)
        there = k < last
        # Masked in both products: a row that was never written may hold NaN.
        key = tl.load(
            key_ptr + base + k[None, :] * HEAD_DIM + d[:, None], mask=in_head[:, None] & there[None, :], other=0.0
        )
        score = _scores(q, key, numbers, SHAPE)
        own = k - length
        if SHAPE.is_causal:
            seen = there[None, :] & (own[None, :] <= node[:, None])
        else:
            shift = (tl.maximum(own, 0) % 64).to(tl.int64)
            is_ancestor = (low[:, None] >> shift[None, :]) & 1
            if SHAPE.words == 2:
                is_ancestor = tl.where((own >= 64)[None, :], (high[:, None] >> shift[None, :]) & 1, is_ancestor)
            seen = there[None, :] & ((own < 0)[None, :] | (is_ancestor != 0))
        if SHAPE.has_window:
            is_own = there & (own >= 0)
            key_depth = tl.load(rows.depths + place * NODES + tl.maximum(own, 0), mask=is_own, other=0)
            key_position = tl.where(own >= 0, length + key_depth, k)
            seen = seen & (query_position[:, None] - key_position[None, :] < numbers.window)
        score = tl.where(seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        # A row that has seen nothing yet: no -inf minus -inf.
        base_score = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - base_score)
        weight = tl.exp2(score - base_score[:, None])
        value = tl.load(
            value_ptr + base + k[:, None] * HEAD_DIM + d[None, :], mask=in_head[None, :] & there[:, None], other=0.0
        )
        acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision=SHAPE.precision)
        sum_exp = sum_exp * decay + tl.sum(weight, 1)
        best = new_best

    to = (place * most + split) * NODES * GROUP * KV_HEADS + node * GROUP * KV_HEADS + head
    tl.store(scratch.out + to[:, None] * HEAD_DIM + d[None, :], acc, mask=in_use[:, None] & in_head[None, :])
    tl.store(scratch.stats + to * 2, best, mask=in_use)
    tl.store(scratch.stats + to * 2 + 1, sum_exp, mask=in_use)


@triton.jit(do_not_specialize=["most", "keys_per_split"])
def _merge_kernel(
    rows, scratch, sink_ptr, out_ptr, most, keys_per_split, SHAPE: tl.constexpr, BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    NODES: tl.constexpr = SHAPE.nodes
    HEADS: tl.constexpr = SHAPE.group * SHAPE.kv_heads
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    row = tl.program_id(0)
    head = tl.program_id(1)
    place = (row // NODES).to(tl.int64)
    node = row % NODES
    slot = tl.load(rows.slots + place).to(tl.int64)
    d = tl.arange(0, SHAPE.block_d)
    in_head = d < HEAD_DIM
    to = (row.to(tl.int64) * HEADS + head) * HEAD_DIM + d
    count = tl.load(rows.counts + place)
    if (slot < 0) | (node >= count):
        tl.store(out_ptr + to, tl.full([SHAPE.block_d], 0.0, tl.float32), mask=in_head)
        return
    splits = _splits_in_use(tl.load(rows.lengths + slot) + count, most, keys_per_split)
    split = tl.arange(0, BLOCK_S)
    used = split < splits
    at = (place * most + split) * NODES * HEADS + node * HEADS + head
    best = tl.load(scratch.stats + at * 2, mask=used, other=float("-inf"))
    largest = tl.max(best)
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    factor = tl.exp2(best - largest)
    total = tl.sum(tl.load(scratch.stats + at * 2 + 1, mask=used, other=0.0) * factor)
    if SINKS:
        total += tl.exp2(sink - largest)
    part = tl.load(scratch.out + at[:, None] * HEAD_DIM + d[None, :], mask=used[:, None] & in_head[None, :], other=0.0)
    tl.store(out_ptr + to, tl.sum(part * factor[:, None], 0) / total, mask=in_head)


@dataclass(frozen=True)
class Splits:
    """Into how many splits a sequence's keys are cut: as many as its length makes, and at most ``most``."""

    most: int
    keys: int
    """Of a split, at least."""

    def in_use(self, total: int) -> int:
        """Splits of ``total`` keys."""
        return min(self.most, max(1, -(-total // self.keys)))


MAX_SPLITS = 32
"""Parts that the merge reads at once."""


def attention_tiles(query_rows: int, head_dim: int, dtype: torch.dtype, major: int = 9) -> AttentionTiles:
    """Choose tiles from the query rows of one key head (nodes * group) and the chip's major compute capability.

    Measured on one H200, 60 nodes of Llama-3.1-8B dimensions: 64 and 128 query rows did equally well, 256 spilled.
    Before sm_90, whose products keep their operands in shared memory, four warps spill as well.
    """
    block_q = max(16, min(64, triton.next_power_of_2(query_rows)))
    wide = head_dim > 128 or dtype == torch.float32
    return AttentionTiles(block_q, 32 if wide else 64, 8 if major < 9 and block_q == 64 else 4, 2 if wide else 3)


def major_capability(device: torch.device) -> int:
    """The first number of a GPU's compute capability; 9 where there is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def num_processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; those of an H200 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def choose_splits(places: int, kv_heads: int, query_rows: int, tiles: AttentionTiles, num_sms: int) -> Splits:
    """Choose splits for ``places`` sequences side by side, of ``query_rows`` for each key head.

    A unit is a block of query rows of a key head. A program for each multiprocessor is best where units are so few that
    a sequence is cut into eight or more; else two, which is what a multiprocessor holds at once. Measured on one H200
    at Llama-3.1-8B's dimensions, 1 and 60 nodes, 1 to 16 sequences, 512 to 131,072 keys (docs/kernels.md): within 5% of
    the best of each row.
    """
    units = places * kv_heads * -(-query_rows // tiles.block_q)
    most = num_sms // units if 8 * units <= num_sms else 2 * num_sms // units
    return Splits(max(1, min(MAX_SPLITS, most)), 128 if 4 * units <= num_sms else 512)


def most_parts(
    places: int, nodes: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Parts of a scratch for up to ``places`` sequences of ``nodes`` rows."""
    query_rows, num_sms = nodes * heads // kv_heads, num_processors(device)
    tiles = attention_tiles(query_rows, head_dim, dtype, major_capability(device))
    return max(
        count * choose_splits(count, kv_heads, query_rows, tiles, num_sms).most for count in range(1, places + 1)
    )


def tree_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionRows,
    scale: float,
    window: int | None,
    out: Tensor,
    scratch: AttentionScratch | None,
    tiles: AttentionTiles | None = None,
    splits: Splits | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Run `tree_attention_ref` as two launches; ``scratch`` is allocated for at least these places, rows and heads.

    ``tiles`` and ``splits`` override `attention_tiles` and `choose_splits`.
    """
    assert scratch is not None
    places, kv_heads, head_dim = len(rows.slots), keys.shape[1], keys.shape[3]
    nodes, heads = qkv.shape[0] // places, out.shape[1] // head_dim
    group = heads // kv_heads
    tiles = tiles or attention_tiles(nodes * group, head_dim, qkv.dtype, major_capability(qkv.device))
    splits = splits or choose_splits(places, kv_heads, nodes * group, tiles, num_processors(qkv.device))
    block_d = max(16, triton.next_power_of_2(head_dim))
    shape = AttentionShape(
        nodes, group, kv_heads, head_dim, block_d, 1 if rows.ancestors is None else rows.ancestors.shape[2],
        rows.ancestors is None, window is not None, softcap is not None,
        "ieee" if qkv.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    numbers = AttentionNumbers(
        scale, softcap or 1.0, window or 0, qkv.stride(0), keys.stride(0), keys.stride(1)
    )  # fmt: skip
    seen = rows if rows.ancestors is not None else rows._replace(ancestors=rows.slots)
    _tree_attention_kernel[(kv_heads * triton.cdiv(nodes * group, tiles.block_q), splits.most, places)](
        qkv, keys, values, seen, scratch, numbers, splits.most, splits.keys, SHAPE=shape, TILES=tiles,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    block_s = triton.next_power_of_2(splits.most)
    _merge_kernel[(places * nodes, heads)](
        seen, scratch, scratch.stats if sinks is None else sinks, out, splits.most, splits.keys, SHAPE=shape,
        BLOCK_S=block_s, SINKS=sinks is not None, num_warps=max(1, min(8, block_s * block_d // 2048)),
    )  # fmt: skip
