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
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import TreeConfig
from ..generation.decoder import PHASES, DeviceDecoder
from ..generation.device import DeviceDecoders
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.launch import TritonDrafter
from ..target.captured import CapturedTarget
from ..target.fused import FusedTarget
from ..target.transformers import TargetModel
from .problem import MODELS, Dims, first_rows, random_head
from .timing import commit, copy_bytes_per_s, machine

LAYERS = {"smollm2-135m": 30, "llama-3.2-1b": 16, "llama-3.1-8b": 32, "qwen3-8b": 36}
TIED = ("smollm2-135m", "llama-3.2-1b")
SAMPLED = ChoiceRules(sampled=True, has_top_p=True)
SAMPLED_NUMBERS = (0.7, 0.0, 0.9, 0.0, 1.0, 0.0, 0.0, 0.0)


def random_target(name: str, dims: Dims, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a random Llama or Qwen3 of these dimensions on the device."""
    import transformers

    kind = "Qwen3" if name.startswith("qwen3") else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=dims.vocab, hidden_size=dims.hidden, intermediate_size=dims.intermediate,
        num_hidden_layers=LAYERS[name], num_attention_heads=dims.heads, num_key_value_heads=dims.kv_heads,
        head_dim=dims.head_dim, max_position_embeddings=131072, tie_word_embeddings=name in TIED,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def fill(decoder: DeviceDecoder, num_active: int, prefix: int) -> None:
    """Pretend that ``num_active`` sequences of ``prefix`` tokens are running, without an end in sight."""
    decoder.clear_()
    state = decoder.state
    state.lengths[:num_active] = prefix
    state.num_new[:num_active] = 1
    state.prefix[:num_active] = prefix - 1
    state.new_tokens[:num_active, 0] = 7
    state.max_generated.fill_(1 << 30)
    state.running[:num_active] = 1
    decoder.ops.list_active(state)


def replay_ms(run: Callable[[], None], reset: Callable[[], None], rounds: int = 20) -> float:
    """Median milliseconds between events around one replay."""
    times = []
    for _ in range(rounds + 3):
        reset()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times[3:]))


def measure(decoder: DeviceDecoder, num_active: int, prefix: int, rules: ChoiceRules) -> dict[str, float]:
    """Milliseconds of each phase and of a whole step."""

    def reset() -> None:
        fill(decoder, num_active, prefix)

    reset()
    row = {}
    for name, run in decoder.timed_step(num_active, rules):
        # A phase reads what those before it have left behind, so each is timed where it stands.
        row[f"{name}_ms"] = replay_ms(run, lambda: None) if name in ("draft", "verify") else replay_ms(run, reset)
        reset()
        for earlier, again in decoder.timed_step(num_active, rules):
            again()
            if earlier == name:
                break
    row["step_ms"] = replay_ms(lambda: decoder.step(num_active, rules), reset)
    return row


def wall_ratio(decoder: DeviceDecoder, num_active: int, prefix: int, steps: int = 100) -> dict[str, float]:
    """Wall clock of steps with their records read one behind, over back-to-back replays of the same graph."""
    rules = ChoiceRules()
    record = torch.empty_like(decoder.state.record, device="cpu").pin_memory()

    def replays() -> None:
        for _ in range(steps):
            decoder.step(num_active, rules)

    def loop() -> None:
        events: list[torch.cuda.Event] = []
        for _ in range(steps):
            decoder.step(num_active, rules)
            record.copy_(decoder.state.record, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            events.append(event)
            if len(events) > 1:
                events[-2].synchronize()
                record.tolist()

    found = {}
    for name, run in (("replays", replays), ("loop", loop), ("replays", replays), ("loop", loop)):
        fill(decoder, num_active, prefix)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
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
    taps = (2, LAYERS[arguments.dims] // 2, LAYERS[arguments.dims] - 3)
    target: FusedTarget | CapturedTarget
    target = FusedTarget(model, taps) if arguments.target == "fused" else CapturedTarget(TargetModel(model, taps))
    head = first_rows(random_head(dims, device, dtype), min(arguments.draft_vocab, dims.vocab))
    decoders = DeviceDecoders(target, TritonDrafter(head, TreeConfig(5, 10, arguments.nodes)))
    weight_bytes = sum(
        p.numel() * p.element_size() for name, p in model.named_parameters() if "embed_tokens" not in name
    )
    weight_bytes += dims.vocab * dims.hidden * 2 if arguments.dims in TIED else 0
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
                    row |= {"floor_ms": (weight_bytes + kv_bytes) / bandwidth * 1e3}
                    start = time.perf_counter()
                    row |= measure(decoder, batch, prefix, ChoiceRules())
                    row["with_capture_s"] = time.perf_counter() - start
                    if prefix == arguments.prefixes[0]:
                        row |= wall_ratio(decoder, batch, prefix)
                    rows.append(row)
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    if batch == 1 and prefix == arguments.prefixes[0]:
                        decoder.choice.numbers.copy_(torch.tensor(SAMPLED_NUMBERS))
                        decoder.choice.uniforms.uniform_()
                        sampled = row | {"sampled": True} | measure(decoder, batch, prefix, SAMPLED)
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
