"""Attention against its twin: trees, chunks, windows, main parts kept and merged, poisoned rows, odd sizes."""

import pytest
import torch
import triton
import triton.language as tl
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
from eagle_slim.runtime.target.kernels import attention
from eagle_slim.runtime.target.kernels.attention_kernels import BLOCK, split_of, split_start
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows_ref
from eagle_slim.runtime.tree import Trees, layout_tree
from kernels.test_step_kernels import fields_of, random_parents
from kernels.tolerances import OP_ATOL
from support.sweeps import sweep

SLOW = pytest.mark.slow
SHARED = [attention.AttentionTiles(programs) for programs in (1, 2, 16)]
"""One program keeps a state of all, two keep states of groups, sixteen of splits."""

ONE, FEW, MANY = (1, 4, 2, 16, [200, 0, 3]), (7, 3, 1, 24, [33, 90, 140]), (70, 2, 1, 16, [20, 0, 300])
FAR = (2, 2, 1, 16, [1700, 0, 640])
TREES = [(ONE, torch.float16, None), (ONE, torch.float32, 5), (FEW, torch.float32, None), (FAR, torch.float32, None)]
MORE_TREES = [(FEW, torch.float16, 5), (FEW, torch.float32, 40), (FAR, torch.float32, 850)]
MORE_TREES += [(MANY, torch.float32, None), (MANY, torch.float16, 40)]
CHUNKS = [(0, 20, 32, None), (37, 32, 32, 9), (50, 1, 16, None), (0, 20, 32, 9), (37, 32, 32, None)]


@pytest.mark.parametrize("case", sweep([*TREES, *MORE_TREES], *TREES))
def test_trees(device, case):
    (nodes, heads, kv_heads, head_dim, lengths), dtype, window = case
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
    if sinks is not None:
        sinks[1] = 200  # beyond all scores, of which nothing is left
    check(chunk.forward, 4, 2, 16, torch.float32, 9, [4, 69], softcap, sinks)


@pytest.mark.parametrize("case", sweep(CHUNKS, *CHUNKS[:2]))
def test_chunks(device, case):
    length, count, nodes, window = case
    chunk = one_chunk(device, length, count, nodes)
    check(chunk.forward, 4, 2, 16, torch.float32, window, [4, length + count])


def one_chunk(device: str, length: int, count: int, nodes: int) -> ChunkRows:
    box = PromptBox.allocate(100, device)
    box.numbers[:2] = torch.tensor([1, length + count])
    chunk = ChunkRows.allocate(nodes, torch.tensor([4, length], dtype=torch.int32, device=device))
    chunk_rows_ref(box, chunk)
    return chunk


def check(rows, heads, kv_heads, head_dim, dtype, window, ends, softcap=None, sinks=None):
    """Kernel and twin agree, whatever lies beyond the rows in use."""
    device = rows.tokens.device
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(len(rows.tokens), width, dtype=dtype, device=device)
    shape = len(ends), kv_heads, max(ends) + 20, head_dim
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    for slot, end in enumerate(ends):
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    found, wanted = (qkv.new_full((len(qkv), heads * head_dim), float("nan")) for _ in range(2))
    params = attention.AttentionParams(0.3, window, softcap, sinks)
    attention.tree_attention_ref(qkv, keys, values, rows.attention, params, wanted)
    for slot, length in enumerate(rows.attention.lengths.tolist() if window else ()):
        # Blocks before the first row's window, and before a tail, are not read.
        before = max(length - max(window, 2 * BLOCK), 0) // BLOCK * BLOCK
        keys[slot, :, :before] = values[slot, :, :before] = float("nan")
    results = []
    for tiles in SHARED:
        states = attention.num_states(keys.shape[2], tiles) * len(qkv) * heads
        scratch = attention.AttentionScratch(
            *(torch.full((states * size,), torch.nan, device=device) for size in (head_dim, 2))
        )
        found.fill_(float("nan"))
        # A power of two changes no bit.
        lift = 2.0**60 if results and dtype == torch.float32 else 1.0
        attention.tree_attention(qkv, keys, values, rows.attention, params._replace(lift=lift), found, scratch, tiles)
        results.append(found / lift)
        torch.testing.assert_close(results[-1], wanted, rtol=1e-3, atol=OP_ATOL[dtype])
    for other in results[1:]:
        assert torch.equal(other, results[0])


@triton.jit
def _splits_kernel(out_ptr, COUNT: tl.constexpr):
    key = tl.arange(0, COUNT)
    split = split_of(key)
    tl.store(out_ptr + key, split)
    tl.store(out_ptr + COUNT + key, split_start(split))
    tl.store(out_ptr + 2 * COUNT + key, split_start(split + 1))


def test_splits_lie_at_absolute_places(device: str) -> None:
    count = 65536
    out = torch.zeros((3, count), dtype=torch.int32, device=device)
    _splits_kernel[(1,)](out, COUNT=count)
    split, start, stop = out.cpu()
    ranges = (0, 512, 128), (512, 1024, 256), (1024, 4096, 512), (4096, 32768, 1024), (32768, count, 4096)
    assert sorted(set(start.tolist())) == [place for each in ranges for place in range(*each)]
    key = torch.arange(count)
    assert bool(((start <= key) & (key < stop)).all())
    assert split.tolist() == [attention.num_splits(each + 1) - 1 for each in range(count)]


def test_long_caches_and_many_rows_keep_few_states() -> None:
    tiles = [
        attention.attention_tiles(places, nodes, (32, 8, 128), 132, 2) for places, nodes in ((1, 1), (1, 60), (16, 60))
    ]
    assert [each.programs for each in tiles] == [66, 16, 1]
    assert [attention.num_states(32768, each) for each in tiles] == [40, 40, 1]
