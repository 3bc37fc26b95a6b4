"""Has anything become slower, and does drafting still beat plain decoding where it has to?

    python -m eagle_slim.runtime.bench.gates [--thresholds FILE] [--out gates-h200.json]
    python -m eagle_slim.runtime.bench.gates --record          # references for this device, then as above

Micro gates: the phases of a step (draft, verify, accept, commit) and tree attention over all layers after 512, 8,192
and 32,768 tokens, each over a device copy of the bytes that it must move: weights and keys for draft and verify, keys
for attention, the logits for accept, the accepted rows read and written for commit. The copy is replayed in turn with
the operation, so clocks and neighbours touch both. A ratio is there to be compared: a copy in a graph moves less than
the memory can (2.8 of 4.25 TB/s on an H200, 2026-11-22).

All must be green three times in a row; then the full gates run: drafting over plain decoding, with random weights and a
drawn verdict (`drawn_verdicts`). What is green, and when, is `gate_rules`; every threshold stands in ``gates.json``.
Exit status 0 when all are green, 1 when one is red, 2 for a wrong use. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import TreeConfig
from ..drafter.config import MAX_NEW_TOKENS
from ..errors import EagleSlimError, UsageError
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.tree_rows import ForwardRows
from .arguments import check_output, output_file
from .baseline import capture
from .drawn_verdicts import NUM_LENGTHS, DrawnVerdicts, draw_lengths
from .gate_rules import THRESHOLDS, FullGate, FullRecord, Gates, MicroGates, judge, median_ratios
from .precompile import compile_all, job_of
from .random_decoding import LAYERS, RandomModel, fill
from .timing import machine, time_queued_us
from .variants import Variant

TOP_K = 10
SAMPLES = 9
STEPS, TURNS = NUM_LENGTHS // 4, 4
Run = Callable[[], object]


class Micro:
    """The operations of the micro gates over one decoder, and one round of their ratios."""

    def __init__(self, gates: MicroGates, model: RandomModel, samples: int = SAMPLES) -> None:
        self.gates, self.model, self.samples = gates, model, samples
        self.device = model.target.device
        longest = max([gates.prefix, *gates.prefixes])
        # The walk is timed by repeating it, and each time moves on.
        room = (samples + 2) * _TIMES["accept"] * MAX_NEW_TOKENS
        cache = model.new_cache(1, longest + gates.nodes + room)
        self.decoder = model.decoder(cache, TreeConfig(gates.depth, TOP_K, gates.nodes), gates.draft_vocab)
        DrawnVerdicts(self.decoder).set_([gates.accepted_length] * NUM_LENGTHS)
        self._record = capture if self.device.type == "cuda" else lambda run: run
        self._copies: dict[int, Run] = {}
        self._attentions: dict[int, Run] = {}

    @torch.inference_mode()
    def ratios(self) -> dict[str, float]:
        """Each operation's time over the copy's: medians of interleaved samples."""
        decoder, found = self.decoder, {}
        fill(decoder, 1, self.gates.prefix)
        for name, run in decoder.timed_step(1, ChoiceRules()):
            run()
            found[name] = self._ratio(run, self.phase_bytes[name], _TIMES[name])
        for prefix in self.gates.prefixes:
            name = f"attention at {prefix}"
            found[name] = self._ratio(self._attention(prefix), self.model.kv_bytes(prefix), _TIMES["attention"])
        return found

    @property
    def phase_bytes(self) -> dict[str, int]:
        """Bytes that each phase must move."""
        gates, model, drafter = self.gates, self.model, self.decoder.drafter
        assert drafter is not None
        element = model.target.dtype.itemsize
        features = gates.accepted_length * model.target.feature_width * element
        return {
            "draft": drafter.cfg.draft_bytes([gates.prefix]),
            "verify": model.weight_bytes + model.kv_bytes(gates.prefix),
            "accept": gates.nodes * model.dims.vocab * element,
            "commit": 2 * (model.kv_bytes(gates.accepted_length) + features),
        }

    def _ratio(self, run: Run, size_bytes: int, times: int) -> float:
        if size_bytes not in self._copies:
            self._copies[size_bytes] = self._record(copy_of(size_bytes, self.device))
        copy = self._copies[size_bytes]
        pairs = [
            (time_queued_us(run, self.device, times), time_queued_us(copy, self.device, times))
            for _ in range(self.samples)
        ]
        own, copied = zip(*pairs, strict=True)
        return float(statistics.median(own) / statistics.median(copied))

    def _attention(self, prefix: int) -> Run:
        """Attention of all layers over the tree that the decoder has drafted last; the cache is read from memory."""
        if prefix in self._attentions:
            return self._attentions[prefix]
        decoder, target, nodes = self.decoder, self.model.target, self.gates.nodes
        assert decoder.drafter is not None
        tree = decoder.drafter.bufs
        lengths = torch.full((1,), prefix, dtype=torch.int32, device=self.device)
        rows, first = ForwardRows.allocate(1, nodes, lengths), torch.zeros_like(lengths)
        decoder.ops.tree_rows(first, first + 1, tree.draft_tokens, tree.parents, tree.tree_position_ids, rows)
        bufs = target.new_buffers(1, nodes, nodes)
        bufs.qkv.normal_()

        def run() -> None:
            for keys, values in zip(decoder.cache.keys, decoder.cache.values, strict=True):
                target.ops.tree_attention(
                    bufs.qkv, keys, values, rows.attention, target.scale, None, bufs.attended, bufs.scratch
                )

        return self._attentions.setdefault(prefix, self._record(run))


_TIMES = {"draft": 4, "verify": 2, "accept": 20, "commit": 20, "attention": 4}
"""Repetitions in a row of one sample: enough that a launch's own time does not count."""
_LARGEST_COPY = 1 << 30


