"""What does a decoding step cost on the device, phase by phase, and how near is a call to its graphs?

    python -m eagle_slim.runtime.bench.step --dims llama-3.1-8b --out step.json
    python -m eagle_slim.runtime.bench.step --dims smollm2-135m --prefixes 512
    python -m eagle_slim.runtime.bench.step --nodes 8 16 32 60 --batch 1 2 4 8 16

A random target and head of known dimensions. Rows: a step at each prefix, with trees and plain, and several sequences
at the first prefix; sampling; medians of graph replays. The phases of the largest tree and of plain steps are timed
too. "wall" is the wall clock of a loop of steps as generation runs them, over as many back-to-back replays of the same
graph. The floor is bytes over the copy bandwidth of the same run. "ready": what getting ready takes, capture apart from
compilation, and the time from a call to its first token after a prompt of the first prefix's length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import SamplingConfig, TreeConfig
from ..drafter.config import MAX_NEW_TOKENS, DrafterConfig
from ..drafter.weights import HeadWeights
from ..generation.choice_rules import DeviceRules
from ..generation.decoder import PHASES, DeviceDecoder
from ..generation.device import DeviceDecoders
from ..generation.device_loop import DeviceLoop
from ..generation.requests import Request, start
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.host import chip_of
from ..kernels.launch import TritonDrafter, open_tuned_cache
from ..target.captured import CapturedTarget
from ..target.fused import FusedTarget
from ..target.lock import GenerationLock
from ..target.transformers import TargetModel
from .precompile import Job, compile_all
from .problem import MODELS, Dims, first_rows, random_head
from .random_decoding import LAYERS, default_taps, fill, phase_times, random_target, run_steps, weight_bytes
from .timing import commit, copy_bytes_per_s, machine

SAMPLED = ChoiceRules(sampled=True, has_top_p=True)
GREEDY_NUMBERS = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
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


def first_token_ms(decoders: DeviceDecoders, tree: TreeConfig | None, tokens: int, rounds: int = 7) -> float:
    """Median milliseconds from the start of a call to its first token, with a prompt of random tokens."""
    found = []
    for _ in range(rounds + 2):
        prompt = tuple(torch.randint(decoders.target.vocab_size, (tokens,)).tolist())
        heard: list[float] = []

        def hear(_request: int, _ids: Sequence[int], heard: list[float] = heard) -> None:
            heard.append(time.perf_counter())

        begun = time.perf_counter()
        states = start([Request(0, prompt, 8)], SamplingConfig(), hear)
        DeviceLoop(decoders, GenerationLock(), states, DeviceRules(ChoiceRules(), GREEDY_NUMBERS, None), 1, tree).run()
        found.append((heard[0] - begun) * 1e3)
    return float(statistics.median(found[2:]))


def compile_drafters(
    dims: Dims, head: HeadWeights, trees: Sequence[TreeConfig], slots: Sequence[int], tokens: int
) -> None:
    """Compile the persistent kernels of all trees and numbers of slots side by side."""
    cache, chip = open_tuned_cache(), chip_of(head.device)
    configs = [DrafterConfig.of(head, tree, count, tokens + MAX_NEW_TOKENS) for tree in trees for count in slots]
    compile_all([Job(dims, cfg, cache.lookup(cfg, chip)) for cfg in configs], seconds=180)


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)


def main() -> None:
    """Measure and print a table; JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--prefixes", type=int, nargs="*", default=[512, 8192, 32768])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--nodes", type=int, nargs="*", default=[60])
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
    trees = [TreeConfig(5, 10, nodes) for nodes in sorted(arguments.nodes, reverse=True)]
    read_bytes = weight_bytes(arguments.dims, model)
    first, several = arguments.prefixes[0], [batch for batch in arguments.batch if batch > 1]
    rows: list[dict[str, Any]] = []
    ready: dict[str, Any] = {}
    with torch.inference_mode():
        # A cache of its own for one sequence: several of the longest ones would not fit.
        for batches, prefixes in (([1], arguments.prefixes), (several, [first])):
            if not set(batches) & set(arguments.batch):
                continue
            decoders, longest = DeviceDecoders(target, TritonDrafter(head, trees[0])), max(prefixes) + 400
            capacity = decoders.get(max(batches), longest, None).cache.capacity
            compile_drafters(dims, head, trees, batches, capacity)
            if batches == [1]:
                ready = asdict(decoders.warm_up(1, longest, trees[0], ChoiceRules()))
                ready |= {"prompt_tokens": first, "first_token_ms": first_token_ms(decoders, trees[0], first)}
                show(ready)
            for batch in batches:
                for prefix in prefixes:
                    for tree in [*trees, None]:
                        decoder = decoders.get(batch, longest, tree)
                        decoder.cache.keys.normal_()
                        decoder.cache.values.normal_()
                        kv_bytes = 2 * batch * prefix * target.num_layers * target.num_kv_heads * target.head_dim * 2
                        row = {"batch": batch, "prefix": prefix, "nodes": decoder.nodes, "sampled": False}
                        row |= {"floor_ms": (read_bytes + kv_bytes) / bandwidth * 1e3}
                        is_main = tree in (trees[0], None)
                        row |= phase_times(decoder, batch, prefix, ChoiceRules(), is_whole=not is_main)
                        if batch == 1 and prefix == first and is_main:
                            row |= wall_ratio(decoder, batch, prefix)
                            decoder.choice.numbers.copy_(torch.tensor(SAMPLED_NUMBERS))
                            decoder.choice.uniforms.uniform_()
                            sampled = row | {"sampled": True} | phase_times(decoder, batch, prefix, SAMPLED)
                            rows.append(sampled)
                            show(sampled)
                        rows.append(row)
                        show(row)
            del decoders, decoder
            torch.cuda.empty_cache()
    report = {
        "dims": arguments.dims, "target": arguments.target, "draft_vocab": head.draft_vocab,
        "weight_bytes": read_bytes, "draft_bytes": head.num_weights * head.dtype.itemsize * (trees[0].depth + 1),
        "machine": machine(device), "commit": commit(),
        "copy_TB_per_s": bandwidth / 1e12, "phases": PHASES, "ready": ready, "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
