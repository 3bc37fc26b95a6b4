"""Time a decoding step on the device, phase by phase.

    python -m benchmarks.step --dims llama-3.1-8b --nodes 16 60 [--out FILE]
    python -m benchmarks.step --dims smollm2-135m --prefixes 512 --batch 1 2 4 8 16
    python -m benchmarks.step --dims llama-3.3-70b --target-weights fp8 --prefixes 512
    python -m benchmarks.step --target-weights bf16 fp8 --draft-weights bf16 fp8 --prefixes 512
    python -m benchmarks.step --target-weights bf16 fp8 --batch 16 --depth 2 --top-k 1 --nodes 4 --prefixes 512
    python -m benchmarks.step --prefixes 131072 --draft-windows 0 4096
    EAGLE_SLIM_SHAPES=shapes.json python -m benchmarks.step --prefixes 512 --top-k 1 4 8 10 --nodes 16 32 60 --batch 1 4

Random targets and a head of known dimensions. Rows: a step at each prefix, with trees and plain, and several sequences
at the first prefix; sampling; a prompt of as many tokens, to its first new one; medians of graph replays. The phases of
the largest tree and of plain steps are timed too. The floor is bytes over the copy bandwidth of the same run. Trees are
drafted over each draft vocabulary, with the head in each type; sampling and prompts take the first of both. Each kind
of target's weights has its rows, one after another; ``--seconds`` ends a run that would take longer.

``--sweep`` times other tiles of attention instead, with trees of 16 nodes, of one sequence after 32,768 tokens and of
four after 16,384: a grid over programs (half of those that `attention_tiles` chooses, as many, twice as many), query
rows, stages and warps of tails, in turn with the default. Where keys are split decides bits, and stays: ``is_equal``
tells whether a variant gives the default's logits, bit by bit; what does not cannot be the best. ``blocks_executed``:
blocks of 64 keys that a layer's main parts go through, of all key heads and blocks of query rows, counted by the kernel
for each number of query rows; ``blocks_skipped``: the others of the cache. Exit status 1: a default takes more than
1.03 of the best step.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from eagle_slim.runtime.drafter.tuning.problem import MODELS
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.kernels.attention import attention_tiles
from eagle_slim.runtime.target.kernels.attention_kernels import BLOCK
from eagle_slim.runtime.target.kernels.machine import gpu_name, num_processors

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import (
    DRAFT_WEIGHTS,
    LAYERS,
    SAMPLED,
    TARGET_WEIGHTS,
    RandomModel,
    compile_ahead,
    count_blocks,
    fill,
    phase_times,
    prompt_time,
    prompt_with_head,
    run_ahead,
    set_sampling,
    step_with_tiles,
)
from benchmarks.shared.timing import copy_bytes_per_s, machine, time_queued_us

ROOM = 800
"""Rows for what 100 steps can add to a sequence, and for a tree."""
SWEPT = ((1, 32768), (4, 16384))
MOST_OVER_BEST = 1.03


@torch.inference_mode()
def measure(
    model: RandomModel,
    drafts: Sequence[tuple[int, str]],
    trees: Sequence[TreeConfig],
    batch: int,
    prefixes: Sequence[int],
    bandwidth: float,
    is_first: bool,
) -> Iterator[dict[str, Any]]:
    """Measure a row of ``batch`` sequences at every prefix, with every tree and draft, over one cache.

    ``drafts``: draft vocabularies, and the head's type with each. ``is_first``: with the first of them, at the first
    prefix, sampling and a prompt of as many tokens, too.
    """
    cache = model.new_cache(batch, max(prefixes) + ROOM)
    for tree, (rows, stored) in [*itertools.product(trees, drafts), (None, drafts[0])]:
        decoder = model.decoder(cache, tree, rows, stored)
        has_phases, nodes = tree in (trees[0], None), 1 if tree is None else tree.total_tokens
        has_more = is_first and has_phases and (rows, stored) == drafts[0]
        for prefix in prefixes:
            floor_ms = (model.weight_bytes + model.kv_bytes(batch * prefix)) / bandwidth * 1e3
            row: dict[str, Any] = {"batch": batch, "prefix": prefix, "nodes": nodes, "floor_ms": floor_ms}
            row |= {} if tree is None else {"top_k": tree.top_k, "draft_vocab": rows, "draft_weights": stored}
            row |= {"sampled": False, **phase_times(decoder, batch, prefix, has_phases=has_phases)}
            if has_more and prefix == prefixes[0]:
                set_sampling(decoder, temperature=0.7, top_p=0.9)
                yield row | {"sampled": True, **phase_times(decoder, batch, prefix, SAMPLED)}
                yield {"prompt": prefix, "nodes": nodes, "first_token_ms": prompt_time(decoder, prefix)}
            yield row


@torch.inference_mode()
def measure_prompts(
    model: RandomModel, tree: TreeConfig, draft: tuple[int, str], prefixes: Sequence[int], windows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Measure a row for a prompt of each length, with a head of each window (0: none)."""
    for tokens, window in itertools.product(prefixes, windows):
        # A cache of the whole prompt and a tree: one of more would pass the drafter's limit after 131,072 tokens.
        decoder = model.decoder(model.new_cache(1, tokens + tree.total_tokens), tree, *draft, window or None)
        found = prompt_with_head(decoder, tokens)
        share = found["head_ms"] / found["first_token_ms"]
        yield {"prompt": tokens, "draft_window": window, **found, "head_share": share}


