"""Measure what drafting gains end to end, and what a smaller draft vocabulary adds.

    python -m benchmarks.generate [--rows REGEX] [--out benchmarks/results/DATE-h200-generate.json]

Each row is MODEL/bBATCH/pPREFIX: dimensions of MODEL with random weights, from a cache full of random rows, trees of 60
nodes for one sequence and of 16 for several. Its variants take turns in one run: plain decoding, and drafting over each
of ``--sizes``. Times are by the wall clock of the loop, the host reading every step's record.

The tree is really drafted and verified and a path really taken over; only the verdict is drawn (`drawn_verdicts`), of
``--accepted`` tokens a pass for every vocabulary. So gains over the full vocabulary and over the 32,000 rows of public
heads are gross. Net of what fewer rows lose in acceptance they are computed: by FR-Spec's table, and by what SmolLM2
lost (`FR_SPEC`, `SMOLLM2`), neither of which is a measurement of that model. The result is written after every row.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from eagle_slim.runtime.drafter.tuning.problem import MODELS
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.decoding import RandomModel, compile_ahead, phase_times, take_turns
from benchmarks.shared.drawn_verdicts import draw_lengths
from benchmarks.shared.timing import copy_bytes_per_s, machine

DEPTH, TOP_K = 5, 10
PUBLIC_ROWS = 32000
FR_SPEC = {
    "llama-3.1-8b": {8192: 3.13, 16384: 3.40, 32768: 3.63, 65536: 3.80, 128256: 3.89},
    "llama-3.2-1b": {8192: 2.486, 16384: 2.601, 32768: 2.690, 65536: 2.773, 128256: 2.809},
    "qwen3-8b": {8192: 3.10, 16384: 3.35, 32768: 3.57, 65536: 3.69, 151936: 3.74},
}
"""Mean accepted length by rows, the most of which are the whole vocabulary, as FR-Spec (arXiv:2502.14856) publishes it
for EAGLE-2 heads of Llama-3-8B, Llama-3.2-1B (depth 3, 30 nodes) and Qwen2-7B; by the nearest of `problem.MODELS`."""
SMOLLM2 = {8192: 3.0022, 16000: 2.989, 32000: 3.0358, 49152: 3.0358}
"""The same of the built-in head: greedy answers of ``results/2026-11-26-h100-answers.json``."""


def factor(lengths: dict[int, float], rows: int) -> float:
    """Compute the accepted length over ``rows`` as a share of the full vocabulary's.

    Linear in log2(rows) between two sizes, 1 from the most rows on. Raises `UsageError` below the smallest size.
    """
    sizes = sorted(lengths)
    if rows < sizes[0]:
        raise UsageError(f"Accepted lengths are known from {sizes[0]} rows on, not of {rows}.")
    length = np.interp(np.log2(rows), np.log2(sizes), [lengths[size] for size in sizes])
    return float(length) / lengths[sizes[-1]]


@dataclass(frozen=True)
class Point:
    """One row of the table: a model's dimensions, the number of sequences, and the tokens before each goes on."""

    model: str
    batch: int
    prefix: int

    @property
    def name(self) -> str:
        """Short name, which ``--rows`` matches."""
        return f"{self.model}/b{self.batch}/p{self.prefix}"

    @property
    def tree(self) -> TreeConfig:
        """60 nodes for one sequence; 16 for several, which fill the chip's matrix units sooner."""
        return TreeConfig(DEPTH, TOP_K, 60 if self.batch == 1 else 16)

    def sizes(self, asked: Sequence[int]) -> list[int]:
        """Return draft vocabularies, each once; 0, and a size above the vocabulary, is all of it."""
        vocab = MODELS[self.model].vocab
        return list(dict.fromkeys(min(size or vocab, vocab) for size in asked))

    def losses(self, rows: int) -> dict[str, float]:
        """Look up accepted lengths over ``rows``, as shares of the whole vocabulary's, by source."""
        tables = {"SmolLM2": SMOLLM2} | ({"FR-Spec": FR_SPEC[self.model]} if self.model in FR_SPEC else {})
        is_full = rows >= MODELS[self.model].vocab
        return {name: 1.0 if is_full else factor(table, rows) for name, table in tables.items()}


