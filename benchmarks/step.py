"""What does a decoding step cost on the device, phase by phase?

    python -m benchmarks.step --dims llama-3.1-8b --nodes 16 60 [--out FILE]
    python -m benchmarks.step --dims smollm2-135m --prefixes 512 --batch 1 2 4 8 16
    python -m benchmarks.step --dims llama-3.3-70b --target-weights fp8 --prefixes 512
    EAGLE_SLIM_SHAPES=shapes.json python -m benchmarks.step --prefixes 512 --top-k 1 4 8 10 --nodes 16 32 60 --batch 1 4

A random target and head of known dimensions. Rows: a step at each prefix, with trees and plain, and several sequences
at the first prefix; sampling; a prompt of as many tokens, to its first new one; medians of graph replays. The phases of
the largest tree and of plain steps are timed too. The floor is bytes over the copy bandwidth of the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from eagle_slim.runtime.settings import TreeConfig

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import (
    LAYERS,
    SAMPLED,
    TARGET_WEIGHTS,
    RandomModel,
    compile_ahead,
    phase_times,
    prompt_time,
    set_sampling,
)
from benchmarks.shared.timing import copy_bytes_per_s, machine

ROOM = 800
"""Rows for what 100 steps can add to a sequence, and for a tree."""


@torch.inference_mode()
def measure(
    model: RandomModel, draft_vocab: int, trees: Sequence[TreeConfig], batch: int, prefixes: Sequence[int],
    bandwidth: float, is_first: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measure a row of ``batch`` sequences at every prefix and with every tree, over one cache.

    ``is_first``: at the first prefix sampling, and a prompt of as many tokens, too.
    """
    cache = model.new_cache(batch, max(prefixes) + ROOM)
    for tree in [*trees, None]:
        decoder = model.decoder(cache, tree, draft_vocab)
        has_phases = tree in (trees[0], None)
        for prefix in prefixes:
            floor_ms = (model.weight_bytes + model.kv_bytes(batch * prefix)) / bandwidth * 1e3
            row = {"batch": batch, "prefix": prefix, "nodes": decoder.shape.nodes, "floor_ms": floor_ms}
            row |= {} if tree is None else {"top_k": tree.top_k}
            row |= {"sampled": False, **phase_times(decoder, batch, prefix, has_phases=has_phases)}
            if is_first and has_phases and prefix == prefixes[0]:
                set_sampling(decoder, temperature=0.7, top_p=0.9)
                yield row | {"sampled": True, **phase_times(decoder, batch, prefix, SAMPLED)}
                yield {"prompt": prefix, "nodes": decoder.shape.nodes, "first_token_ms": prompt_time(decoder, prefix)}
            yield row


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("step", __doc__)
    command.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    command.add_argument("--draft-vocab", type=int, default=32000)
    command.add_argument("--prefixes", type=int, nargs="+", default=[512, 8192, 32768])
    command.add_argument("--batch", type=int, nargs="+", default=[1])
    command.add_argument("--nodes", type=int, nargs="+", default=[60])
    command.add_argument("--top-k", type=int, nargs="+", default=[10])
    command.add_argument("--target", choices=("fused", "transformers"), default="fused")
    command.add_argument("--target-weights", choices=TARGET_WEIGHTS, default="bf16")
    args = command.parse_args(argv)
    device = command.gpu()
    bandwidth = copy_bytes_per_s(device)
    model = RandomModel(args.dims, device, backend=args.target, weights=args.target_weights)
    rows = min(args.draft_vocab, model.dims.vocab)
    # The largest first, and none of more nodes than its top_k can give.
    asked = itertools.product(sorted(args.nodes, reverse=True), args.top_k)
    trees = [TreeConfig(5, k, min(nodes, TreeConfig(5, k, 2).num_candidates + 1)) for nodes, k in asked]
    trees = list(dict.fromkeys(trees))
    compile_ahead(args.dims, [(tree, batch, rows) for tree in trees for batch in args.batch], device)
    result: dict[str, Any] = {
        "dims": args.dims, "target": args.target, "target_weights": args.target_weights, "draft_vocab": rows,
        "weight_bytes": model.weight_bytes, "machine": machine(device), "copy_TB_per_s": bandwidth / 1e12, "rows": [],
    }  # fmt: skip
    for batch in args.batch:
        # Several of the longest sequences would not fit.
        prefixes = args.prefixes if batch == 1 else args.prefixes[:1]
        for row in measure(model, rows, trees, batch, prefixes, bandwidth, batch == 1):
            show(row)
            result["rows"].append(row)
            write(result, args.out)


if __name__ == "__main__":
    main()
