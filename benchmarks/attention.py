"""Which tiles of attention give the fastest step of one sequence after 32,768 tokens, and of four after 16,384?

    python -m benchmarks.attention [--rows REGEX] [--rounds 5] [--out FILE]

Whole steps over trees of 16 nodes, Llama-3.1-8B's dimensions, random weights. A grid over programs (half of those that
`attention_tiles` chooses, as many, twice as many), query rows, stages and warps of tails, timed in turn with the
default. Where keys are split decides bits, and stays: ``is_equal`` tells whether a variant gives the default's logits,
bit by bit; what does not cannot be the best. ``blocks_executed``: blocks of 64 keys that a layer's main parts go
through, of all key heads and blocks of query rows; ``blocks_skipped``: those of the cache behind the sequences.
Exit status 1: the default takes more than 1.03 of the best step.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.kernels.attention import attention_tiles
from eagle_slim.runtime.target.kernels.attention_kernels import BLOCK, REACH
from eagle_slim.runtime.target.kernels.machine import gpu_name, num_processors

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.decoding import RandomModel, compile_ahead, fill, step_with_tiles
from benchmarks.shared.timing import machine, time_queued_us

MODEL, ROWS, TREE = "llama-3.1-8b", 32000, TreeConfig(5, 10, 16)
POINTS = {"b1/p32768": (1, 32768), "b4/p16384": (4, 16384)}
MOST_OVER_BEST = 1.03


@torch.inference_mode()
def measure(
    model: RandomModel, tree: TreeConfig, draft_vocab: int, sequences: int, prefix: int, rounds: int, times: int = 4
) -> dict[str, Any]:
    """Time a step with the default tiles and with each of the grid: ms, medians of ``rounds``; the best is equal."""
    device, dims, nodes = model.target.device, model.dims, tree.total_tokens
    room = (times + 1) * tree.path_width + nodes + 1
    decoder = model.decoder(model.new_cache(sequences, prefix + room), tree, draft_vocab)
    own = attention_tiles(
        sequences, nodes, (dims.heads, dims.kv_heads, dims.head_dim), num_processors(device),
        model.target.dtype.itemsize, is_tree=True, gpu=gpu_name(device),
    )  # fmt: skip
    programs = sorted({max(1, own.programs // 2), own.programs, 2 * own.programs})
    grid = itertools.product(programs, (32, 64), (2, 3, 4), (2, 4))
    tiles = [own, *(replace(own, programs=p, rows=r, num_stages=s, tail_warps=w) for p, r, s, w in grid)]
    tiles = list(dict.fromkeys(tiles))
    steps = [step_with_tiles(decoder, sequences, prefix, each) for each in tiles]
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for (run, _), each in zip(steps, samples, strict=True):
            fill(decoder, sequences, prefix)
            each.append(time_queued_us(run, device, times) / 1e3)
    last = (prefix + tree.depth + 1 - REACH) // (BLOCK - REACH) * (BLOCK - REACH)
    seen, held = -(-last // BLOCK), -(-decoder.cache.capacity // BLOCK)
    variants: list[dict[str, Any]] = []
    for found, (_, logits), times_ms in zip(tiles, steps, samples, strict=True):
        parts = sequences * dims.kv_heads * -(-nodes * dims.heads // dims.kv_heads // found.rows)
        variants.append({
            **asdict(found), "step_ms": statistics.median(times_ms), "is_equal": torch.equal(logits, steps[0][1]),
            "blocks_executed": parts * seen, "blocks_skipped": parts * (held - seen),
        })  # fmt: skip
    best = min((each for each in variants if each["is_equal"]), key=lambda each: float(each["step_ms"]))
    over_best = variants[0]["step_ms"] / best["step_ms"]
    return {"default": variants[0], "best": best, "default_over_best": over_best, "variants": variants}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("attention", __doc__, POINTS)
    command.add_argument("--rounds", type=whole_from(1), default=5)
    args = command.parse_args(argv)
    chosen, device = command.chosen(args), command.gpu()
    result: dict[str, Any] = {"machine": machine(device), "dims": MODEL, "nodes": TREE.total_tokens, "rows": []}
    compile_ahead(MODEL, [(TREE, POINTS[name][0], ROWS) for name in chosen], device)
    model = RandomModel(MODEL, device)
    for name in chosen:
        row = {"row": name, **measure(model, TREE, ROWS, *POINTS[name], args.rounds)}
        show({key: value for key, value in row.items() if key != "variants"})
        result["rows"].append(row)
        write(result, args.out)
    sys.exit(0 if all(row["default_over_best"] <= MOST_OVER_BEST for row in result["rows"]) else 1)


if __name__ == "__main__":
    main()