def all_points() -> list[Point]:
    """List every row."""
    models, batches, prefixes = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b"), (1, 4, 16), (512, 8192, 32768)
    return [Point(*shape) for shape in itertools.product(models, batches, prefixes)]


@torch.inference_mode()
def measure(
    model: RandomModel, point: Point, sizes: Sequence[int], lengths: list[int], steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure one row's variants, in turn, over one cache; what was accepted is counted, not assumed.

    ``lengths``: those that are drawn. A run of ``steps`` begins at the prefix again. Returns plain decoding, then a row
    for each size with its gains, as ratios: over plain decoding, the full vocabulary and 32,000 rows.
    """
    room = max(steps, 64) * point.tree.path_width + point.tree.total_tokens + 1
    cache = model.new_cache(point.batch, point.prefix + room)
    decoders = [model.decoder(cache, None), *(model.drawn_decoder(cache, point.tree, n, lengths) for n in sizes)]
    times = [phase_times(decoder, point.batch, point.prefix) for decoder in decoders]
    found = take_turns(decoders, point.batch, point.prefix, steps, rounds)
    shared = {"row": point.name, **asdict(point), "depth": DEPTH, "top_k": TOP_K, "nodes": point.tree.total_tokens}
    plain, *drafted = [shared | time | row for time, row in zip(times, found, strict=True)]
    plain["variant"] = "plain"
    for row, rows in zip(drafted, sizes, strict=True):
        row |= {"variant": "drafted", "draft_vocab": rows, "losses": point.losses(rows)}
        row["over_plain"] = row["tokens_per_s"] / plain["tokens_per_s"]
    # Gross by the steps' times, and net of each loss.
    for row, base in itertools.product(drafted, drafted):
        if base["draft_vocab"] in (model.dims.vocab, PUBLIC_ROWS) and base["draft_vocab"] > row["draft_vocab"]:
            gross = base["step_ms"] / row["step_ms"]
            net = {name: gross * share / base["losses"][name] for name, share in row["losses"].items()}
            row[f"over_{base['draft_vocab']}"] = {"gross": gross, **net}
    return [plain, *drafted]


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    points = {point.name: point for point in all_points()}
    command = Command("generate", __doc__, points)
    command.add_argument("--sizes", default="full,32000,16000,8192", help="draft vocabularies, as full,32000")
    command.add_argument("--accepted", type=float, default=3.0, help="tokens a pass that are drawn")
    command.add_argument("--steps", type=whole_from(1), default=60, help="steps of a run")
    command.add_argument("--rounds", type=whole_from(1), default=4, help="runs of each variant")
    args = command.parse_args(argv)
    chosen = [points[name] for name in command.chosen(args)]
    try:
        asked = [0 if size == "full" else whole_from(1)(size) for size in args.sizes.split(",")]
        for point in chosen:
            for rows in point.sizes(asked):
                point.losses(rows)
        lengths = draw_lengths(args.accepted, DEPTH + 2)
    except (argparse.ArgumentTypeError, UsageError) as error:
        command.error(f"--sizes or --accepted: {error}")
    device = command.gpu()
    result: dict[str, Any] = {
        "machine": machine(device),
        "copy_bytes_per_s": copy_bytes_per_s(device),
        "steps": args.steps,
        "rounds": args.rounds,
        "rows": [],
    }
    for name, same in itertools.groupby(chosen, key=lambda point: point.model):
        of_model = list(same)
        shapes = [(p.tree, p.batch, rows) for p in of_model for rows in p.sizes(asked)]
        compile_ahead(name, shapes, device)
        model = RandomModel(name, device)
        for point in of_model:
            for row in measure(model, point, point.sizes(asked), lengths, args.steps, args.rounds):
                show(row)
                result["rows"].append(row)
            write(result, args.out)


if __name__ == "__main__":
    main()
