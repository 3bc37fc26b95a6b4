"""A draft at the dimensions of a known model, compiled for a chip and executed without it; takes minutes and gigabytes.

    python -m kernels.compiled_dims llama-3.1-8b --chip 90 [--fp8] [--slots 1] [--depth 2] [--prefix 300]

As many programs as the chip has SMs. Races are not looked for: `compiled_programs` does that. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

os.environ.pop("TRITON_INTERPRET", None)

import torch
from eagle_slim.runtime.bench.problem import MODELS, draft_config, first_rows, random_head, random_step
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.kernels import host
from eagle_slim.runtime.kernels.launch import Weights, allocate_buffers
from eagle_slim.runtime.kernels.launch_params import KNOWN_CHIPS, choose_launch
from eagle_slim.runtime.kernels.packed_head import pack_head
from eagle_slim.runtime.kernels.tuned_cache import FixedLaunch
from eagle_slim.runtime.kernels.workspace import allocate_workspace
from kernels.compiled_programs import launcher
from kernels.replaying import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--chip", type=int, choices=(80, 90), required=True)
    parser.add_argument("--fp8", action="store_true", help="FP8 weights")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dims, chip = MODELS[args.model], KNOWN_CHIPS[args.chip]
    head = first_rows(random_head(dims, torch.device("cpu")), args.draft_vocab)
    cfg = draft_config(dims, args.draft_vocab, TreeConfig(args.depth, 10, 60), args.slots, args.prefix + 64)
    if args.fp8:
        cfg = replace(cfg, weight_dtype=torch.float8_e4m3fn)
    params = choose_launch(cfg, chip)
    weights = Weights(head, pack_head(head, cfg, FixedLaunch(params)))
    bufs = allocate_buffers(cfg, weights)
    bufs.workspace.update(allocate_workspace(cfg, params, "cpu"))
    host.launch = launcher(chip, checks_races=False)
    agreement = run(cfg, random_step(cfg, args.prefix, 4, bufs), weights, bufs).agreement
    print(json.dumps({"model": args.model, "chip": chip.name, "agrees": agreement.agrees, "is": str(agreement)}))


if __name__ == "__main__":
    main()
