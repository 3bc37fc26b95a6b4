"""Fail where something became slower, or drafting no longer beats plain decoding where it has to.

    python -m benchmarks.gates [--out benchmarks/results/DATE-h200-gates.json]
    python -m benchmarks.gates --record          # references for this device, then as above

Micro gates: the phases of a step (draft, verify, accept, commit) and tree attention over all layers after 512, 8,192
and 32,768 tokens, each over a device copy of the bytes that it must move: weights and keys for draft and verify, keys
for attention, the logits for accept, the accepted rows read and written for commit. The copy is replayed in turn with
the operation, so clocks and neighbours touch both. Ratios are for comparison only: a copy in a graph moves less than
the memory can (2.8 of 4.25 TB/s on an H200, 2026-11-22). A gate is green while its ratio is at most the one committed
for this device plus its tolerance.

All must be green three times in a row; then the full gates run, each three times: drafting over plain decoding, and
steps that run ahead over steps that do not, with random weights and a drawn verdict (`drawn_verdicts`). A run is green
from its threshold of tokens/s on, and only if no less than the stated length was really accepted. Every threshold
stands in ``gates.json``. All is strict (``EAGLE_SLIM_STRICT``; 0 asks for derived launch parameters).
Exit status 0 when all are green, 1 when one is red, 2 for a wrong use.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.errors import DrafterError, UsageError
from eagle_slim.runtime.ops import counted_apart, is_set, tuned_counts
from eagle_slim.runtime.settings import MAX_NEW_TOKENS, PartialVerification, TreeConfig

from benchmarks.shared.command import Command, write
from benchmarks.shared.decoding import (
    SPARE_LENGTH,
    RandomModel,
    attention_of_layers,
    compile_ahead,
    draft_bytes,
    filled_phases,
    measure_partial,
    take_turns,
)
from benchmarks.shared.drawn_verdicts import NUM_LENGTHS, draw_lengths
from benchmarks.shared.timing import machine, time_queued_us

THRESHOLDS = Path(__file__).parent / "gates.json"
TOP_K = 10
"""Of the micro gates' tree."""
SAMPLES = 9
STEPS, TURNS = NUM_LENGTHS // 4, 4
_TIMES = {"draft": 4, "verify": 2, "accept": 20, "commit": 20, "attention": 4}
"""Repetitions in a row of one sample: enough that a launch's own time does not count."""
_LARGEST_COPY = 1 << 30
Run = Callable[[], object]
Values = dict[str, Any]


def tree_of(gate: Values) -> TreeConfig:
    """Return the tree that a full gate, or the micro gates, draft."""
    return TreeConfig(gate["depth"], gate.get("top_k", TOP_K), gate["nodes"])


def reference_of(gates: Values, device: str) -> dict[str, float]:
    """Look up the committed ratios of a device. Raises `UsageError` where some or all are missing."""
    ratios: dict[str, float] = gates["micro"]["references"].get(device, {}).get("ratios", {})
    missing = sorted(gates["micro"]["tolerances"].keys() - ratios.keys())
    if missing:
        raise UsageError(
            f"No reference of {', '.join(missing)} for {device}: measure it with --record on a good commit."
        )
    return ratios


