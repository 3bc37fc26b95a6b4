"""What is gained by asking the next product's weights into the L2 while a target's small kernels run?

    python -m eagle_slim.runtime.bench.read_ahead --dims llama-3.1-8b --out read-ahead.json

A target pass of known dimensions and random weights, replayed from one CUDA graph for each choice of bytes; the first
row asks for nothing and is what the others are compared with, in turn, in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from ..kernels.tree_rows import ForwardRows, tree_rows
from ..target.device_buffers import KVCache
from ..target.fused import FusedTarget, ReadAheadBytes
from .problem import MODELS
from .random_decoding import LAYERS, default_taps, random_target
from .timing import copy_bytes_per_s, interleave, machine

MB = 1 << 20
CHOICES = (
    ReadAheadBytes(0, 0, 0, 0),
    ReadAheadBytes(0, 16 * MB, 0, 0),
    ReadAheadBytes(0, 32 * MB, 0, 0),
    *(ReadAheadBytes(size * MB, 32 * MB, size * MB, size * MB) for size in (4, 8, 16, 24)),
    ReadAheadBytes(12 * MB, 32 * MB, 0, 0),
    ReadAheadBytes(0, 32 * MB, 12 * MB, 0),
    ReadAheadBytes(0, 32 * MB, 0, 12 * MB),
)


def full_tree(nodes: int, prefix: int, vocab: int, device: torch.device) -> ForwardRows:
    """Rows of one sequence: a tree in which every node has up to four children."""
    lengths = torch.tensor([prefix], dtype=torch.int32, device=device)
    parents = (torch.arange(nodes, device=device) - 1) // 4
    parents[0] = -1
    depths = [0]
    for parent in parents[1:].tolist():
        depths.append(depths[parent] + 1)
    tokens = torch.randint(vocab, (1, nodes), device=device)
    rows = ForwardRows.allocate(1, nodes, lengths)
    one = torch.ones(1, dtype=torch.int32, device=device)
    tree_rows(one - 1, one, tokens, parents[None], torch.tensor([depths], device=device), rows)
    return rows


def captured_pass(target: FusedTarget, rows: ForwardRows, cache: KVCache) -> torch.cuda.CUDAGraph:
    """Capture one forward, warmed up."""
    bufs = target.new_buffers(1, rows.nodes, rows.nodes)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            target.forward(rows, cache, bufs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.forward(rows, cache, bufs)
    return graph


def main() -> None:
    """Measure and print a row for each choice; JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    parser.add_argument("--prefixes", type=int, nargs="*", default=[512, 8192, 32768])
    parser.add_argument("--nodes", type=int, nargs="*", default=[60, 1])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    bandwidth = copy_bytes_per_s(device)
    model = random_target(arguments.dims, MODELS[arguments.dims], dtype, device)
    taps = default_taps(arguments.dims)
    targets = [FusedTarget(model, taps, read_ahead=choice) for choice in CHOICES]
    table = []
    with torch.inference_mode():
        cache = KVCache(targets[0], 1, max(arguments.prefixes) + max(arguments.nodes))
        cache.keys.normal_()
        cache.values.normal_()
        for prefix in arguments.prefixes:
            for nodes in arguments.nodes:
                rows = full_tree(nodes, prefix, targets[0].vocab_size, device)
                graphs = []
                for target in targets:
                    target.reserve_positions(prefix + nodes)
                    graphs.append(captured_pass(target, rows, cache))
                times = interleave({str(i): graph.replay for i, graph in enumerate(graphs)}, device, arguments.rounds)
                for i, choice in enumerate(CHOICES):
                    found = times[str(i)]
                    row = {"prefix": prefix, "nodes": nodes, "MB": {k: v // MB for k, v in vars(choice).items()}}
                    row |= {"ms": found.median_us / 1e3, "low_ms": found.low_us / 1e3, "high_ms": found.high_us / 1e3}
                    row |= {"of_none": found.median_us / times["0"].median_us}
                    table.append(row)
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    report = {"dims": arguments.dims, "machine": machine(device), "copy_TB_per_s": bandwidth / 1e12, "rows": table}
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