def copy_of(size_bytes: int, device: torch.device) -> Run:
    """Copies that move ``size_bytes``, half read and half written, at most 1 GiB of each at a time."""
    half = max(1, size_bytes // 2)
    source = torch.zeros(min(half, _LARGEST_COPY), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pieces = [_LARGEST_COPY] * (half // _LARGEST_COPY) + [half % _LARGEST_COPY]

    def run() -> None:
        for size in filter(None, pieces):
            target[:size].copy_(source[:size])

    return run


@torch.inference_mode()
def measure_full(model: RandomModel, gate: FullGate, steps: int = STEPS, turns: int = TURNS) -> FullRecord:
    """Run plain decoding and drafting in turn, as the benchmark `generate` does."""
    tree = TreeConfig(gate.depth, TOP_K, gate.nodes)
    cache = model.new_cache(gate.sequences, gate.prefix + steps * tree.path_width + gate.nodes + 1)
    decoder = model.decoder(cache, tree, gate.draft_vocab)
    verdicts = DrawnVerdicts(decoder)
    plain = Variant(model.decoder(cache, None), {})
    drafted = Variant(decoder, {}, verdicts, draw_lengths(gate.accepted_length, verdicts.longest))
    for variant in (plain, drafted):
        # Compiles and captures.
        variant.run(0, gate.sequences, gate.prefix, 2)
        variant.runs.clear()
    for turn in range(turns):
        for variant in (plain, drafted):
            variant.run(turn, gate.sequences, gate.prefix, steps)
    speeds = [variant.summary() for variant in (plain, drafted)]
    return FullRecord(
        speeds[0]["tokens_per_s"], speeds[1]["tokens_per_s"], speeds[1]["accepted_length"], speeds[1]["is_length_met"]
    )


class Models:
    """One random model at a time, kept while gates ask for the same."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self._model: RandomModel | None = None

    def get(self, name: str) -> RandomModel:
        """Build a model, unless it is the last one."""
        if self._model is None or self._model.name != name:
            # The old one goes before the new one comes, so that there is room.
            self._model = None
            gc.collect()
            self._model = RandomModel(name, self.device, self.dtype)
        return self._model


def record(gates: Gates, micro: Micro, described: dict[str, Any]) -> Gates:
    """Measure this device's references: medians of as many rounds as must be green."""
    ratios = median_ratios([micro.ratios() for _ in range(gates.green_rounds)])
    references = gates.micro.references | {described["device"]: {**described, "ratios": ratios}}
    return replace(gates, micro=replace(gates.micro, references=references))


def run(gates: Gates, path: Path, models: Models, is_recording: bool = False, samples: int = SAMPLES) -> dict[str, Any]:
    """Measure and judge; with ``is_recording`` the references are measured and written to ``path`` before."""
    described = machine(models.device)
    device = str(described["device"])
    if not is_recording:
        # Before anything is built.
        gates.reference(device)
    micro = Micro(gates.micro, models.get(gates.micro.model), samples)
    if is_recording:
        gates = record(gates, micro, described)
        gates.save(path)
        print(f"references of {device} written to {path}", flush=True)
    measured = judge(
        gates, device, micro.ratios, lambda gate: measure_full(models.get(gate.model), gate), partial(print, flush=True)
    )
    return {"machine": described, "thresholds": path.name, **measured}


def check_models(gates: Gates) -> None:
    """Raise `UsageError` for a gate over dimensions that nobody knows."""
    for model in (gates.micro.model, *(gate.model for gate in gates.full)):
        if model not in LAYERS:
            raise UsageError(
                f"{model!r} is no known model; expected one of {', '.join(LAYERS)}.", model=model, expected=list(LAYERS)
            )


def compile_ahead(gates: Gates, device: torch.device) -> int:
    """Compile the drafters of all gates side by side; how many."""
    micro = gates.micro
    shapes = [(micro.model, micro.depth, micro.nodes, 1, micro.prefix, micro.draft_vocab)]
    shapes += [
        (gate.model, gate.depth, gate.nodes, gate.sequences, gate.prefix, gate.draft_vocab) for gate in gates.full
    ]
    jobs = [
        job_of(model, TreeConfig(depth, TOP_K, nodes), slots, prefix, rows, device)
        for model, depth, nodes, slots, prefix, rows in shapes
    ]
    return sum(compile_all(jobs, 120))


def main(argv: list[str] | None = None) -> None:
    """Run the gates; `--help` lists the options."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle_slim.runtime.bench.gates", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--thresholds", type=Path, default=THRESHOLDS, help="default: gates.json beside this program")
    parser.add_argument("--record", action="store_true", help="measure this device's references first, and write them")
    parser.add_argument("--out", type=output_file, help="write the report here")
    args = parser.parse_args(argv)
    try:
        gates = Gates.load(args.thresholds)
        check_models(gates)
        if args.record:
            check_output(args.thresholds, "--thresholds")
        if not torch.cuda.is_available():
            parser.exit(2, "these gates need an NVIDIA GPU\n")
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"{compile_ahead(gates, device)} kernels compiled ahead", flush=True)
        report = run(gates, args.thresholds, Models(device), args.record)
    except EagleSlimError as error:
        parser.error(str(error))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(0 if report["is_green"] else 1)


if __name__ == "__main__":
    main()
