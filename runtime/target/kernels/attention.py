"""Attention of a forward's rows over a long prefix and their own ancestors.

A place is one sequence of the batch with ``nodes`` rows: the nodes of a draft tree, or the tokens of a prompt's chunk.
Its keys lie in its slot's cache: ``length`` committed rows, then one row for each of its own. Node n sees the committed
rows and those of its own path (`AttentionRows.paths`); in a chunk or a chain (no paths) row n sees the rows up to
itself.

    softmax(q k^T * scale) v, over the keys at positions 0 .. p of a row at position p

``softcap`` c replaces a score s by c tanh(s / c) (Gemma 2); ``sinks`` add to each head's sum the weight of a key that
gives nothing (gpt-oss). fp32 accumulation throughout. `attention_kernels` tells why a row's result has the same bits
in every forward that computes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import attention_kernels as kernels
from .attention_kernels import MAIN_ROWS, TAIL_ROWS
from .machine import gpu_name, num_processors, overlapping

Heads = tuple[int, int, int]
"""heads, kv_heads and head_dim of a layer."""


class AttentionRows(NamedTuple):
    """Rows that attend, and to what: shared by all layers of a forward; all on one device.

    ``slots`` int32 [places] (-1: an empty place); ``lengths`` int32 [slots]: committed rows, by slot; ``counts`` int32
    [places]: rows in use; ``paths`` int32 [places, nodes, width] or None where node n's parent is n - 1: the node's
    ancestor at each depth, itself last, then anything; ``depths`` int32 [places, nodes]: distance of a row from the
    first in positions.
    """

    slots: Tensor
    lengths: Tensor
    counts: Tensor
    paths: Tensor | None
    depths: Tensor

    def tree_mask(self) -> Tensor:
        """Return the rows of its place that each row sees: bool [places, nodes, nodes]."""
        places, nodes = self.depths.shape
        node = torch.arange(nodes, device=self.depths.device)
        if self.paths is None:
            return (node[:, None] >= node).expand(places, nodes, nodes)
        on_path = torch.arange(self.paths.shape[2], device=node.device) <= self.depths[..., None]
        return ((self.paths[..., None] == node) & on_path[..., None]).any(2)


class AttentionParams(NamedTuple):
    """Numbers of a layer: the rows' attention is ``lift`` times softmax(scale q k^T) v, by the module's formula.

    ``window``: a key is seen if query position - key position is below it; ``sinks`` [heads], of any float type.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    lift: float = 1.0


class AttentionScratch(NamedTuple):
    """States of main parts, fp32: ``out`` [states * rows * head_dim], ``stats`` [states * rows * 2] (largest, sum)."""

    out: Tensor
    stats: Tensor

    @classmethod
    def allocate(
        cls, places: int, nodes: int, shapes: Iterable[Heads], capacity: int, device: torch.device
    ) -> AttentionScratch:
        """Allocate for up to ``places`` sequences of ``nodes`` rows over caches of ``capacity`` rows a slot."""
        num_sms, sizes = num_processors(device), []
        for shape in shapes:
            heads, _, head_dim = shape
            # What decides the number of states is the same for every type.
            tiles = [attention_tiles(count, nodes, shape, num_sms, 2) for count in range(1, places + 1)]
            states = max(count * num_states(capacity, each) for count, each in enumerate(tiles, 1))
            sizes.append((states * nodes * heads * head_dim, states * nodes * heads * 2))
        longest = map(max, zip(*sizes, strict=True))
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in longest))


@dataclass(frozen=True)
class AttentionTiles:
    """Division of the main parts among programs: decides no bits.

    ``programs`` share the splits of a block of ``rows`` query rows; one alone sums all of them into one state.
    """

    programs: int
    rows: int = MAIN_ROWS
    num_warps: int = 4
    num_stages: int = 3
    tail_warps: int = 4

    @property
    def sums_all_splits(self) -> bool:
        """Whether a program goes through all splits of its rows."""
        return self.programs == 1


