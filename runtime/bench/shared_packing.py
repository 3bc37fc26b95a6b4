"""What does it cost to draft over part of a packed head, instead of packing that part by itself?

    python -m eagle_slim.runtime.bench.shared_packing [--out shared_packing.json] [--rounds 20]

Random heads in bf16: of Llama-3.1-8B dimensions, 32,000 rows packed, and of SmolLM2-135M dimensions, all 49,152 rows
packed; 1 and 8 sequences with a prefix of 512; depth 5, ``top_k`` 10, 60 nodes. "shared" launches over the first N rows
of the packed head, "own" over a packing of just these. Launch parameters are those of a decoding step. Before they are
timed, both must agree with the fp32 reference. CUDA-graph replays, interleaved; medians. The last line, and ``--out``,
is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import TreeConfig
from ..drafter.config import DrafterConfig
from ..drafter.weights import HeadWeights
from ..kernels.launch import Weights, allocate_buffers, check_finished, launch_drafter
from .agreement import Step, candidates_of, exact_head, log_prob_atol, replay, tree_of
from .baseline import capture
from .precompile import Job, compile_all
from .problem import MODELS, Dims, draft_config, first_rows, random_head, random_step
from .timing import interleave, machine

PREFIX = 512
TREE = TreeConfig(5, 10, 60)
MODELS_AND_ROWS = {"llama-3.1-8b": (32000, (32000, 16000, 8192)), "smollm2-135m": (49152, (49152, 16384, 4096))}
"""By model: LM-head rows packed, and those that are drafted over."""
SLOTS = (1, 8)

Record = Callable[[Callable[[], object]], Callable[[], object]]


def draft(
    cfg: DrafterConfig, weights: Weights, reference: HeadWeights, prefix: int, record: Record
) -> Callable[[], object]:
    """Draft once, compare with the reference, and record. Raises `AssertionError` where they differ."""
    bufs = allocate_buffers(cfg, weights)
    features = random_step(cfg, prefix, 4, bufs)
    step = Step.of(features, bufs)
    launch_drafter(cfg, features, weights, bufs)
    check_finished(bufs)
    agreement = replay(
        reference, cfg.tree, step, candidates_of(bufs), tree_of(bufs), bufs.keys, bufs.values, atol=log_prob_atol(cfg)
    )
    assert agreement.agrees, str(agreement)
    return record(lambda: launch_drafter(cfg, features, weights, bufs))


def jobs(dims: Dims, packed: int, rows: Sequence[int], slots: Sequence[int], device: torch.device) -> list[Job]:
    """Every kernel that will be launched."""
    from ..kernels.host import chip_of
    from ..kernels.tuned_cache import default_cache

    chip, cache = chip_of(device), default_cache()
    return [
        Job(dims, cfg, cache.lookup(cfg, chip), stored)
        for count in slots
        for used in rows
        for cfg in (draft_config(dims, used, TREE, count, PREFIX),)
        for stored in {packed, used}
    ]


def bench(
    device: torch.device,
    models: Mapping[str, tuple[int, Sequence[int]]],
    dims_of: Mapping[str, Dims],
    slots: Sequence[int] = SLOTS,
    tree: TreeConfig = TREE,
    prefix: int = PREFIX,
    rounds: int = 20,
    dtype: torch.dtype = torch.bfloat16,
    record: Record = capture,
) -> dict[str, Any]:
    """Check, then time all rows; ``record`` makes a graph of a draft."""
    found = []
    for model, (packed_rows, rows) in models.items():
        whole = first_rows(random_head(dims_of[model], device, dtype), packed_rows)
        first = draft_config(dims_of[model], packed_rows, tree, 1, prefix, dtype)
        packed = Weights.pack(whole, first)
        for used in rows:
            head = first_rows(whole, used)
            own = Weights.pack(head, draft_config(dims_of[model], used, tree, 1, prefix, dtype))
            for count in slots:
                cfg = draft_config(dims_of[model], used, tree, count, prefix, dtype)
                reference = exact_head(head, cfg)
                variants = {
                    name: draft(cfg, weights, reference, prefix, record)
                    for name, weights in (("shared", packed), ("own", own))
                }
                times = interleave(variants, device, rounds)
                shared_us, own_us = times["shared"].median_us, times["own"].median_us
                found.append(
                    {
                        "model": model, "packed": packed_rows, "draft_vocab": used, "slots": count,
                        "shared_us": shared_us, "own_us": own_us, "shared_over_own": shared_us / own_us,
                    }
                )  # fmt: skip
                print(
                    f"{model}, {used} of {packed_rows} rows, {count} slots: shared {shared_us:.1f} us, own "
                    f"{own_us:.1f} us, {shared_us / own_us:.3f}",
                    flush=True,
                )
    return {"machine": machine(device), "rows": found}


def main() -> None:
    """Print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs an NVIDIA GPU\n")
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = [
        job
        for model, (packed, rows) in MODELS_AND_ROWS.items()
        for job in jobs(MODELS[model], packed, rows, SLOTS, device)
    ]
    print(f"{sum(compile_all(kernels, 300))} of {len(kernels)} kernels compiled ahead", flush=True)
    result = bench(device, MODELS_AND_ROWS, MODELS, rounds=args.rounds)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
