"""Tree attention against its twin: trees and chunks, windows, several splits, poisoned rows, odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.bench import splits
from eagle_slim.runtime.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
from eagle_slim.runtime.kernels.tree_attention import (
    AttentionScratch,
    AttentionTiles,
    attention_tiles,
    most_parts,
    most_splits,
    tree_attention,
    tree_attention_ref,
)
from eagle_slim.runtime.kernels.tree_rows import ForwardRows, tree_rows_ref
from eagle_slim.runtime.tree import layout_tree
from kernels.test_step_kernels import random_parents
from kernels.tolerances import OP_ATOL

TILES = AttentionTiles(block_q=16, block_k=16, keys_per_split=24, num_warps=4, num_stages=2)


ONE, FEW, MANY = (1, 4, 2, 16, [70, 0, 3]), (7, 6, 2, 24, [33, 90, 1]), (70, 2, 1, 16, [20, 0, 50])


@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        (ONE, torch.float16, None),
        (ONE, torch.float32, 5),
        (FEW, torch.float32, None),
        (FEW, torch.float16, 5),
        (FEW, torch.float32, 40),
        (MANY, torch.float32, None),
        (MANY, torch.float16, 40),
    ],
)
def test_trees(
    device: str, shape: tuple[int, int, int, int, list[int]], dtype: torch.dtype, window: int | None
) -> None:
    nodes, heads, kv_heads, head_dim, lengths = shape
    slots = len(lengths)
    parents = torch.stack([random_parents(nodes, 7, seed) for seed in range(slots)])
    tree = layout_tree(torch.zeros((slots, nodes), dtype=torch.int64), parents, path_width=7)
    rows = ForwardRows.allocate(slots, nodes, torch.tensor(lengths, dtype=torch.int32, device=device))
    active = torch.tensor([0, 2, -1], dtype=torch.int32, device=device)
    count = torch.tensor([2], dtype=torch.int32, device=device)
    fields = [field.to(device) for field in (tree.draft_tokens, tree.parents, tree.tree_position_ids)]
    tree_rows_ref(active, count, *fields, rows)
    check(rows, heads, kv_heads, head_dim, dtype, window, [length + nodes for length in lengths])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("length", "count", "nodes"), [(0, 20, 32), (37, 32, 32), (50, 1, 16)])
def test_chunks(device: str, window: int | None, length: int, count: int, nodes: int) -> None:
    ints = {"dtype": torch.int32, "device": device}
    box = PromptBox.allocate(100, device)
    box.numbers[:2] = torch.tensor([1, length + count])
    chunk = ChunkRows.allocate(nodes, torch.tensor([4, length], **ints))
    chunk_rows_ref(box, chunk)
    rows = chunk.forward
    check(rows, 4, 2, 16, torch.float32, window, [4, length + count])


def check(
    rows: ForwardRows, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None, ends: list[int]
) -> None:
    """Kernel and twin agree, whatever lies beyond the rows in use."""
    device = rows.tokens.device
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(len(rows.tokens), width, dtype=dtype, device=device)
    keys, values = (
        torch.randn(len(ends), kv_heads, max(ends) + 20, head_dim, dtype=dtype, device=device) for _ in range(2)
    )
    for slot, end in enumerate(ends):
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    found, wanted = (qkv.new_full((len(qkv), heads * head_dim), float("nan")) for _ in range(2))
    scratch = AttentionScratch.allocate(4 * rows.places, rows.nodes, heads, head_dim, device)
    scratch.out.fill_(float("nan"))
    scratch.stats.fill_(float("nan"))
    tree_attention(qkv, keys, values, rows.attention, 0.3, window, found, scratch, TILES, most=4)
    tree_attention_ref(qkv, keys, values, rows.attention, 0.3, window, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=OP_ATOL[dtype])


def test_tiles_fit_the_work() -> None:
    assert attention_tiles(1 * 4, 128, torch.bfloat16).block_q == 16
    assert attention_tiles(60 * 4, 128, torch.bfloat16).block_q == 64
    assert attention_tiles(60 * 4, 256, torch.bfloat16).block_k == 32


def test_splits_fill_the_gpu_whatever_the_batch() -> None:
    """8 key heads and 4 blocks of 64 query rows are 32 programs a place; 512 are wanted."""
    tiles = replace(attention_tiles(60 * 4, 128, torch.bfloat16), num_programs=512)
    assert [most_splits(places, 8, 240, tiles) for places in (1, 2, 3, 4, 8, 16)] == [16, 8, 5, 4, 2, 1]
    assert most_splits(1, 1, 4, tiles) == 64
    assert most_parts(16, 60, 32, 8, tiles) == 16


def test_the_sweep_checks_and_compares_every_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "COLD_BYTES", 1)
    monkeypatch.setattr(splits, "SPLITS", (1, 3))
    shape = splits.Heads(1, 1, 16)
    found = splits.bench(
        torch.device("cpu"), shape, (1,), (70,), (2,), 1, torch.float32, lambda run: run
    )  # fmt: skip
    (row,) = found["rows"]
    assert set(row["us"]) == {"1", "3"}  # tiles of 32 keys
    assert row["rule_splits"] == 1  # of 128 keys at least
    assert row["rule_over_best"] == found["worst_rule_over_best"] == row["rule_us"] / min(row["us"].values())
    merge = splits.tree_attention

    def wrong(*arguments: object) -> None:
        merge(*arguments)  # type: ignore[arg-type]
        if arguments[-1] == 3:
            arguments[6].mul_(1.1)  # type: ignore[attr-defined]

    monkeypatch.setattr(splits, "tree_attention", wrong)
    with pytest.raises(AssertionError, match=r"^3: "):
        splits.bench(torch.device("cpu"), shape, (1,), (70,), (2,), 1, torch.float32, lambda run: run)