def num_splits(capacity: int) -> int:
    """Count the splits of a sequence of ``capacity`` rows: `attention_kernels.split_of` the last, and 1."""
    splits, first = 0, 0
    for size, end in ((128, 512), (256, 1024), (512, 4096), (1024, 32768), (4096, capacity)):
        splits += -(-max(min(capacity, end) - first, 0) // size)
        first = end
    return max(splits, 1)


def num_states(capacity: int, tiles: AttentionTiles) -> int:
    """Count the states that a place of ``capacity`` rows may have at once."""
    return 1 if tiles.sums_all_splits else num_splits(capacity)


def attention_tiles(
    places: int, nodes: int, shape: Heads, num_sms: int, itemsize: int, is_tree: bool = False, gpu: str = ""
) -> AttentionTiles:
    """Choose for a forward of layers of a ``shape``, of trees or of chains.

    Four programs of main parts for each multiprocessor: not all of them find work. Heads above 128 and float32 need the
    registers of more warps; tails of many trees, or of narrow heads, are done sooner by fewer.
    """
    heads, kv_heads, head_dim = shape
    units = places * kv_heads * -(-nodes * heads // kv_heads // MAIN_ROWS)
    programs = max(1, 4 * num_sms // units)
    # 4 places of 16 nodes after 16,384 tokens: a pass took 7.26 ms instead of 7.43 (2026-11-26).
    if gpu == "NVIDIA H200" and is_tree and shape == (32, 8, 128) and 3 <= places <= 4 and 2 <= nodes <= 16:
        programs *= 2
    if head_dim > 128 or itemsize == 4:
        return AttentionTiles(programs, num_warps=8, num_stages=2, tail_warps=8)
    return AttentionTiles(programs, tail_warps=2 if nodes > 1 and (places > 1 or head_dim <= 64) else 4)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Compute softmax attention under a boolean mask, keys shared by groups of query heads.

    ``query`` [batch, heads, nodes, head_dim]; ``key``, ``value`` [batch, kv_heads, kv_length, head_dim]; ``mask`` bool
    [batch, 1, nodes, kv_length], every row allows at least one key. Of ``params`` the window and ``lift`` are the
    caller's. Returns [batch, heads, nodes, head_dim].
    """
    scale, softcap, sinks = params.scale, params.softcap, params.sinks
    batch, heads, nodes, _ = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    # Query heads of one key head are laid side by side as more queries, so that keys need no copies.
    query = query.reshape(batch, kv_heads, group * nodes, query.shape[-1])
    mask = mask.expand(batch, group, nodes, mask.shape[-1]).reshape(batch, 1, group * nodes, mask.shape[-1])
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:
        scores = (query @ key.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, nodes, 1)
            scores = torch.cat([scores, sink.reshape(batch, kv_heads, group * nodes, 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        out = weights.to(value.dtype) @ value
    return out.reshape(batch, heads, nodes, value.shape[-1])


def tree_attention_ref(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionRows,
    params: AttentionParams,
    out: Tensor,
    scratch: AttentionScratch | None = None,
) -> None:
    """Attend, in fp32.

    ``qkv`` [places * nodes, >= heads * head_dim]: rotated queries in the first columns; ``keys``, ``values`` [slots,
    kv_heads, capacity, head_dim]; ``out`` [places * nodes, heads * head_dim]. Rows of empty places and rows from
    ``counts`` on are set to 0.
    """
    places, head_dim, window = len(rows.slots), keys.shape[3], params.window
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
        key, value = (cache[slot, :, : length + count].float()[None] for cache in (keys, values))
        query = query.float().transpose(0, 1)[None]
        attended = masked_attention(query, key, value, seen[None, None], params)
        result = (attended[0] * params.lift).transpose(0, 1).flatten(1)
        out[place * nodes : place * nodes + count] = result.to(out.dtype)


def tree_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionRows,
    params: AttentionParams,
    out: Tensor,
    scratch: AttentionScratch | None,
    tiles: AttentionTiles | None = None,
) -> None:
    """Run `tree_attention_ref` as two launches; ``scratch`` is allocated for at least these places, rows and heads.

    Depths of nodes with ``paths`` are at most `REACH`. ``tiles`` override `attention_tiles`.
    """
    assert scratch is not None
    places, kv_heads, capacity, head_dim = len(rows.slots), *keys.shape[1:]
    nodes, heads = qkv.shape[0] // places, out.shape[1] // head_dim
    device, is_path, sinks = qkv.device, rows.paths is None, params.sinks
    if tiles is None:
        heads_of, num_sms = (heads, kv_heads, head_dim), num_processors(device)
        tiles = attention_tiles(places, nodes, heads_of, num_sms, qkv.itemsize, not is_path, gpu_name(device))
    group, states = heads // kv_heads, num_states(capacity, tiles)
    block_d, precision = max(16, triton.next_power_of_2(head_dim)), "ieee" if keys.dtype == torch.float32 else "tf32"
    traits = is_path, params.window is not None, params.softcap is not None, precision, params.lift
    shape = kernels.AttentionShape(group, kv_heads, head_dim, block_d, *traits)
    width = 1 if rows.paths is None else rows.paths.shape[2]
    strides = qkv.stride(0), keys.stride(0), keys.stride(1)
    numbers = kernels.AttentionNumbers(params.scale, params.softcap or 1.0, params.window or 0, *strides)
    overlaps, options = overlapping(device)
    given_to_both = {"SHAPE": shape, "SINGLE": nodes == 1, "ALL_SPLITS": tiles.sums_all_splits, "OVERLAP": overlaps}
    options = options | given_to_both
    given = qkv, keys, values, rows._replace(paths=rows.slots) if is_path else rows, scratch
    blocks = triton.cdiv(nodes * group, tiles.rows)
    kernels.main_kernel[(kv_heads * blocks, min(tiles.programs, num_splits(capacity)), places)](
        *given,
        numbers,
        nodes,
        states,
        None,
        ROWS=tiles.rows,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **options,
    )
    # Nodes of a path share their keys; those of a tree gather their own.
    in_tile = max(1, TAIL_ROWS // triton.next_power_of_2(group)) if is_path else 1
    groups = triton.cdiv(group, TAIL_ROWS // in_tile)
    options |= {"ROWS": TAIL_ROWS, "IN_TILE": in_tile, "SINKS": sinks is not None, "num_warps": tiles.tail_warps}
    kernels.tail_kernel[(triton.cdiv(nodes, in_tile), kv_heads * groups, places)](
        *given, scratch.stats if sinks is None else sinks, out, numbers, nodes, width, states, **options
    )
