"""Into how many splits should tree attention cut the keys?

    python -m eagle_slim.runtime.bench.splits [--out splits.json] [--rounds 7]

One layer's attention of Llama-3.1-8B dimensions (32 query heads, 8 key heads of 128, bf16), 60 nodes of a draft tree
and 1 node of plain decoding, for 1 to 16 sequences side by side with 512 to 131,072 committed keys each. Candidates
force a number of splits; "rule" is what a decoding step does (`tree_attention.choose_splits`, and the length on the
device). All are CUDA-graph replays, interleaved row by row. A replay goes through as many layers' keys and values as it
takes to fall out of the L2, as in a pass. Before it is timed, each candidate must give what the twin gives, or, where
that would take gigabytes, what one split gives.

Each line has the rule's time over the best candidate's; the last line, and ``--out``, is JSON. Medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.tree_attention import (
    AttentionRows,
    AttentionScratch,
    Splits,
    attention_tiles,
    choose_splits,
    major_capability,
    most_parts,
    num_processors,
    tree_attention,
    tree_attention_ref,
)
from ..kernels.tree_rows import ForwardRows, tree_rows_ref
from .baseline import capture
from .timing import Times, interleave, machine

ACTIVE = (1, 2, 4, 8, 16)
LENGTHS = (512, 2048, 8192, 32768, 131072)
NODES = (60, 1)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
COLD_BYTES = 128 << 20
"""Keys and values of one replay: more than twice the L2 of an H200."""
MOST_LAYERS = 48
TWIN_KEYS = 8192
"""Keys of all sequences together up to which the twin is the measure."""


@dataclass(frozen=True)
class Heads:
    """The attention of one layer."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


