"""Has anything become slower, and does drafting still beat plain decoding where it has to?

    python -m benchmarks.gates [--out benchmarks/results/DATE-h200-gates.json]
    python -m benchmarks.gates --record          # references for this device, then as above

Micro gates: the phases of a step (draft, verify, accept, commit) and tree attention over all layers after 512, 8,192
and 32,768 tokens, each over a device copy of the bytes that it must move: weights and keys for draft and verify, keys
for attention, the logits for accept, the accepted rows read and written for commit. The copy is replayed in turn with
the operation, so clocks and neighbours touch both. Ratios are for comparison only: a copy in a graph moves less than
the memory can (2.8 of 4.25 TB/s on an H200, 2026-11-22).

All must be green three times in a row; then the full gates run: drafting over plain decoding, and steps that run ahead
over steps that do not, with random weights and a drawn verdict (`drawn_verdicts`). What is green, and when, is
`gate_rules`; every threshold stands in ``gates.json``.
Exit status 0 when all are green, 1 when one is red, 2 for a wrong use.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.drafter.drafter import BufferedDrafter
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.errors import DrafterError, UsageError
from eagle_slim.runtime.settings import MAX_NEW_TOKENS, PartialVerification, TreeConfig
from eagle_slim.runtime.step.decoder import Decoder

from benchmarks.shared.command import Command, write
from benchmarks.shared.decoding import (
    RandomModel,
    attention_of_layers,
    compile_ahead,
    draft_bytes,
    filled_phases,
    take_turns,
)
from benchmarks.shared.drawn_verdicts import NUM_LENGTHS, draw_lengths
from benchmarks.shared.gate_rules import THRESHOLDS, FullGate, Gates, MicroGates, judge
from benchmarks.shared.partial import measure as measure_partial
from benchmarks.shared.timing import machine, time_queued_us

TOP_K = 10
SAMPLES = 9
STEPS, TURNS = NUM_LENGTHS // 4, 4
Run = Callable[[], object]


class Micro:
    """The operations of the micro gates over one decoder, and one round of their ratios."""

    @torch.inference_mode()
    def __init__(self, gates: MicroGates, model: RandomModel, samples: int = SAMPLES) -> None:
        self.gates, self.samples = gates, samples
        self.device = model.target.device
        longest = max([gates.prefix, *gates.prefixes])
        # The walk is timed by repeating it, and each time moves on.
        room = (samples + 2) * _TIMES["accept"] * MAX_NEW_TOKENS
        cache = model.new_cache(1, longest + gates.nodes + room)
        tree = TreeConfig(gates.depth, TOP_K, gates.nodes)
        self.decoder = model.drawn_decoder(cache, tree, gates.draft_vocab, [gates.accepted_length])
        as_graph = capture if self.device.type == "cuda" else lambda run: run
        # Attention is over the tree of a first draft; the cache is read from memory.
        for phase in filled_phases(self.decoder, 1, gates.prefix):
            phase.run()
        self.attentions = {
            f"attention at {prefix}": as_graph(attention_of_layers(self.decoder, prefix)) for prefix in gates.prefixes
        }
        num_bytes = phase_bytes(gates, model, self.decoder)
        num_bytes |= {f"attention at {prefix}": model.kv_bytes(prefix) for prefix in gates.prefixes}
        self.copies = {name: as_graph(copy_of(size, self.device)) for name, size in num_bytes.items()}

    @torch.inference_mode()
    def ratios(self) -> dict[str, float]:
        """Each operation's time over the copy's: medians of interleaved samples."""
        found = {}
        for phase in filled_phases(self.decoder, 1, self.gates.prefix):
            phase.run()
            found[phase.name] = self._ratio(phase.name, phase.run, _TIMES[phase.name])
        return found | {name: self._ratio(name, run, _TIMES["attention"]) for name, run in self.attentions.items()}

    def _ratio(self, name: str, run: Run, times: int) -> float:
        pairs = [
            (time_queued_us(run, self.device, times), time_queued_us(self.copies[name], self.device, times))
            for _ in range(self.samples)
        ]
        own, copied = zip(*pairs, strict=True)
        return float(statistics.median(own) / statistics.median(copied))


def phase_bytes(gates: MicroGates, model: RandomModel, decoder: Decoder) -> dict[str, int]:
    """Bytes that each phase must move."""
    assert isinstance(decoder.drafter, BufferedDrafter)
    element = model.target.dtype.itemsize
    features = gates.accepted_length * model.target.feature_width * element
    return {
        "draft": draft_bytes(decoder.drafter.cfg, [gates.prefix]),
        "verify": model.weight_bytes + model.kv_bytes(gates.prefix),
        "accept": gates.nodes * model.dims.vocab * element,
        "commit": 2 * (model.kv_bytes(gates.accepted_length) + features),
    }


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
def measure_full(model: RandomModel, gate: FullGate, steps: int = STEPS, turns: int = TURNS) -> list[dict[str, Any]]:
    """Run the baseline and drafting in turn, as the benchmarks `generate` and `partial` do, and sum both up."""
    tree = gate.tree
    if gate.partial_blocks:
        option = PartialVerification("exact", gate.partial_blocks)
        (row,) = measure_partial(
            model, gate.draft_vocab, tree, gate.sequences, gate.prefix, [option], gate.accepted_length,
            [gate.survival], steps, turns,
        )  # fmt: skip
        return [row["full"], row["ahead"] | {"is_length_met": row["full"]["is_length_met"]}]
    cache = model.new_cache(gate.sequences, gate.prefix + steps * tree.path_width + gate.nodes + 1)
    lengths = draw_lengths(gate.accepted_length, tree.path_width)
    decoders = [model.decoder(cache, None), model.drawn_decoder(cache, tree, gate.draft_vocab, lengths)]
    return take_turns(decoders, gate.sequences, gate.prefix, steps, turns)


def run(
    gates: Gates, path: Path, model: RandomModel, is_recording: bool = False, samples: int = SAMPLES
) -> dict[str, Any]:
    """Measure and judge; ``is_recording`` first writes this device's references to ``path``.

    They are medians of as many rounds as must be green.
    """
    micro, described = Micro(gates.micro, model, samples), machine(model.target.device)
    device = str(described["device"])
    if is_recording:
        rounds = [micro.ratios() for _ in range(gates.green_rounds)]
        ratios = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        references = gates.micro.references | {device: {**described, "ratios": ratios}}
        gates = replace(gates, micro=replace(gates.micro, references=references))
        gates.save(path)
    say = partial(print, flush=True)
    return {"machine": described, **judge(gates, device, micro.ratios, partial(measure_full, model), say)}


def main(argv: list[str] | None = None) -> None:
    """Run the gates; `--help` lists the options."""
    command = Command("gates", __doc__)
    command.add_argument("--record", action="store_true", help="measure this device's references first, and write them")
    args = command.parse_args(argv)
    device, gates = command.gpu(), Gates.load(THRESHOLDS)
    try:
        if not args.record:
            gates.reference(str(machine(device)["device"]))
        micro = gates.micro
        shapes = [(TreeConfig(micro.depth, TOP_K, micro.nodes), 1, micro.draft_vocab)]
        shapes += [(gate.tree, gate.sequences, gate.draft_vocab) for gate in gates.full]
        compile_ahead(micro.model, shapes, device)
        report = run(gates, THRESHOLDS, RandomModel(gates.micro.model, device), args.record)
    except (UsageError, DrafterError) as error:
        command.error(str(error))
    write(report, args.out)
    sys.exit(0 if report["is_green"] else 1)


if __name__ == "__main__":
    main()