@torch.inference_mode()
def micro_rounds(micro: Values, model: RandomModel, samples: int = SAMPLES) -> Iterator[dict[str, float]]:
    """Yield rounds of the micro gates: each operation's time over the copy's, medians of interleaved samples."""
    device, element = model.target.device, model.target.dtype.itemsize
    prefix, accepted = micro["prefix"], micro["accepted_length"]
    prefixes = [int(name.split()[-1]) for name in micro["tolerances"] if name.startswith("attention at ")]
    # The walk is timed by repeating it, and each time moves on.
    room = (samples + 2) * _TIMES["accept"] * MAX_NEW_TOKENS
    cache = model.new_cache(1, max([prefix, *prefixes]) + micro["nodes"] + room)
    decoder = model.drawn_decoder(cache, tree_of(micro), micro["draft_vocab"], [accepted])
    as_graph = capture if device.type == "cuda" else lambda run: run
    # Attention is over the tree of a first draft; the cache is read from memory.
    for phase in filled_phases(decoder, 1, prefix):
        phase.run()
    attentions = {f"attention at {n}": as_graph(attention_of_layers(decoder, n)) for n in prefixes}
    assert decoder.drafts.drafter is not None
    num_bytes = {
        "draft": draft_bytes(decoder.drafts.drafter.cfg, [prefix]),
        "verify": model.weight_bytes + model.kv_bytes(prefix),
        "accept": micro["nodes"] * model.dims.vocab * element,
        "commit": 2 * (model.kv_bytes(accepted) + accepted * model.target.feature_width * element),
        **{f"attention at {n}": model.kv_bytes(n) for n in prefixes},
    }
    copies = {name: as_graph(copy_of(size, device)) for name, size in num_bytes.items()}

    def ratio(name: str, run: Run, times: int) -> float:
        turns = [
            (time_queued_us(run, device, times), time_queued_us(copies[name], device, times)) for _ in range(samples)
        ]
        timed, copied = zip(*turns, strict=True)
        return float(statistics.median(timed) / statistics.median(copied))

    while True:
        found = {}
        for phase in filled_phases(decoder, 1, prefix):
            phase.run()
            found[phase.name] = ratio(phase.name, phase.run, _TIMES[phase.name])
        yield found | {name: ratio(name, run, _TIMES["attention"]) for name, run in attentions.items()}


