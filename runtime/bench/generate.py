"""What does drafting gain end to end, and what does a smaller draft vocabulary add to it?

    python -m eagle_slim.runtime.bench.generate [--rows REGEX] [--seconds 240] [--out results/generate.json]

Variants of a row take turns in one run: transformers' ``generate``, our plain decoding, and drafting over each of
``--sizes``. Times are by the wall clock of the loop, the host reading every step's record.

    smollm2-135m/examples      the built-in target and head, real prompts, whole calls (`answers`)
    MODEL/bBATCH/pPREFIX       dimensions of MODEL with random weights, from a cache full of random rows

With random weights the tree is really drafted and verified and a path really taken over; only the verdict is drawn
(`drawn_verdicts`), so that the full vocabulary accepts ``--accepted`` tokens a pass and a smaller one less. By how much
less is no measurement of that model: it comes from FR-Spec's tables, or from what SmolLM2 lost in the same run (or in
that of ``--smollm2``), and every row names its source (`acceptance_loss`). Gains are tokens/s over the full vocabulary
and over the 32,000 rows of public heads: gross, with equal acceptance, and net of the loss.

The result is written after every row: JSON, with a table in Markdown beside it, and last a PNG where matplotlib is.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..comparison.prompt_file import load_prompts
from ..config import TreeConfig
from ..errors import EagleSlimError, UsageError
from ..generation.decoder import PHASES, DeviceDecoder
from ..kernels.choose_tokens import ChoiceRules
from .acceptance_loss import FR_SPEC, AcceptanceLoss, measured_loss
from .answers import PROMPTS, call_transformers, load_model
from .answers import measure as measure_answers
from .arguments import output_file, whole_from
from .drawn_verdicts import DrawnVerdicts, draw_lengths
from .gains_table import gains_table
from .precompile import Job, compile_all, job_of
from .problem import MODELS
from .random_decoding import RandomModel, phase_times
from .timing import copy_bytes_per_s, machine
from .variants import Variant

DEPTH, TOP_K = 5, 10
EXAMPLES = "smollm2-135m/examples"
PUBLIC_ROWS = 32000
EXAMPLE_ROUNDS = 2
MOST_TRANSFORMERS_ROWS = 8192
"""Beyond so many prompt tokens in all, transformers' own prompt and cache would take most of the time and memory."""


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
    """Every row, the most wanted first."""
    eight, one = "llama-3.1-8b", "llama-3.2-1b"
    wanted = [Point(eight, 1, 512), Point(one, 1, 512), Point(eight, 1, 8192), Point(eight, 1, 32768)]
    wanted += [Point(eight, batch, 512) for batch in (4, 16)]
    wanted += [Point("qwen3-8b", 1, 512), Point(one, 4, 512), Point(eight, 4, 8192)]
    wanted += [
        Point(model, batch, prefix)
        for model in (eight, one, "qwen3-8b")
        for batch in (1, 4, 16)
        for prefix in (512, 8192, 32768)
    ]
    return list(dict.fromkeys(wanted))


@dataclass(frozen=True)
class Settings:
    """What all rows share. ``sizes``: rows of the draft vocabulary, 0 for all; ``accepted``: tokens a pass over all."""

    sizes: tuple[int, ...] = (0, PUBLIC_ROWS, 16000, 8192)
    accepted: float = 3.0
    steps: int = 60
    rounds: int = 4
    transformers_tokens: int = 6
    seed: int = 0

    def rows_of(self, vocab: int) -> list[int]:
        """The sizes in rows of a model's vocabulary, each once; what is larger than it is all of it."""
        return list(dict.fromkeys(min(size or vocab, vocab) for size in self.sizes))

    def capacity(self, point: Point) -> int:
        """Rows of a slot that no run of steps fills: each begins at the prefix anew."""
        most_steps = max(self.steps, 64)
        return point.prefix + most_steps * point.tree.path_width + point.tree.total_tokens + 1