@torch.inference_mode()
def sweep(
    model: RandomModel, tree: TreeConfig, draft_vocab: int, sequences: int, prefix: int, rounds: int = 5, times: int = 4
) -> dict[str, Any]:
    """Time a step with attention's default tiles and with each of the grid: ms, medians of ``rounds``."""
    device, dims, nodes = model.target.device, model.dims, tree.total_tokens
    room = (times + 1) * tree.path_width + nodes + 1
    decoder = model.decoder(model.new_cache(sequences, prefix + room), tree, draft_vocab)
    default = attention_tiles(
        sequences,
        nodes,
        (dims.heads, dims.kv_heads, dims.head_dim),
        num_processors(device),
        model.target.dtype.itemsize,
        is_tree=True,
        gpu=gpu_name(device),
    )
    programs = sorted({max(1, default.programs // 2), default.programs, 2 * default.programs})
    grid = itertools.product(programs, (32, 64), (2, 3, 4), (2, 4))
    tiles = [default, *(replace(default, programs=p, rows=r, num_stages=s, tail_warps=w) for p, r, s, w in grid)]
    tiles = list(dict.fromkeys(tiles))
    steps = [step_with_tiles(decoder, sequences, prefix, each) for each in tiles]
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for (run, _), each in zip(steps, samples, strict=True):
            fill(decoder, sequences, prefix)
            each.append(time_queued_us(run, device, times) / 1e3)
    in_cache, group = -(-decoder.cache.capacity // BLOCK), dims.heads // dims.kv_heads
    # Only the query rows of a program decide how often a block is read.
    executed = {
        n: count_blocks(decoder, sequences, prefix, replace(default, rows=n)) for n in {each.rows for each in tiles}
    }
    variants: list[dict[str, Any]] = []
    for found, (_, logits), times_ms in zip(tiles, steps, samples, strict=True):
        all_blocks = sequences * dims.kv_heads * -(-nodes * group // found.rows) * in_cache
        variants.append(
            {
                **asdict(found),
                "step_ms": statistics.median(times_ms),
                "is_equal": torch.equal(logits, steps[0][1]),
                "blocks_executed": executed[found.rows],
                "blocks_skipped": all_blocks - executed[found.rows],
            }
        )
    best = min((each for each in variants if each["is_equal"]), key=lambda each: float(each["step_ms"]))
    over_best = variants[0]["step_ms"] / best["step_ms"]
    shape = {"batch": sequences, "prefix": prefix}
    return {**shape, "default": variants[0], "best": best, "default_over_best": over_best, "variants": variants}


def parsed(argv: list[str] | None) -> tuple[Command, Namespace]:
    """Parse the options."""
    command = Command("step", __doc__)
    command.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    command.add_argument("--draft-vocab", type=int, nargs="+", default=[32000])
    command.add_argument("--draft-weights", choices=DRAFT_WEIGHTS, nargs="+", default=["bf16"])
    command.add_argument("--prefixes", type=int, nargs="+", default=[512, 8192, 32768])
    command.add_argument("--batch", type=int, nargs="+", default=[1])
    command.add_argument("--nodes", type=int, nargs="+", default=[60])
    command.add_argument("--top-k", type=int, nargs="+", default=[10])
    command.add_argument("--depth", type=int, default=5)
    command.add_argument("--target", choices=("fused", "transformers"), default="fused")
    command.add_argument("--sweep", action="store_true", help="time other tiles of attention")
    command.add_argument("--draft-windows", type=int, nargs="+", help="time prompts, with these windows of drafts")
    command.add_argument("--target-weights", choices=TARGET_WEIGHTS, nargs="+", default=["bf16"])
    command.add_argument("--seconds", type=float, default=math.inf, help="end after as long, between two rows")
    return command, command.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    started = time.monotonic()
    command, args = parsed(argv)
    device = command.gpu()
    bandwidth = copy_bytes_per_s(device)
    vocabs = dict.fromkeys(min(rows, MODELS[args.dims].vocab) for rows in args.draft_vocab)
    drafts = list(itertools.product(vocabs, args.draft_weights))
    # The largest first, and none of more nodes than its top_k can give.
    asked = itertools.product([16] if args.sweep else sorted(args.nodes, reverse=True), args.top_k)
    depth = args.depth
    trees = [TreeConfig(depth, k, min(nodes, TreeConfig(depth, k, 2).num_candidates + 1)) for nodes, k in asked]
    trees = list(dict.fromkeys(trees))
    batches = [batch for batch, _ in SWEPT] if args.sweep else args.batch
    shapes = () if args.draft_windows else itertools.product(trees, batches, vocabs)
    compile_ahead(args.dims, shapes, device, [DRAFT_WEIGHTS[each] for each in args.draft_weights])
    if args.target == "fused" and not (args.sweep or args.draft_windows):
        places = [
            (tree, batch, max(args.prefixes if batch == 1 else args.prefixes[:1]) + ROOM)
            for tree in [*trees, None]
            for batch in batches
        ]
        run_ahead(args.dims, args.target_weights, places, drafts[0], args.prefixes[0])
    result: dict[str, Any] = {
        "dims": args.dims,
        "target": args.target,
        "machine": machine(device),
        "copy_TB_per_s": bandwidth / 1e12,
        "rows": [],
    }
    if args.sweep:
        model = RandomModel(args.dims, device, backend=args.target, weights=args.target_weights[0])
        for batch, prefix in SWEPT:
            result["rows"].append(sweep(model, trees[0], drafts[0][0], batch, prefix))
            show({name: value for name, value in result["rows"][-1].items() if name != "variants"})
            write(result, args.out)
        sys.exit(any(row["default_over_best"] > MOST_OVER_BEST for row in result["rows"]))
    for weights in args.target_weights:
        model = RandomModel(args.dims, device, backend=args.target, weights=weights)
        for batch in args.batch:
            # Several of the longest sequences would not fit.
            prefixes = args.prefixes if batch == 1 else args.prefixes[:1]
            rows = measure(model, drafts, trees, batch, prefixes, bandwidth, batch == 1)
            if args.draft_windows:
                rows = measure_prompts(model, trees[0], drafts[0], prefixes, args.draft_windows)
            for row in rows:
                row = {"target_weights": weights, "weight_bytes": model.weight_bytes} | row
                show(row)
                result["rows"].append(row)
                write(result, args.out)
                if time.monotonic() - started > args.seconds:
                    sys.exit("out of time")
        del model


if __name__ == "__main__":
    main()
