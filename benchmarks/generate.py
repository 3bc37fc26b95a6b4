"""What does drafting gain end to end, and what does a smaller draft vocabulary add to it?

    python -m benchmarks.generate [--rows REGEX] [--out benchmarks/results/DATE-h200-generate.json]

Each row is MODEL/bBATCH/pPREFIX: dimensions of MODEL with random weights, from a cache full of random rows, trees of 60
nodes for one sequence and of 16 for several. Its variants take turns in one run: plain decoding, and drafting over each
of ``--sizes``. Times are by the wall clock of the loop, the host reading every step's record.

The tree is really drafted and verified and a path really taken over; only the verdict is drawn (`drawn_verdicts`), so
that the full vocabulary accepts ``--accepted`` tokens a pass and a smaller one less. By how much less is no measurement
of that model: it comes from FR-Spec's tables, or from what SmolLM2 lost in ``--answers``, and every row names its
source (`acceptance_loss`). Gains are tokens/s over the full vocabulary and over the 32,000 rows of public heads: gross,
with equal acceptance, and net of the loss. The result is written after every row.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.drafter.tuning.arguments import whole_from
from eagle_slim.runtime.drafter.tuning.precompile import compile_all, job_of
from eagle_slim.runtime.drafter.tuning.problem import MODELS
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig

from benchmarks.shared.acceptance_loss import FR_SPEC, AcceptanceLoss, measured_loss
from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import RandomModel, Variant, phase_times
from benchmarks.shared.drawn_verdicts import draw_lengths
from benchmarks.shared.timing import copy_bytes_per_s, machine

DEPTH, TOP_K = 5, 10
PUBLIC_ROWS = 32000
ANSWERS = Path(__file__).parent / "results" / "2026-11-22-h200-generate.json"
"""Holds SmolLM2's answers too, of the run that its other rows are from."""


@dataclass(frozen=True)
class Point:
    """One row of the table: a model's dimensions, sequences side by side, and tokens of each before it goes on."""

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


def all_points() -> list[Point]:
    """Every row."""
    models, batches, prefixes = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b"), (1, 4, 16), (512, 8192, 32768)
    return [Point(*shape) for shape in itertools.product(models, batches, prefixes)]


def rows_of(point: Point, sizes: Sequence[int]) -> list[int]:
    """Sizes in rows of a model's vocabulary, each once; 0, and what is larger than it, is all of it."""
    vocab = MODELS[point.model].vocab
    return list(dict.fromkeys(min(size or vocab, vocab) for size in sizes))


@dataclass(frozen=True)
class Drawn:
    """What is accepted over ``rows``: lengths of a mean that is ``factor`` of the full vocabulary's, by ``source``."""

    rows: int
    source: str
    factor: float
    mean: float
    lengths: list[int]


def draws_of(point: Point, sizes: Sequence[int], accepted: float, loss: AcceptanceLoss) -> list[Drawn]:
    """Draw the lengths of every vocabulary: of the whole one once, of each smaller one once for each loss.

    ``accepted``: mean length over the whole vocabulary. ``loss`` holds for all models, FR-Spec's beside it for this
    one. Raises `UsageError` for what cannot be drawn.
    """
    vocab = MODELS[point.model].vocab
    losses = [loss, *([FR_SPEC[point.model]] if point.model in FR_SPEC else [])]
    found = []
    for rows in rows_of(point, sizes):
        if rows < TOP_K:
            raise UsageError(f"A tree with {TOP_K} children a node needs as many rows, not {rows}.", found=rows)
        factors = {loss.source: loss.factor(rows) for loss in losses} if rows < vocab else {"the length asked for": 1.0}
        for source, factor in factors.items():
            lengths = draw_lengths(accepted * factor, point.tree.path_width)
            found.append(Drawn(rows, source, factor, accepted * factor, lengths))
    return found


