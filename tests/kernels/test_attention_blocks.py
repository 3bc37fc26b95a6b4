"""Counted blocks against those that the kernels go through in the interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
from eagle_slim.runtime.target.kernels import attention_kernels
from eagle_slim.runtime.target.kernels.attention import AttentionRows, AttentionScratch, AttentionTiles, tree_attention
from eagle_slim.runtime.target.kernels.attention_blocks import attention_blocks
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows_ref
from eagle_slim.runtime.tree import Trees, layout_tree
from kernels.test_step_kernels import fields_of, random_parents

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 6, 2, 16, 1024


def tree(lengths: list[int], nodes: int) -> AttentionRows:
    slots = len(lengths)
    parents = torch.stack([random_parents(nodes, 7, seed) for seed in range(slots)])
    laid = layout_tree(torch.zeros((slots, nodes), dtype=torch.int64), parents, path_width=7)
    rows = ForwardRows.allocate(slots, nodes, torch.tensor(lengths, dtype=torch.int32))
    active = torch.tensor([*range(slots - 1), -1], dtype=torch.int32)
    tree_rows_ref(Trees(active, torch.tensor([slots - 1], dtype=torch.int32), *fields_of(laid, "cpu")), rows)
    return rows.attention


def chunk(length: int, nodes: int) -> AttentionRows:
    box, rows = PromptBox.allocate(CAPACITY, "cpu"), ChunkRows.allocate(nodes, torch.tensor([length]).int())
    box.numbers[1] = CAPACITY
    chunk_rows_ref(box, rows)
    return rows.forward.attention


CASES = {
    "trees": (tree([200, 31, 5], 25), None),
    "a long prefix": (tree([700, 0], 12), None),
    "windows": (tree([700, 90, 5], 12), 100),
    "a window shorter than tails": (tree([300, 0], 12), 20),
    "a chunk": (chunk(150, 40), None),
    "a chunk at the beginning": (chunk(0, 30), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("programs", [1, 16])
def test_blocks_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch, name: str, programs: int) -> None:
    rows, window = CASES[name]
    found = Counter[str]()
    see_blocks, see_tail = attention_kernels._see_blocks, attention_kernels._see_tail

    def counted(*given: Any, **named: Any) -> Any:
        start, stop, masks = int(given[6].handle.data[0]), int(given[7].handle.data[0]), given[-1]
        found["masked" if getattr(masks, "value", masks) else "whole"] += max(0, -(-(stop - start) // 64))
        return see_blocks(*given, **named)

    def counted_tail(*given: Any, **named: Any) -> Any:
        found["tail"] += 1
        return see_tail(*given, **named)

    monkeypatch.setattr(attention_kernels, "_see_blocks", counted)
    monkeypatch.setattr(attention_kernels, "_see_tail", counted_tail)
    places, nodes = rows.depths.shape
    keys = torch.randn(len(rows.lengths), KV_HEADS, CAPACITY, HEAD_DIM)
    queries = torch.randn(places * nodes, HEADS * HEAD_DIM)
    scratch = AttentionScratch.allocate(places, nodes, [(HEADS, KV_HEADS, HEAD_DIM)], CAPACITY, keys.device)
    tree_attention(
        queries, keys, keys, rows, 0.3, window, torch.empty_like(queries), scratch, tiles=AttentionTiles(programs)
    )
    counted_here = attention_blocks(rows, HEADS // KV_HEADS, KV_HEADS, window)
    assert (found["whole"], found["masked"], found["tail"]) == counted_here[:3]
    assert sum(counted_here[:2]) > 0 or name in ("a window shorter than tails", "a chunk at the beginning")
    assert counted_here.skipped > 0