def variants_of(
    model: RandomModel, point: Point, settings: Settings, losses: Sequence[AcceptanceLoss]
) -> list[Variant]:
    """Plain decoding, the whole vocabulary, and each smaller one once for each loss; all over one cache."""
    cache = model.new_cache(point.batch, settings.capacity(point))
    variants = [Variant(model.decoder(cache, None), {"variant": "plain", "draft_vocab": None})]
    for rows in settings.rows_of(model.dims.vocab):
        is_full = rows == model.dims.vocab
        decoder = model.decoder(cache, point.tree, rows)
        verdicts = DrawnVerdicts(decoder)
        for source, factor in factors_of(point, rows, losses):
            drawn = settings.accepted * factor
            facts = {
                "variant": "drafted", "draft_vocab": rows, "is_full": is_full, "is_verdict_drawn": True,
                "acceptance_from": source, "acceptance_factor": factor, "drawn_length": drawn,
            }  # fmt: skip
            lengths = draw_lengths(drawn, verdicts.longest, settings.seed)
            variants.append(Variant(decoder, facts, verdicts, lengths))
    return variants


def factors_of(point: Point, rows: int, losses: Sequence[AcceptanceLoss]) -> list[tuple[str, float]]:
    """What is accepted over ``rows`` as a share of what the whole vocabulary accepts, each with who says so.

    Raises `UsageError` where nothing tells, or a source knows no vocabulary as small.
    """
    if rows == MODELS[point.model].vocab:
        return [("the length asked for", 1.0)]
    if not losses:
        raise UsageError(
            f"{point.name}: nothing tells what {rows} rows lose. Take the full vocabulary alone, or --smollm2.",
            option="sizes", found=rows,
        )  # fmt: skip
    return [(loss.source, loss.factor(rows)) for loss in losses]


def losses_of(point: Point, losses: Sequence[AcceptanceLoss]) -> list[AcceptanceLoss]:
    """``losses``, which hold for all models, and what FR-Spec prints for this one."""
    return [*losses, *([FR_SPEC[point.model]] if point.model in FR_SPEC else [])]


def check_point(point: Point, settings: Settings, losses: Sequence[AcceptanceLoss]) -> None:
    """Raise `UsageError` for a row that could not be drawn, before anything is built for it."""
    for rows in settings.rows_of(MODELS[point.model].vocab):
        if rows < TOP_K:
            raise UsageError(
                f"A tree with {TOP_K} children a node cannot be drafted from {rows} rows.",
                option="sizes", found=rows, expected=TOP_K,
            )  # fmt: skip
        for _, factor in factors_of(point, rows, losses_of(point, losses)):
            draw_lengths(settings.accepted * factor, point.tree.path_width, settings.seed)


@torch.inference_mode()
def measure_point(
    model: RandomModel, point: Point, settings: Settings, losses: Sequence[AcceptanceLoss]
) -> list[dict[str, Any]]:
    """Measure one row's variants, in turn; what was accepted is counted, not assumed."""
    variants = variants_of(model, point, settings, losses)
    phases: dict[DeviceDecoder, dict[str, float]] = {}
    for variant in variants:
        variant.prepare()
        if variant.decoder not in phases:
            timed = phase_times(variant.decoder, point.batch, point.prefix, ChoiceRules())
            phases[variant.decoder] = {name: ms for name, ms in timed.items() if name != "step_ms"}
    by_transformers = []
    for turn in range(settings.rounds):
        if settings.transformers_tokens and point.batch * point.prefix <= MOST_TRANSFORMERS_ROWS:
            by_transformers.append(_transformers_token_ms(model, point, settings.transformers_tokens))
        for variant in variants:
            variant.run(turn, point.batch, point.prefix, settings.steps)
    rows = [
        variant.facts | is_tuned(variant.decoder) | phases[variant.decoder] | variant.summary() for variant in variants
    ]
    if by_transformers:
        token_ms = statistics.median(by_transformers)
        facts = {"variant": "transformers", "draft_vocab": None, "accepted_length": 1.0, "step_ms": token_ms}
        rows.insert(0, facts | {"tokens_per_s": point.batch * 1e3 / token_ms})
    shared = {"row": point.name, **asdict(point), "depth": DEPTH, "top_k": TOP_K, "nodes": point.tree.total_tokens}
    return with_gains([shared | row for row in rows])