@torch.inference_mode()
def measure(model: RandomModel, point: Point, draws: Sequence[Drawn], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one row's variants, in turn; what was accepted is counted, not assumed.

    All go over one cache, and the draws of a vocabulary over one decoder. A run of ``steps`` begins at the prefix anew.
    """
    room = max(steps, 64) * point.tree.path_width + point.tree.total_tokens + 1
    cache = model.new_cache(point.batch, point.prefix + room)
    plain = model.decoder(cache, None)
    variants = [Variant(plain, phase_times(plain, point.batch, point.prefix) | {"variant": "plain"})]
    for rows, same in itertools.groupby(draws, key=lambda drawn: drawn.rows):
        decoder = model.drawn_decoder(cache, point.tree, rows)
        phases: dict[str, float] = {}
        for drawn in same:
            variants.append(Variant(decoder, {"variant": "drafted"}, drawn.lengths))
            variants[-1].prepare()
            phases = phases or phase_times(decoder, point.batch, point.prefix)
            variants[-1].facts |= phases | {
                "draft_vocab": rows, "is_full": rows == model.dims.vocab, "acceptance_from": drawn.source,
                "acceptance_factor": drawn.factor, "drawn_length": drawn.mean,
            }  # fmt: skip
    for turn in range(rounds):
        for variant in variants:
            variant.run(turn, point.batch, point.prefix, steps)
    shared = {"row": point.name, **asdict(point), "depth": DEPTH, "top_k": TOP_K, "nodes": point.tree.total_tokens}
    return with_gains([shared | variant.facts | variant.summary() for variant in variants])


def with_gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows of one point, the first of which is plain decoding, what they gain, as ratios of tokens/s.

    ``over_plain``; ``net_over_full`` and ``net_over_32000`` with the acceptance that each row has (32,000 rows with the
    acceptance of the same source); ``gross_over_...`` were it the same.
    """
    plain, *drafted = rows
    found = [plain]
    for row in drafted:
        gains = {"over_plain": row["tokens_per_s"] / plain["tokens_per_s"]}
        for base in drafted:
            is_public = base["draft_vocab"] == PUBLIC_ROWS and base["acceptance_from"] == row["acceptance_from"]
            if (base["is_full"] or is_public) and base["draft_vocab"] >= row["draft_vocab"]:
                name = "full" if base["is_full"] else "32000"
                gains[f"net_over_{name}"] = row["tokens_per_s"] / base["tokens_per_s"]
                gains[f"gross_over_{name}"] = base["step_ms"] / row["step_ms"]
        found.append(row | gains)
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    points = {point.name: point for point in all_points()}
    command = Command("generate", __doc__, points)
    command.add_argument("--sizes", default="full,32000,16000,8192", help="draft vocabularies, as full,32000")
    command.add_argument("--accepted", type=float, default=3.0, help="tokens a pass drawn for the full vocabulary")
    command.add_argument("--steps", type=whole_from(1), default=60, help="steps of a run")
    command.add_argument("--rounds", type=whole_from(1), default=4, help="runs of each variant")
    command.add_argument("--answers", type=Path, default=ANSWERS, help="benchmarks.answers' result whose loss to take")
    args = command.parse_args(argv)
    chosen = [points[name] for name in command.chosen(args)]
    try:
        sizes = [0 if size == "full" else whole_from(1)(size) for size in args.sizes.split(",")]
        loss = measured_loss(json.loads(args.answers.read_text())["rows"], args.answers.name)
        draws = {point: draws_of(point, sizes, args.accepted, loss) for point in chosen}
    except (argparse.ArgumentTypeError, UsageError, OSError, ValueError, TypeError, KeyError) as error:
        command.error(f"--sizes, --accepted or --answers: {error!r}")
    device = command.gpu()
    # The length is no constant of a kernel.
    kernels = dict.fromkeys(
        (point.model, point.tree, point.batch, 2048, rows) for point in chosen for rows in rows_of(point, sizes)
    )
    print(
        f"{sum(compile_all([job_of(*kernel, device) for kernel in kernels], 180))} kernels compiled ahead", flush=True
    )
    result: dict[str, Any] = {
        "machine": machine(device), "copy_bytes_per_s": copy_bytes_per_s(device), "steps": args.steps,
        "rounds": args.rounds, "answers": args.answers.name, "rows": [],
    }  # fmt: skip
    for name, same in itertools.groupby(chosen, key=lambda point: point.model):
        model = RandomModel(name, device)
        for point in same:
            for row in measure(model, point, draws[point], args.steps, args.rounds):
                show(row)
                result["rows"].append(row)
            write(result, args.out)


if __name__ == "__main__":
    main()