def copy_of(size_bytes: int, device: torch.device) -> Run:
    """Return a copy that moves ``size_bytes``, half read and half written, at most 1 GiB of each at a time."""
    half = max(1, size_bytes // 2)
    source = torch.zeros(min(half, _LARGEST_COPY), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pieces = [_LARGEST_COPY] * (half // _LARGEST_COPY) + [half % _LARGEST_COPY]

    def run() -> None:
        for size in filter(None, pieces):
            target[:size].copy_(source[:size])

    return run


@torch.inference_mode()
def measure_full(
    model: RandomModel, gate: Values, times: int, steps: int = STEPS, turns: int = TURNS
) -> Iterator[list[dict[str, Any]]]:
    """Run the baseline and drafting in turn, as the benchmarks `generate` and `partial` do, and sum both up, each time.

    Where a gate has ``partial_blocks``, drafting runs ahead and the baseline does not; ``survival`` is then the chance
    that a full pass confirms a token once it has confirmed those before it.
    """
    tree, sequences, prefix, vocab = tree_of(gate), gate["sequences"], gate["prefix"], gate["draft_vocab"]
    if gate["partial_blocks"]:
        option = PartialVerification("exact", gate["partial_blocks"])
        chances, accepted = [gate["survival"]] * times, gate["accepted_length"]
        for row in measure_partial(model, vocab, tree, sequences, prefix, [option], accepted, chances, steps, turns):
            yield [row["full"], row["ahead"] | {"is_length_met": row["full"]["is_length_met"]}]
        return
    cache = model.new_cache(sequences, prefix + steps * tree.path_width + tree.total_tokens + 1)
    lengths = draw_lengths(gate["accepted_length"] + SPARE_LENGTH, tree.path_width)
    decoders = [model.decoder(cache, None), model.drawn_decoder(cache, tree, vocab, lengths)]
    for _ in range(times):
        # Plain steps are all alike.
        yield take_turns(decoders, sequences, prefix, [max(1, steps // 4), steps], turns)


def judge(
    gates: Values,
    device: str,
    rounds: Iterator[Mapping[str, float]],
    measure: Callable[[Values, int], Iterable[Sequence[Mapping[str, Any]]]],
) -> dict[str, Any]:
    """Take micro rounds until enough in a row are green, then run the full gates; ``is_green``: whether all is well.

    ``measure``: the baseline and drafting of a full gate, ``green_rounds`` times; none runs when ``most_rounds`` have
    passed before.
    """
    reference, tolerances = reference_of(gates, device), gates["micro"]["tolerances"]
    report: dict[str, Any] = {"micro_rounds": [], "full": []}
    in_a_row = 0
    while in_a_row < gates["green_rounds"] and len(report["micro_rounds"]) < gates["most_rounds"]:
        ratios, verdicts = next(rounds), {}
        for name, tolerance in tolerances.items():
            ratio, limit = ratios[name], reference[name] * (1 + tolerance)
            verdicts[name] = {"ratio": ratio, "reference": reference[name], "limit": limit, "is_green": ratio <= limit}
            limits = f"reference {reference[name]:.3f}, limit {limit:.3f}"
            say(f"  {name:20s} {ratio:8.3f} x a copy of its bytes, {limits}", verdicts[name])
        is_green = all(verdict["is_green"] for verdict in verdicts.values())
        in_a_row = in_a_row + 1 if is_green else 0
        report["micro_rounds"].append(verdicts)
        print(f"round {len(report['micro_rounds'])}: {in_a_row} green in a row", flush=True)
    report["is_micro_green"] = in_a_row >= gates["green_rounds"]
    for gate in gates["full"] if report["is_micro_green"] else ():
        for base, drafted in measure(gate, gates["green_rounds"]):
            ratio = drafted["tokens_per_s"] / base["tokens_per_s"]
            is_green = drafted["is_length_met"] and ratio >= gate["threshold"]
            report["full"].append({**gate, "plain": base, "drafted": drafted, "ratio": ratio, "is_green": is_green})
            length = base["accepted_length"] if gate["partial_blocks"] else drafted["accepted_length"]
            found = f"{ratio:.2f} x the baseline (threshold {gate['threshold']}), {length:.3f} tokens a pass"
            say(f"{gate['name']}: {found}", report["full"][-1])
    is_green = report["is_micro_green"] and all(verdict["is_green"] for verdict in report["full"])
    return report | {"is_green": is_green}


def say(text: str, verdict: Mapping[str, Any]) -> None:
    """Print a line about a gate, and whether it is green."""
    print(f"{text}: {'green' if verdict['is_green'] else 'RED'}", flush=True)


def run(
    gates: Values, path: Path, model: RandomModel, is_recording: bool = False, samples: int = SAMPLES
) -> dict[str, Any]:
    """Measure and judge; ``is_recording`` first writes this device's references to ``path``.

    They are medians of as many rounds as must be green.
    """
    rounds, described = micro_rounds(gates["micro"], model, samples), machine(model.target.device)
    device = str(described["device"])
    with counted_apart() as launches:
        if is_recording:
            first = [next(rounds) for _ in range(gates["green_rounds"])]
            ratios = {name: statistics.median(each[name] for each in first) for name in first[0]}
            gates["micro"]["references"][device] = {**described, "ratios": ratios}
            path.write_text(json.dumps(gates, indent=1) + "\n")
        judged = judge(gates, device, rounds, partial(measure_full, model))
    return {"machine": described, "is_strict": is_set("EAGLE_SLIM_STRICT"), **tuned_counts(launches), **judged}


def main(argv: list[str] | None = None) -> None:
    """Run the gates; `--help` lists the options."""
    command = Command("gates", __doc__)
    command.add_argument("--record", action="store_true", help="measure this device's references first, and write them")
    args = command.parse_args(argv)
    device, gates = command.gpu(), json.loads(THRESHOLDS.read_text())
    os.environ.setdefault("EAGLE_SLIM_STRICT", "1")
    micro = gates["micro"]
    try:
        if not args.record:
            reference_of(gates, str(machine(device)["device"]))
        shapes = [(tree_of(gate), gate.get("sequences", 1), gate["draft_vocab"]) for gate in (micro, *gates["full"])]
        compile_ahead(micro["model"], shapes, device)
        report = run(gates, THRESHOLDS, RandomModel(micro["model"], device), args.record)
    except (UsageError, DrafterError) as error:
        command.error(str(error))
    write(report, args.out)
    sys.exit(0 if report["is_green"] else 1)


if __name__ == "__main__":
    main()
