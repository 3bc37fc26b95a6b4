"""What do rows cost that join a sequence's draft vocabulary, by the persistent drafter?

    python -m eagle_slim.runtime.bench.draft_tails [--dims llama-3.1-8b] [--base 2048 32000] [--batch 1 4]
                                                   [--tails 0 128 512 1024] [--fp8] [--rounds 20] [--out FILE]

Random heads in bf16 (or e4m3), depth 5, top_k 10, 60 nodes, prefix 512, 4 new tokens a sequence. For every base and
batch: a kernel without tails (``none``), and one with room for the longest tail, which all sizes share; every
sequence's tail holds other ids. ``join``: letting the last step's 4 tokens join and their rows be gathered, which
``follow="text"`` does in every step. Each draft is replayed by the fp32 reference before it is timed. CUDA-graph
replays, interleaved, from event to event; medians with 10th and 90th percentile. The last line is JSON; ``--out`` is
written anew after each base and batch, so that a run that is stopped keeps what it had. Exit status 1: a wrong draft.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..config import TreeConfig
from ..drafter.config import DrafterConfig
from ..drafter.follow import FollowRows
from ..drafter.weights import HeadWeights
from ..kernels import tail_rows
from ..kernels.acceptance import SlotState
from ..kernels.host import chip_of
from ..kernels.launch import Weights, allocate_buffers, check_finished, launch_drafter
from ..kernels.tuned_cache import default_cache
from .agreement import Step, candidates_of, exact_head, log_prob_atol, replay, replay_tails, tree_of
from .baseline import capture
from .draft import write_json
from .precompile import Job, compile_all
from .problem import MODELS, Dims, draft_config, first_rows, random_head, random_step
from .timing import copy_bytes_per_s, interleave, machine

TREE = TreeConfig(5, 10, 60)
PREFIX, NUM_NEW = 512, 4
COMPILE_S = 120.0
Runs = dict[str, Callable[[], object]]
Record = Callable[[Callable[[], object]], Callable[[], object]]


def following(head: HeadWeights, base: int, most: int) -> HeadWeights:
    """The first ``base`` rows of a head over all of its ids, the others being rows to follow with."""
    few = first_rows(head, base)
    rows = torch.arange(head.draft_vocab, dtype=torch.int32, device=head.device)
    follow = FollowRows.of("text", most, few.draft_to_target, head.lm_head, rows)
    return replace(few, follow=follow)


def configuration(dims: Dims, base: int, batch: int, most: int, dtype: torch.dtype, fp8: bool) -> DrafterConfig:
    """Dimensions of a draft with room for ``most`` rows that join."""
    weight_dtype = torch.float8_e4m3fn if fp8 else dtype
    cfg = draft_config(dims, base, TREE, batch, PREFIX, dtype, weight_dtype)
    return replace(cfg, tail_rows=-(-most // 16) * 16)


def drafts(head: HeadWeights, cfg: DrafterConfig, tails: Sequence[int], weights: Weights, faults: list[str]) -> Runs:
    """A draft for each size of tail, checked; every size has buffers of its own."""
    runs: Runs = {}
    for size in tails:
        bufs = allocate_buffers(cfg, weights)
        features = random_step(cfg, PREFIX, NUM_NEW, bufs)
        name = "none"
        if bufs.tails is not None and head.follow is not None:
            name = f"tail {size}"
            for slot in range(cfg.num_slots):
                bufs.tails.set_slot(slot, tuple(range(slot * size, (slot + 1) * size)), head.follow)
            tail_rows.gather_rows(head.follow, bufs.tails)

        def run(bufs: Any = bufs, features: torch.Tensor = features) -> object:
            return launch_drafter(cfg, features, weights, bufs)

        step = Step.of(features, bufs)
        run()
        check_finished(bufs)
        if bufs.tails is None:
            found = replay(
                exact_head(weights.head, cfg), cfg.tree, step, candidates_of(bufs), tree_of(bufs), bufs.keys,
                bufs.values, atol=log_prob_atol(cfg),
            )  # fmt: skip
        else:
            found = replay_tails(cfg, head, bufs, step, candidates_of(bufs), tree_of(bufs))
        print(f"  {name}: {found}", flush=True)
        faults += [f"{name}: {fault}" for fault in found.faults]
        runs[name] = run
    return runs


def joining(head: HeadWeights, cfg: DrafterConfig, weights: Weights) -> Callable[[], object]:
    """Let 4 other tokens join each full tail, and gather their rows."""
    bufs, follow = allocate_buffers(cfg, weights), head.follow
    assert bufs.tails is not None
    assert follow is not None
    assert bufs.tails.loaded is not None
    tails, loaded, slots = bufs.tails, bufs.tails.loaded, cfg.num_slots
    state = SlotState.allocate(slots, 1, head.device)
    torch.arange(slots, out=state.active_slots)
    torch.arange(slots, out=state.active_inverse)
    state.active_count.fill_(slots)
    state.num_new.fill_(NUM_NEW)
    room = len(follow.ids)
    for slot in range(slots):
        tails.set_slot(slot, tuple(range(room - follow.most, room)), follow)
    state.new_tokens[:, :NUM_NEW] = follow.ids[:NUM_NEW].int()
    tail_rows.gather_rows(follow, tails)

    def run() -> None:
        # As before the step, so that rows are gathered every time.
        tails.ranks[:, :NUM_NEW] = room - 1
        loaded[:, :NUM_NEW] = -1
        tail_rows.join_tokens(state, follow, tails)
        tail_rows.gather_rows(follow, tails)

    return run


def measure(
    full: HeadWeights, bare: DrafterConfig, cfg: DrafterConfig, tails: Sequence[int], rounds: int, record: Record
) -> dict[str, Any]:
    """One row: microseconds of a draft by tail, and of joining. ``bare`` is ``cfg`` without room for rows that join."""
    head = following(full, cfg.draft_vocab, max(tails))
    weights = Weights.pack(head, cfg)
    faults: list[str] = []
    print(f"base {cfg.draft_vocab}, batch {cfg.num_slots}:", flush=True)
    runs = drafts(head, bare, [0], weights, faults) | drafts(head, cfg, tails, weights, faults)
    measured: dict[str, Any] = {
        "base": cfg.draft_vocab, "batch": cfg.num_slots, "faults": faults,
        "row_bytes": cfg.hidden * cfg.weight_dtype.itemsize, "level_bytes": bare.level_bytes,
    }  # fmt: skip
    if not faults:
        variants = {name: record(run) for name, run in runs.items()} | {"join": record(joining(head, cfg, weights))}
        times = interleave(variants, full.device, rounds)
        measured["times"] = {name: asdict(value) for name, value in times.items()}
        print("  " + "  ".join(f"{name} {value.median_us:.1f} us" for name, value in times.items()), flush=True)
    return measured


def bench(
    dims: Dims, args: argparse.Namespace, device: torch.device, dtype: torch.dtype, record: Record = capture
) -> dict[str, Any]:
    """Check, then time all rows; ``record`` makes a graph of a draft. ``args``: those of the command line."""
    started = time.perf_counter()
    pairs = [
        tuple(configuration(dims, base, batch, room, dtype, args.fp8) for room in (0, max(args.tails)))
        for base in args.base
        for batch in args.batch
    ]
    chip, cache = chip_of(device), default_cache()
    jobs = [Job(dims, cfg, cache.lookup(cfg, chip)) for pair in pairs for cfg in pair]
    done = compile_all(jobs, COMPILE_S) if device.type == "cuda" else []
    print(f"{sum(done)} of {len(jobs)} kernels compiled ahead, {time.perf_counter() - started:.0f} s", flush=True)
    full = random_head(dims, device, dtype)
    result: dict[str, Any] = {
        "machine": machine(device), "dims": args.dims, "weights": "fp8" if args.fp8 else str(dtype).split(".")[-1],
        "tree": asdict(TREE), "prefix": PREFIX, "num_new": NUM_NEW, "rounds": args.rounds,
        "copy_bytes_per_s": copy_bytes_per_s(device, rounds=args.rounds) if device.type == "cuda" else None,
        "kernels": len(jobs), "kernels_compiled_ahead": sum(done), "rows": [],
    }  # fmt: skip
    for bare, cfg in pairs:
        result["rows"].append(measure(full, bare, cfg, args.tails, args.rounds, record))
        result["seconds"] = time.perf_counter() - started
        if args.out:
            write_json(result, args.out)
    return result


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m eagle_slim.runtime.bench.draft_tails", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_argument("--dims", default="llama-3.1-8b", choices=MODELS)
    options.add_argument("--base", type=int, nargs="+", default=[2048, 32000])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options.add_argument("--tails", type=int, nargs="+", default=[0, 128, 512, 1024])
    options.add_argument("--fp8", action="store_true", help="FP8 weights")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--out", type=Path, help="write the JSON here as well")
    return options


def main() -> None:
    """Run from the command line."""
    args = parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    result = bench(MODELS[args.dims], args, device, torch.bfloat16)
    print(json.dumps(result))
    if any(row["faults"] for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
