"""What does a decoding step cost on the device, phase by phase, and how near is a call to its graphs?

    python -m eagle_slim.runtime.bench.step --dims llama-3.1-8b --out step.json
    python -m eagle_slim.runtime.bench.step --dims smollm2-135m --prefixes 512

A random target and head of known dimensions. Rows: every phase of a step with a full tree at each prefix, plain tokens,
several sequences, sampling; medians of graph replays. "wall" is the wall clock of a loop of steps as generation runs
them, over as many back-to-back replays of the same graph. The floor is bytes over the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from ..config import TreeConfig
from ..generation.decoder import PHASES, DeviceDecoder
from ..generation.device import DeviceDecoders
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.launch import TritonDrafter
from ..target.captured import CapturedTarget
from ..target.fused import FusedTarget
from ..target.transformers import TargetModel
from .problem import MODELS, first_rows, random_head
from .random_decoding import LAYERS, default_taps, fill, phase_times, random_target, run_steps, weight_bytes
from .timing import commit, copy_bytes_per_s, machine

SAMPLED = ChoiceRules(sampled=True, has_top_p=True)
SAMPLED_NUMBERS = (0.7, 0.0, 0.9, 0.0, 1.0, 0.0, 0.0, 0.0)


def wall_ratio(decoder: DeviceDecoder, num_active: int, prefix: int, steps: int = 100) -> dict[str, float]:
    """Wall clock of steps with their records read one behind, over back-to-back replays of the same graph."""
    found = {}
    for name in ("replays", "loop") * 2:
        fill(decoder, num_active, prefix)
        if name == "loop":
            found[name] = run_steps(decoder, num_active, steps).step_ms
            continue
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            decoder.step(num_active, ChoiceRules())
        torch.cuda.synchronize()
        found[name] = (time.perf_counter() - start) * 1e3 / steps
    return {
        "replay_wall_ms": found["replays"],
        "loop_wall_ms": found["loop"],
        "ratio": found["loop"] / found["replays"],
    }


def main() -> None:
    """Measure and print a table; JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--prefixes", type=int, nargs="*", default=[512, 8192, 32768])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--target", choices=("fused", "transformers"), default="fused")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    dims = MODELS[arguments.dims]
    bandwidth = copy_bytes_per_s(device)
    model = random_target(arguments.dims, dims, dtype, device)
    taps = default_taps(arguments.dims)
    target: FusedTarget | CapturedTarget
    target = FusedTarget(model, taps) if arguments.target == "fused" else CapturedTarget(TargetModel(model, taps))
    head = first_rows(random_head(dims, device, dtype), min(arguments.draft_vocab, dims.vocab))
    decoders = DeviceDecoders(target, TritonDrafter(head, TreeConfig(5, 10, arguments.nodes)))
    read_bytes = weight_bytes(arguments.dims, model)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for batch in arguments.batch:
            for prefix in arguments.prefixes if batch == 1 else arguments.prefixes[:1]:
                for is_drafted in (True, False):
                    decoder = decoders.get(batch, max(arguments.prefixes) + 400, is_drafted)
                    decoder.cache.keys.normal_()
                    decoder.cache.values.normal_()
                    kv_bytes = 2 * batch * prefix * target.num_layers * target.num_kv_heads * target.head_dim * 2
                    row = {"batch": batch, "prefix": prefix, "nodes": decoder.nodes, "sampled": False}
                    row |= {"floor_ms": (read_bytes + kv_bytes) / bandwidth * 1e3}
                    start = time.perf_counter()
                    row |= phase_times(decoder, batch, prefix, ChoiceRules())
                    row["with_capture_s"] = time.perf_counter() - start
                    if prefix == arguments.prefixes[0]:
                        row |= wall_ratio(decoder, batch, prefix)
                    rows.append(row)
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    if batch == 1 and prefix == arguments.prefixes[0]:
                        decoder.choice.numbers.copy_(torch.tensor(SAMPLED_NUMBERS))
                        decoder.choice.uniforms.uniform_()
                        sampled = row | {"sampled": True} | phase_times(decoder, batch, prefix, SAMPLED)
                        rows.append(sampled)
                        print({k: round(v, 3) if isinstance(v, float) else v for k, v in sampled.items()}, flush=True)
    report = {
        "dims": arguments.dims, "target": arguments.target, "draft_vocab": head.draft_vocab,
        "machine": machine(device), "commit": commit(), "copy_TB_per_s": bandwidth / 1e12, "phases": PHASES,
        "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