def is_tuned(decoder: DeviceDecoder) -> dict[str, bool]:
    """Whether the drafter's launch parameters were tuned for this chip or derived; nothing where there is no kernel."""
    drafter = decoder.drafter
    if drafter is None or drafter.weights.packed is None:
        return {}
    return {"is_tuned": drafter.weights.packed.launches.is_tuned(drafter.cfg)}


def _transformers_token_ms(model: RandomModel, point: Point, new_tokens: int) -> float:
    prompts = torch.randint(3, model.dims.vocab, (point.batch, point.prefix), device=model.target.device)
    # Random weights may well choose the end of sequence.
    _, _, decode_s = call_transformers(
        model.model, prompts, {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    )
    return decode_s * 1e3 / (new_tokens - 1)


def with_gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows of one point what they gain, as ratios of tokens/s.

    ``over_plain`` and ``over_transformers``; ``net_over_full`` and ``net_over_32000`` with the acceptance that each row
    has (32,000 rows with the acceptance of the same source); ``gross_over_...`` were it the same.
    """
    plain = {row["variant"]: row["tokens_per_s"] for row in rows if row["variant"] != "drafted"}
    drafted = [row for row in rows if row["variant"] == "drafted"]
    full = next((row for row in drafted if row["is_full"]), None)
    found = []
    for row in rows:
        gains = {f"over_{name}": row["tokens_per_s"] / speed for name, speed in plain.items() if name != row["variant"]}
        if row["variant"] == "drafted":
            same = [
                other for other in drafted
                if other["draft_vocab"] == PUBLIC_ROWS and other["acceptance_from"] == row["acceptance_from"]
            ]  # fmt: skip
            for name, base in (("full", full), ("32000", same[0] if same else None)):
                if base is not None and base["draft_vocab"] >= row["draft_vocab"]:
                    gains[f"net_over_{name}"] = row["tokens_per_s"] / base["tokens_per_s"]
                    gains[f"gross_over_{name}"] = base["step_ms"] / row["step_ms"]
        found.append(row | gains)
    return found


def measure_examples(settings: Settings, prompts: Path, limit: int | None, new_tokens: int) -> list[dict[str, Any]]:
    """Measure the built-in target and head for real: whole calls, one prompt after another."""
    model, encoded = load_model(prompts, limit, depth=DEPTH, top_k=TOP_K, total_tokens=60)
    sizes = [str(size) if size else "full" for size in settings.sizes if size < model.draft_vocab]
    tokens = settings.transformers_tokens
    rows = measure_answers(model, encoded, sizes, new_tokens, EXAMPLE_ROUNDS, transformers_tokens=tokens)
    return example_rows(rows)


def example_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `answers.measure` in the form of this table."""
    full = max((row["draft_vocab"] for row in rows if isinstance(row["draft_vocab"], int)), default=0)
    found = []
    for row in rows:
        size = row["draft_vocab"]
        facts: dict[str, Any] = {"variant": size, "draft_vocab": None}
        if isinstance(size, int):
            facts = {
                "variant": "drafted", "draft_vocab": size, "is_full": size == full, "is_verdict_drawn": False,
                "acceptance_from": "measured",
            }  # fmt: skip
        step_ms = 1e3 * row["accepted_length"] / row["decode_tokens_per_s"]
        shared = {"row": EXAMPLES, "model": "smollm2-135m", "batch": 1, "depth": DEPTH, "top_k": TOP_K, "nodes": 60}
        found.append(row | shared | facts | {"step_ms": step_ms, "tokens_per_s": row["decode_tokens_per_s"],
                                             "whole_calls_tokens_per_s": row["tokens_per_s"]})  # fmt: skip
    return with_gains(found)


def jobs_of(points: Sequence[Point], settings: Settings, with_examples: bool, device: torch.device) -> list[Job]:
    """Compilations of the persistent kernel that the rows need, first needed first."""
    shapes = [(Point("smollm2-135m", 1, 512), 1024, True)] if with_examples else []
    shapes += [(point, settings.capacity(point), False) for point in points]
    jobs: dict[object, Job] = {}
    for point, capacity, is_packing_shared in shapes:
        vocab = MODELS[point.model].vocab
        for rows in settings.rows_of(vocab):
            packed = vocab if is_packing_shared else rows
            # The length is no constant of a kernel.
            jobs.setdefault(
                (point.model, point.batch, point.tree, rows, packed),
                job_of(point.model, point.tree, point.batch, capacity, rows, device, packed),
            )
    return list(jobs.values())


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    size = f"{row['draft_vocab']:,}" if row["draft_vocab"] else row["variant"]
    cells = [f"accepted {row['accepted_length']:.3f}", f"step {row['step_ms']:.3f} ms"]
    cells += [f"{name} {row[f'{name}_ms']:.3f}" for name in PHASES if f"{name}_ms" in row]
    cells.append(f"{row['tokens_per_s']:.0f} tokens/s")
    cells += [f"x{row[f'over_{name}']:.2f} {name}" for name in ("transformers", "plain") if f"over_{name}" in row]
    for name in ("full", "32000"):
        if f"net_over_{name}" in row and row[f"net_over_{name}"] != 1:
            gross, net = (100 * row[f"{kind}_over_{name}"] - 100 for kind in ("gross", "net"))
            cells.append(f"over {name} {gross:+.1f}% gross, {net:+.1f}% net")
    if not row.get("is_length_met", True):
        cells.append(f"WAS TO ACCEPT {row['drawn_length']:.3f}")
    if row["variant"] == "drafted":
        cells.append(f"[{row['acceptance_from']}]")
    print(f"{row['row']:24s} {size:12s} {'  '.join(cells)}", flush=True)


def run(
    points: Sequence[Point], settings: Settings, device: torch.device, seconds: float, started: float,
    losses: Sequence[AcceptanceLoss] = (), examples: dict[str, Any] | None = None, out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure rows until the time is up; those left out are named in the result.

    ``examples``: arguments of `measure_examples`, whose loss then joins ``losses``; None leaves it out. ``losses``
    hold for all models, beside FR-Spec's for each.
    """

    def left() -> float:
        return seconds - (time.perf_counter() - started)

    described = machine(device)
    print(" ".join(f"{key}={value}" for key, value in described.items()), flush=True)
    jobs = jobs_of(points, settings, examples is not None, device) if device.type == "cuda" else []
    done = sum(compile_all(jobs, max(1.0, left() * 0.4)))
    bandwidth = copy_bytes_per_s(device, 2 << 30 if device.type == "cuda" else 1 << 20)
    print(f"{done} of {len(jobs)} kernels compiled ahead, {left():.0f} s left", flush=True)
    result: dict[str, Any] = {
        "machine": described, "copy_bytes_per_s": bandwidth, "settings": asdict(settings),
        "kernels_compiled_ahead": done, "kernels": len(jobs), "rows": [], "seconds": {}, "left_out": [],
    }  # fmt: skip
    losses, model, longest = list(losses), None, 0.0
    if examples is not None:
        begin = time.perf_counter()
        keep(result, measure_examples(settings, **examples), EXAMPLES, begin, out)
        losses += filter(None, [measured_loss(result["rows"])])
    for point in points:
        begin = time.perf_counter()
        if left() < longest:
            result["left_out"].append(point.name)
            continue
        if model is None or model.name != point.model:
            # The old one goes before the new one comes, so that there is room.
            model = None
            gc.collect()
            model = RandomModel(point.model, device)
        keep(result, measure_point(model, point, settings, losses_of(point, losses)), point.name, begin, out)
        longest = max(longest, time.perf_counter() - begin)
    if result["left_out"]:
        print(f"out of time, left out: {' '.join(result['left_out'])}", flush=True)
    return result


def keep(result: dict[str, Any], rows: list[dict[str, Any]], name: str, begin: float, out: Path | None) -> None:
    """Print rows, add them to the result, and write what there is."""
    for row in rows:
        print_row(row)
    result["rows"] += rows
    result["seconds"][name] = time.perf_counter() - begin
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        out.with_suffix(".md").write_text(gains_table(result["rows"]) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="python -m eagle_slim.runtime.bench.generate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rows", metavar="REGEX", default="", help="only rows whose name this matches, as 8b/b1/p512$")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--seconds", type=float, default=240, help="stop by then, and name the rows left out")
    parser.add_argument("--sizes", default="full,32000,16000,8192", help="draft vocabularies, as full,32000")
    parser.add_argument("--accepted", type=float, default=3.0, help="tokens a pass drawn for the full vocabulary")
    parser.add_argument("--steps", type=whole_from(1), default=60, help="steps of a run")
    parser.add_argument("--rounds", type=whole_from(1), default=4, help="runs of each variant")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn lengths")
    parser.add_argument(
        "--transformers-tokens",
        type=whole_from(0),
        default=6,
        help="new tokens of transformers' generate, 2 or more; 0: without it",
    )
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="for the built-in model")
    parser.add_argument("--limit", type=whole_from(1), help="only the first prompts")
    parser.add_argument("--new", type=whole_from(2), default=128, help="new tokens a prompt")
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="earlier result whose loss to take")
    parser.add_argument("--out", type=output_file, help="write JSON here, a table and a plot beside it")
    args = parser.parse_args(argv)
    try:
        points = [point for point in all_points() if re.search(args.rows, point.name)]
        with_examples = re.search(args.rows, EXAMPLES) is not None
        sizes = tuple(0 if size == "full" else whole_from(1)(size) for size in args.sizes.split(","))
    except (re.error, argparse.ArgumentTypeError) as error:
        parser.error(f"--rows is a regular expression, --sizes numbers or full: {error}")
    if args.list:
        print("\n".join([EXAMPLES] * with_examples + [point.name for point in points]))
        return
    if not points and not with_examples:
        parser.error("no row matches")
    if args.transformers_tokens == 1:
        parser.error("--transformers-tokens: the first token is the prompt's, so at least 2")
    earlier = []
    if args.smollm2:
        try:
            loss = measured_loss(json.loads(args.smollm2.read_text())["rows"], args.smollm2.name)
        except (OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"argument --smollm2: {args.smollm2} is no result of this benchmark: {error!r}")
        if loss is None:
            parser.error(f"argument --smollm2: {args.smollm2} holds no answers over two sizes of SmolLM2's vocabulary")
        earlier.append(loss)
    settings = Settings(sizes, args.accepted, args.steps, args.rounds, args.transformers_tokens, args.seed)
    examples = {"prompts": args.prompts, "limit": args.limit, "new_tokens": args.new} if with_examples else None
    try:
        if examples is not None:
            load_prompts(args.prompts, args.limit)
        for point in points:
            check_point(point, settings, earlier)
        if not torch.cuda.is_available():
            parser.exit(1, "this benchmark needs an NVIDIA GPU\n")
        device = torch.device("cuda", torch.cuda.current_device())
        result = run(points, settings, device, args.seconds, started, earlier, examples, args.out)
    except EagleSlimError as error:
        parser.error(str(error))
    if args.out:
        draw(result, args.out)
    print(json.dumps(result))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the gains, where matplotlib is installed."""
    try:
        from .plots import plot_gains
    except ModuleNotFoundError as error:
        print(f"no plot: {error}. Draw it later: python -m eagle_slim.runtime.bench.plots {path}", file=sys.stderr)
        return
    plot_gains(result, path)


if __name__ == "__main__":
    main()
