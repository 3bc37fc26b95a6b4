"""Time our steps beside those of serving engines, on one card.

    python -m benchmarks.engines [--dims DIMS] [--target-weights fp8] --out OURS            # ours, on a GPU
    python -m benchmarks.engines --add OURS ... --lines LINES [--chart FILE.svg] --out ALL  # theirs beside ours

Llama-3.1-8B's dimensions, random weights, a head of 32,000 rows in bf16, prompts of 512 tokens: plain decoding, chains
of 3 and 7 drafts, trees of 16 and 60 nodes, at 1, 4 and 16 sequences; in FP8 some of them. Mixtures of experts decode
plainly, routed uniformly. Ours: the wall clock of the loop, in which 2.5 tokens a step are accepted by lot. Each of
LINES is the JSON of one start of an engine on the same kind of card, measured by the wall clock of its calls, without
the prompts' passes: its scheduler is in the times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.target.cache import KVCache

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import EXPERTS, RandomModel, capture_steps, compile_ahead, take_turns
from benchmarks.shared.drawn_verdicts import draw_lengths
from benchmarks.shared.routing import RoutedModel
from benchmarks.shared.timing import machine

CASES = {
    "plain": None,
    "chain of 3": TreeConfig(2, 1, 4),
    "chain of 7": TreeConfig(6, 1, 8),
    "tree of 16": TreeConfig(4, 4, 16),
    "tree of 60": TreeConfig(5, 10, 60),
}
DIMS, SEQUENCES, PROMPT, ROWS, ACCEPTED = "llama-3.1-8b", (1, 4, 16), 512, 32000, 2.5
MEASURED = {
    "bf16": [(case, sequences) for sequences in SEQUENCES for case in CASES],
    "fp8": [("plain", 1), ("chain of 3", 1), ("tree of 60", 1), ("plain", 16)],
}
"""Cases and numbers of sequences, by the type of the target's weights."""
PLAIN = [("plain", sequences) for sequences in SEQUENCES]
"""Those of mixtures of experts."""
STEPS, MIXED_STEPS = 40, 128
"""Steps of a round; mixtures' differ by the experts that they take."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


@torch.inference_mode()
def measure(
    model: RandomModel, weights: str, rows: int, prompt: int, steps: int, is_held: bool = False, dims: str = DIMS
) -> Iterator[dict[str, Any]]:
    """Measure a row of our own for every case and number of sequences, once all are compiled and captured.

    ``is_held``: says READY then, and waits for a line on stdin, so that nothing is timed while engines beside it start.
    """
    cases = PLAIN if isinstance(model, RoutedModel) else MEASURED[weights]
    caches = {sequences: model.new_cache(sequences, prompt + 9 * steps + 64) for _, sequences in cases}

    def decoder_of(tree: TreeConfig | None, cache: KVCache) -> Decoder:
        if tree is None:
            return model.decoder(cache, None)
        return model.drawn_decoder(cache, tree, rows, draw_lengths(ACCEPTED, tree.path_width))

    decoders = [(decoder_of(CASES[case], caches[sequences]), sequences) for case, sequences in cases]
    capture_steps(decoders, prompt)
    if is_held:
        print("READY {}", flush=True)
        sys.stdin.readline()
    for (case, sequences), (decoder, _) in zip(cases, decoders, strict=True):
        if isinstance(model, RoutedModel):
            model.follow("uniform", sequences)
        row = take_turns([decoder], sequences, prompt, steps, 3)[0]
        yield {
            "engine": "eagle-slim",
            "dims": dims,
            "case": case,
            "weights": weights,
            "sequences": sequences,
            "ms": row["step_ms"],
            "accepted_length": row["accepted_length"],
        }


def rows_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Turn the JSON of one start of an engine into rows like ours."""
    job, facts = line["job"], line["facts"]
    name = f"{NAMES[line['engine']]} {facts['version']}"
    weights = job.get("quantization", "bf16")
    shared = {"engine": name, "dims": job.get("dims", DIMS), "case": job["case"], "weights": weights}
    shared["attention"], touched = facts.get("attention"), line["result"].get("touched", {})
    rows = [
        {**shared, "sequences": one["batch"], "ms": one["ms_per_step"], "accepted_length": one["accepted_length"]}
        for one in line["result"]["speeds"]
    ]
    # Experts of a layer, where the engine told its routing.
    return [row | ({"touched": seen} if (seen := touched.get(str(row["sequences"]))) else {}) for row in rows]


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw a bar for every row of the dense target in bf16: ms a step by case, a panel for each number of sequences."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["weights"] == "bf16" and row["dims"] == DIMS]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    for axes, sequences in zip(figure.subplots(1, len(SEQUENCES)), SEQUENCES, strict=True):
        for place, engine in enumerate(engines):
            own = [row for row in rows if (row["engine"], row["sequences"]) == (engine, sequences)]
            at = [list(CASES).index(row["case"]) + (place - 1) * 0.27 for row in own]
            bars = axes.bar(at, [row["ms"] for row in own], 0.25, label=engine)
            axes.bar_label(bars, fmt="%.1f", fontsize=6)
        axes.set_xticks(range(len(CASES)), [case.replace(" of ", "\n") for case in CASES], fontsize=8)
        axes.set_title(f"{sequences} sequence{'s'[: sequences > 1]}", fontsize=9)
    figure.axes[0].set_ylabel("ms a step")
    figure.axes[0].legend(fontsize=7, loc="upper left")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("engines", __doc__)
    command.add_argument("--dims", choices=(DIMS, *EXPERTS), default=DIMS)
    command.add_argument("--target-weights", choices=tuple(MEASURED), default="bf16")
    command.add_argument("--wait", action="store_true", help="measure after a line on stdin; READY says when it can be")
    command.add_argument("--add", type=Path, nargs="+", help="our results, to which engines are added; needs no GPU")
    command.add_argument("--lines", type=Path, help="lines of JSON, one for each start")
    command.add_argument("--chart", type=Path, help="draw all rows in bf16 here: .svg, .png or .pdf")
    args = command.parse_args(argv)
    if args.add is None:
        device, weights = command.gpu(), args.target_weights
        ours: dict[str, Any] = {"machine": machine(device), "draft_vocab": ROWS, "prompt": PROMPT, "rows": []}
        if args.dims == DIMS:
            drafts = [(tree, n, ROWS) for case, n in MEASURED[weights] if (tree := CASES[case]) is not None]
            with ThreadPoolExecutor(1) as side:
                compiled = side.submit(compile_ahead, DIMS, drafts, device)
                model = RandomModel(DIMS, device, weights=weights)
                compiled.result()
        else:
            model = RoutedModel(args.dims, device, weights=weights)
            weights = "mxfp4" if args.dims.startswith("gpt-oss") else weights
        steps = STEPS if args.dims == DIMS else MIXED_STEPS
        for row in measure(model, weights, ROWS, PROMPT, steps, args.wait, args.dims):
            show(row)
            ours["rows"].append(row)
            write(ours, args.out)
        print("RESULT {}", flush=True)
        return
    result, *others = (json.loads(path.read_text("utf-8")) for path in args.add)
    for other in others:
        if other["machine"] != result["machine"]:
            command.error(f"other machine or commit: {other['machine']}, beside {result['machine']}")
        result["rows"] += other["rows"]
    lines = [] if args.lines is None else args.lines.read_text("utf-8").splitlines()
    for line in map(json.loads, lines):
        if "error" in line:
            result.setdefault("failed", {})[line["name"]] = line["error"]
        elif line["facts"]["gpu"] != result["machine"]["device"]:
            command.error(f"{line['name']} ran on {line['facts']['gpu']}, ours on {result['machine']['device']}")
        else:
            result["rows"] += rows_of(line)
    write(result, args.out)
    if args.chart is not None:
        title = f"Llama-3.1-8B's dimensions, random weights, {ROWS:,} rows, prompts of {PROMPT}"
        draw(result["rows"], args.chart, f"{title}, {result['machine']['device']}")


if __name__ == "__main__":
    main()
