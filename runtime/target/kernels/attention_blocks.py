"""Counts the blocks of keys that attention goes through in a layer: what a change of its tiles or of a tree costs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention import AttentionRows
from .attention_kernels import BLOCK, MAIN_ROWS, REACH, TAIL_ROWS


class AttentionBlocks(NamedTuple):
    """Tiles of `BLOCK` keys by a program's query rows that one layer computes, over all places and KV heads."""

    whole: int
    """In main parts, without a mask: every row sees every key."""
    masked: int
    """In main parts, where some rows do not see some keys."""
    tail: int
    """In tails; of `TAIL_ROWS` query rows."""
    skipped: int
    """Between a sequence's first key and its last: before every window of a program's rows, or left to the tails."""


def attention_blocks(
    rows: AttentionRows, group: int, kv_heads: int, window: int | None = None, main_rows: int = MAIN_ROWS
) -> AttentionBlocks:
    """Count by the kernels' rules; waits for the device.

    ``group``: query heads of a KV head; ``main_rows``: query rows of a main part's program (`AttentionTiles.rows`).
    """
    found = AttentionBlocks(0, 0, 0, 0)
    for place, slot in enumerate(rows.slots.tolist()):
        count = int(rows.counts[place]) if slot >= 0 else 0
        if count == 0:
            continue
        depth = rows.depths[place, :count].cpu().long() if rows.paths is not None else torch.arange(count)
        position = int(rows.lengths[slot]) + depth
        tail = (position - REACH).clamp(min=0) // (BLOCK - REACH) * (BLOCK - REACH)
        first = (position - (window or 1 << 30) + 1).clamp(min=0)
        for nodes in (torch.arange(count * group) // group).split(main_rows):
            found = _add(found, _main(tail[nodes], first[nodes], int(position[nodes].max()), window))
        # As many nodes of a path as fit share a tile; in it tails begin at one place or at two.
        in_group = 1 << (group - 1).bit_length()
        in_tile = max(1, TAIL_ROWS // in_group) if rows.paths is None else 1
        tiles = -(-group // (TAIL_ROWS // in_tile))
        num_tails = sum(1 + int(own.max() > own.min()) for own in tail.split(in_tile))
        found = found._replace(tail=found.tail + tiles * num_tails)
    return AttentionBlocks(*(number * kv_heads for number in found))


def _main(tail: torch.Tensor, first: torch.Tensor, last: int, window: int | None) -> AttentionBlocks:
    """Of one program's rows; splits begin at whole blocks."""
    begin, end = int(first.min()), int(tail.max())
    there = last // BLOCK + 1
    if end <= begin:
        return AttentionBlocks(0, 0, 0, there)
    seen = -(-end // BLOCK) - begin // BLOCK
    whole = 0 if window is not None else int(tail.min()) // BLOCK
    return AttentionBlocks(whole, seen - whole, 0, there - seen)


def _add(one: AttentionBlocks, other: AttentionBlocks) -> AttentionBlocks:
    return AttentionBlocks(*(a + b for a, b in zip(one, other, strict=True)))
