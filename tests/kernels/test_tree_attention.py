"""Tree attention against its twin: trees and chunks, windows, several splits, poisoned rows, odd sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
from eagle_slim.runtime.target.kernels.tree_attention import (
    AttentionScratch,
    AttentionTiles,
    Splits,
    attention_tiles,
    choose_splits,
    most_parts,
    tree_attention,
    tree_attention_ref,
)
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows_ref
from eagle_slim.runtime.tree import Trees, layout_tree
from kernels.test_step_kernels import fields_of, random_parents
from kernels.tolerances import OP_ATOL

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SLOW = pytest.mark.slow
TILES = AttentionTiles(block_q=16, block_k=16, num_warps=4, num_stages=2)


ONE, FEW, MANY = (1, 4, 2, 16, [70, 0, 3]), (7, 6, 2, 24, [33, 90, 1]), (70, 2, 1, 16, [20, 0, 50])


@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        (ONE, torch.float16, None),
        (ONE, torch.float32, 5),
        (FEW, torch.float32, None),
        (FEW, torch.float16, 5),
        (FEW, torch.float32, 40),
        pytest.param(MANY, torch.float32, None, marks=SLOW),
        pytest.param(MANY, torch.float16, 40, marks=SLOW),
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
    tree_rows_ref(Trees(active, count, *fields_of(tree, device)), rows)
    check(rows, heads, kv_heads, head_dim, dtype, window, [length + nodes for length in lengths])


@pytest.mark.parametrize(
    ("softcap", "has_sinks"), [pytest.param(5.0, False, marks=SLOW), pytest.param(None, True, marks=SLOW), (1.5, True)]
)
def test_capped_scores_and_sinks(device: str, softcap: float | None, has_sinks: bool) -> None:
    chunk = one_chunk(device, 37, 32, 32)
    sinks = torch.randn(4, device=device) * 3 if has_sinks else None
    check(chunk.forward, 4, 2, 16, torch.float32, 9, [4, 69], softcap, sinks)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("length", "count", "nodes"), [(0, 20, 32), (37, 32, 32), (50, 1, 16)])
def test_chunks(device: str, window: int | None, length: int, count: int, nodes: int) -> None:
    chunk = one_chunk(device, length, count, nodes)
    check(chunk.forward, 4, 2, 16, torch.float32, window, [4, length + count])


def one_chunk(device: str, length: int, count: int, nodes: int) -> ChunkRows:
    """A chunk of the second slot's prompt."""
    box = PromptBox.allocate(100, device)
    box.numbers[:2] = torch.tensor([1, length + count])
    chunk = ChunkRows.allocate(nodes, torch.tensor([4, length], dtype=torch.int32, device=device))
    chunk_rows_ref(box, chunk)
    return chunk


def check(
    rows: ForwardRows, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None,
    ends: list[int], softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
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
    tree_attention(qkv, keys, values, rows.attention, 0.3, window, found, scratch, TILES, Splits(4, 24), softcap, sinks)
    tree_attention_ref(qkv, keys, values, rows.attention, 0.3, window, wanted, None, softcap, sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=OP_ATOL[dtype])


def test_tiles_fit_the_work() -> None:
    assert attention_tiles(1 * 4, 128, torch.bfloat16).block_q == 16
    assert attention_tiles(60 * 4, 128, torch.bfloat16).block_q == 64
    assert attention_tiles(60 * 4, 256, torch.bfloat16).block_k == 32


def test_the_scratch_holds_the_splits_of_every_batch() -> None:
    tree = [most_parts(places, 60, 32, 8, 128, torch.bfloat16, torch.device("cpu")) for places in (1, 2, 4, 8, 16)]
    assert tree == [8, 8, 8, 8, 16]
    root = [most_parts(places, 1, 32, 8, 128, torch.bfloat16, torch.device("cpu")) for places in (1, 2, 4, 8, 16)]
    assert root == [16, 16, 33, 33, 33]  # three sequences take 11 splits each
    assert choose_splits(1, 1, 4, TILES, 132).most == 32  # the most that are merged


def num_cuts(total: int, num_splits: int, block_k: int) -> int:
    """Splits that get keys: each takes whole tiles."""
    tiles_each = math.ceil(math.ceil(total / num_splits) / block_k)
    return math.ceil(total / (tiles_each * block_k))


def test_the_committed_sweep_justifies_the_splits() -> None:
    """Each row: what the rule takes, or a candidate that cuts the keys alike, is within 5% of the best."""
    sweep = json.loads((RESULTS / "2026-11-22-h200-splits.json").read_text())
    assert sweep["shape"] == {"heads": 32, "kv_heads": 8, "head_dim": 128}
    assert len(sweep["rows"]) == 50
    for row in sweep["rows"]:
        tiles = attention_tiles(4 * row["nodes"], 128, torch.bfloat16)
        chosen = choose_splits(row["active"], 8, 4 * row["nodes"], tiles, sweep["machine"]["num_sms"])
        total = row["length"] + row["nodes"]

        wanted = num_cuts(total, chosen.in_use(total), tiles.block_k)
        alike = [us for splits, us in row["us"].items() if num_cuts(total, int(splits), tiles.block_k) == wanted]
        assert min(alike) <= 1.05 * row["best_us"], row