class Problem:
    """One row: ``active`` sequences of ``length`` committed keys, each with a random tree of ``nodes``.

    ``pool``: keys and values that rows share, [2, values].
    """

    def __init__(self, shape: Heads, active: int, length: int, nodes: int, pool: Tensor) -> None:
        device, self.shape, self.active, self.nodes = pool.device, shape, active, nodes
        self.total = length + nodes
        capacity = -(-self.total // 64) * 64
        size = active * shape.kv_heads * capacity * shape.head_dim
        self.num_layers = max(1, min(MOST_LAYERS, -(-COLD_BYTES // (2 * size * pool.element_size()))))
        self.num_layers = min(self.num_layers, pool.shape[1] // size)
        self.cache = pool[:, : self.num_layers * size].view(
            2, self.num_layers, active, shape.kv_heads, capacity, shape.head_dim
        )
        self.rows = _rows(active, length, nodes, device)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn(active * nodes, width, device=device, dtype=pool.dtype)
        self.out = torch.empty(active * nodes, shape.heads * shape.head_dim, device=device, dtype=pool.dtype)
        query_rows = nodes * shape.heads // shape.kv_heads
        self.tiles = attention_tiles(query_rows, shape.head_dim, pool.dtype, major_capability(device))
        self.rule = choose_splits(active, shape.kv_heads, query_rows, self.tiles, num_processors(device))
        most = most_parts(active, nodes, shape.heads, shape.kv_heads, shape.head_dim, pool.dtype, device)
        parts = max(active * self.candidates()[-1], most)
        self.scratch = AttentionScratch.allocate(parts, nodes, shape.heads, shape.head_dim, device)

    def candidates(self) -> list[int]:
        """Numbers of splits that leave at least a tile to each."""
        return [splits for splits in SPLITS if splits <= -(-self.total // self.tiles.block_k)]

    def run(self, layer: int, splits: int | None) -> None:
        """Attend in one layer, with so many splits or by the rule."""
        chosen = self.rule if splits is None else Splits(splits, self.tiles.block_k)
        keys, values = self.cache[:, layer]
        scale = self.shape.head_dim**-0.5
        tree_attention(self.qkv, keys, values, self.rows, scale, None, self.out, self.scratch, self.tiles, chosen)

    def run_all(self, splits: int | None) -> None:
        """Attend in all layers."""
        for layer in range(self.num_layers):
            self.run(layer, splits)

    def check(self) -> None:
        """Raise `AssertionError` where a candidate differs from the twin, or, over many keys, from one split."""
        if self.active * self.total <= TWIN_KEYS:
            keys, values = self.cache[:, 0]
            tree_attention_ref(self.qkv, keys, values, self.rows, self.shape.head_dim**-0.5, None, self.out)
        else:
            self.run(0, 1)
        wanted = self.out.clone()
        # Outputs shrink as keys become more.
        atol = 0.03 * float(wanted.float().std())
        for splits in (None, *self.candidates()):
            self.out.fill_(float("nan"))
            self.run(0, splits)
            message = partial("{}: {}".format, splits or "rule")
            torch.testing.assert_close(self.out, wanted, rtol=2e-2, atol=atol, msg=message)


def _rows(active: int, length: int, nodes: int, device: torch.device) -> AttentionRows:
    generator = torch.Generator().manual_seed(0)
    parents = torch.tensor([-1, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes))])
    depths = torch.zeros(nodes, dtype=torch.int64)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    tokens, parents, depths = (
        field.expand(active, nodes).contiguous() for field in (torch.zeros_like(parents), parents, depths)
    )
    rows = ForwardRows.allocate(active, nodes, torch.full((active,), length, dtype=torch.int32))
    slots, count = torch.arange(active, dtype=torch.int32), torch.tensor([active], dtype=torch.int32)
    tree_rows_ref(slots, count, tokens, parents, depths, rows)
    on_cpu = rows.attention
    assert on_cpu.ancestors is not None
    return AttentionRows(
        on_cpu.slots.to(device), on_cpu.lengths.to(device), on_cpu.counts.to(device), on_cpu.ancestors.to(device),
        on_cpu.depths.to(device),
    )  # fmt: skip


def summarise(active: int, length: int, nodes: int, problem: Problem, times: dict[str, Times]) -> dict[str, Any]:
    """One row of the result: microseconds a layer by number of splits, and how far the rule is from the best."""
    layer_us = {name: found.median_us / problem.num_layers for name, found in times.items()}
    rule_us = layer_us.pop("rule")
    best = min(layer_us, key=lambda name: layer_us[name])
    return {
        "active": active, "length": length, "nodes": nodes, "layers": problem.num_layers,
        "rule_splits": problem.rule.in_use(problem.total),
        "rule_us": rule_us, "best_splits": int(best), "best_us": layer_us[best],
        "rule_over_best": rule_us / layer_us[best], "us": layer_us,
    }  # fmt: skip


def bench(
    device: torch.device,
    shape: Heads = Heads(),
    active: Sequence[int] = ACTIVE,
    lengths: Sequence[int] = LENGTHS,
    nodes: Sequence[int] = NODES,
    rounds: int = 7,
    dtype: torch.dtype = torch.bfloat16,
    record: Callable[[Callable[[], object]], Callable[[], object]] = capture,
) -> dict[str, Any]:
    """Check, then time all rows; ``record`` makes a graph of a run."""
    largest = max(active) * (max(lengths) + max(nodes) + 64) * shape.kv_heads * shape.head_dim
    pool = torch.empty(2, max(largest, COLD_BYTES if device.type == "cuda" else 0), dtype=dtype, device=device)
    pool.normal_()
    rows = []
    for count in nodes:
        for together in active:
            for length in lengths:
                problem = Problem(shape, together, length, count, pool)
                problem.check()
                variants = {
                    str(splits or "rule"): record(partial(problem.run_all, splits))
                    for splits in (None, *problem.candidates())
                }
                rows.append(summarise(together, length, count, problem, interleave(variants, device, rounds)))
                row = rows[-1]
                print(
                    f"{count:3d} nodes, {together:2d} x {length:6d}: rule {row['rule_splits']:2d} "
                    f"{row['rule_us']:8.1f} us, best {row['best_splits']:2d} {row['best_us']:8.1f} us, "
                    f"{row['rule_over_best']:.3f}",
                    flush=True,
                )
    worst = max(row["rule_over_best"] for row in rows)
    return {"machine": machine(device), "shape": asdict(shape), "worst_rule_over_best": worst, "rows": rows}


def main() -> None:
    """Print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs an NVIDIA GPU\n")
    with torch.inference_mode():
        result = bench(torch.device("cuda", torch.cuda.current_device()), rounds=args.rounds)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
