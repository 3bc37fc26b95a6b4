"""How fast is the persistent drafter, against eager PyTorch, against a CUDA graph of PyTorch, and against the memory?

    python -m eagle_slim.runtime.bench.draft [--quick] [--rows REGEX] [--seconds 240] [--out results/draft-h200.json]
    python -m eagle_slim.runtime.bench.draft --stages --quick

Each row is one (model dimensions, draft vocabulary, depth, batch, prefix) with top_k 10 and total_tokens 60, random
weights in bf16, 4 newly accepted tokens per sequence. Variants, interleaved in one run:

    bf16, fp8           the persistent kernel, weights in bf16 and in e4m3, replayed from a CUDA graph
    bf16 plain, ...     the same as a plain launch from Python
    B                   `baseline.TorchDraft` (cuBLAS, SDPA, torch.topk; fc and tree build too), one CUDA graph
    A                   the same, eager
    floor               bytes of weights and KV that must be read, over the copy bandwidth measured here

Before a row is timed, every variant's draft is replayed by the fp32 reference (`agreement.replay`), its graph must give
what the plain launch gave, and a row that fails is not timed. Each sample starts on an idle device right after another
variant ran; times are from event to event, median of ``--rounds`` with 10th and 90th percentile. A share of the floor
is given where the weights of one level exceed twice the L2: below that, barriers rule. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import TreeConfig
from ..drafter.buffers import Buffers
from ..drafter.config import DrafterConfig
from ..drafter.weights import HeadWeights
from ..kernels.launch import Weights, allocate_buffers, check_finished, launch_drafter
from .agreement import Step, candidates_of, exact_head, log_prob_atol, replay, tree_of
from .baseline import TorchDraft, capture
from .precompile import Job, compile_all
from .problem import MODELS, draft_config, first_rows, random_head, random_step
from .stages import phases, print_phases, stamp_barriers, time_phases
from .timing import copy_bytes_per_s, interleave, machine

TOP_K, TOTAL_TOKENS, NUM_NEW = 10, 60, 4
WEIGHTS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    draft_vocab: int
    depth: int
    batch: int
    prefix: int

    @property
    def name(self) -> str:
        """Short name, which ``--rows`` matches."""
        return f"{self.model}/v{self.draft_vocab}/d{self.depth}/b{self.batch}/p{self.prefix}"

    @property
    def tree(self) -> TreeConfig:
        """Shape of the trees."""
        return TreeConfig(self.depth, TOP_K, TOTAL_TOKENS)


HEADLINE = Row("llama-3.1-8b", 32000, 5, 1, 512)


def all_rows() -> list[Row]:
    """Every row, the most wanted first; rows that share a compiled kernel are neighbours."""
    eight = HEADLINE.model
    vocabularies, prefixes = (32000, 128256, 16000, 8192), (512, 8192)
    wanted = [replace(HEADLINE, prefix=prefix) for prefix in prefixes]
    wanted += [Row(model, 32000, 5, 1, 512) for model in MODELS if model != eight]
    wanted += [Row(eight, vocab, 5, 1, prefix) for vocab in vocabularies for prefix in prefixes]
    wanted += [Row(eight, 32000, 5, batch, prefix) for batch in (2, 4, 8) for prefix in prefixes]
    wanted += [
        Row(eight, vocab, depth, batch, prefix)
        for depth in (7, 5)
        for batch in (1, 2, 4, 8)
        for vocab in vocabularies
        for prefix in prefixes
    ]
    return list(dict.fromkeys(wanted))


class Problems:
    """Heads, packed weights and fp32 twins, kept for as long as neighbouring rows need them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._model = ""
        self._heads: dict[str, HeadWeights] = {}
        self._packed_for: object = None
        self._packed: dict[str, Weights] = {}

    def head(self, model: str, weights: str | None = None) -> HeadWeights:
        """The head over its full vocabulary, as loaded (None) or in fp32 as a kernel of these weights computes it."""
        if model != self._model:
            self._model, self._heads, self._packed_for, self._packed = model, {}, None, {}
        name = weights or "loaded"
        if name not in self._heads:
            if weights is None:
                self._heads[name] = random_head(MODELS[model], self.device, self.dtype)
            else:
                cfg = self.config(Row(model, TOP_K, 5, 1, 16), weights)
                self._heads[name] = exact_head(self.head(model), cfg)
        return self._heads[name]

    def config(self, row: Row, weights: str, capacity: int = 0) -> DrafterConfig:
        """Dimensions of a row, with room for a prefix of ``capacity``."""
        dims = MODELS[row.model]
        stored = self.dtype if weights == "bf16" else WEIGHTS[weights]
        prefix = max(row.prefix, capacity)
        return draft_config(dims, row.draft_vocab, row.tree, row.batch, prefix, self.dtype, stored)

    def packed(self, row: Row, weights: str, cfg: DrafterConfig) -> Weights:
        """Packed weights; rows that differ in depth, prefix and batch only share them."""
        head = first_rows(self.head(row.model), row.draft_vocab)
        key = (row.model, row.draft_vocab)
        if key != self._packed_for:
            self._packed_for, self._packed = key, {}
        if weights not in self._packed:
            self._packed[weights] = Weights.pack(head, cfg)
        self._packed[weights] = self._packed[weights].with_positions(cfg.max_positions)
        return self._packed[weights]


def supported_weights(device: torch.device) -> list[str]:
    """Which weight types this device has."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return ["bf16"]
    return list(WEIGHTS)


@dataclass(frozen=True)
class Bench:
    """What all rows share."""

    problems: Problems
    copy_bytes_per_s: float
    rounds: int
    capture: Callable[[Callable[[], object]], Callable[[], object]]
    """Turns a run into a replay of its CUDA graph."""

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.problems.device


def run_row(bench: Bench, row: Row, capacity: int) -> dict[str, Any]:
    """Check and time one row; ``faults`` in the result say why a row was not timed."""
    problems, device = bench.problems, bench.device
    floors: dict[str, float] = {}
    checks: dict[str, str] = {}
    faults: list[str] = []
    workspace_bytes: dict[str, int] = {}
    runs: dict[str, Callable[[], object]] = {}
    plain: dict[str, Callable[[], object]] = {}
    barriers: dict[str, int] = {}
    base = problems.config(row, "bf16", capacity)
    head = first_rows(problems.head(row.model), row.draft_vocab)
    for name in supported_weights(device):
        cfg = problems.config(row, name, capacity)
        weights = problems.packed(row, name, cfg)
        bufs = allocate_buffers(cfg, weights)
        features = random_step(cfg, row.prefix, NUM_NEW, bufs)
        step = Step.of(features, bufs)
        run = _launcher(cfg, features, weights, bufs)
        run()
        check_finished(bufs)
        reference = first_rows(problems.head(row.model, name), row.draft_vocab)
        agreement = replay(
            reference,
            cfg.tree,
            step,
            candidates_of(bufs),
            tree_of(bufs),
            bufs.keys,
            bufs.values,
            atol=log_prob_atol(cfg),
        )
        checks[name] = str(agreement)
        faults += [f"{name}: {fault}" for fault in agreement.faults]
        wanted = tree_of(bufs)
        if not agreement.agrees:
            continue
        graph = bench.capture(run)
        bufs.draft_tokens.fill_(-2)
        bufs.retrieve_indices.fill_(-2)
        graph()
        check_finished(bufs)
        again = tree_of(bufs)
        if not all(torch.equal(a, b) for a, b in zip(asdict(wanted).values(), asdict(again).values(), strict=True)):
            faults.append(f"{name}: the CUDA graph drafts another tree than the plain launch")
        runs[name], plain[f"{name} plain"] = graph, run
        floors[name] = cfg.draft_bytes([row.prefix] * row.batch) / bench.copy_bytes_per_s * 1e6
        barriers[name] = len(phases(cfg, weights.packed.launches.layout.split)) if weights.packed else 0
        workspace_bytes[name] = sum(tensor.numel() * tensor.element_size() for tensor in bufs.workspace.values())

    bufs = Buffers.allocate(base, device)
    features = random_step(base, row.prefix, NUM_NEW, bufs)
    step = Step.of(features, bufs)
    baseline = TorchDraft(base, head, bufs, features)
    result = _without_grad(baseline.run)()
    assert baseline.candidates is not None
    agreement = replay(
        first_rows(problems.head(row.model, "bf16"), row.draft_vocab), base.tree, step, baseline.candidates, None,
        baseline.keys, baseline.values, atol=log_prob_atol(base), exact_ties=False,
    )  # fmt: skip
    checks["baseline"] = str(agreement)
    faults += [f"baseline: {fault}" for fault in agreement.faults]
    del result
    measured: dict[str, Any] = {
        **asdict(row), "name": row.name, "checks": checks, "faults": faults, "barriers": barriers,
        "level_bytes": base.level_bytes, "draft_bytes": base.draft_bytes([row.prefix] * row.batch),
        "workspace_bytes": workspace_bytes, "floor_us": floors, "capacity": capacity,
    }  # fmt: skip
    if not faults:
        eager = _without_grad(baseline.run)
        variants = {**runs, "B": bench.capture(eager), **plain, "A": eager}
        times = interleave(variants, device, bench.rounds, seldom=frozenset({"A"}))
        measured["times"] = {name: asdict(value) for name, value in times.items()}
        measured |= ratios(measured["times"], floors)
    return measured


def _launcher(cfg: DrafterConfig, features: Tensor, weights: Weights, bufs: Buffers) -> Callable[[], object]:
    return lambda: launch_drafter(cfg, features, weights, bufs, "triton")


def _without_grad(run: Callable[[], object]) -> Callable[[], object]:
    def wrapped() -> object:
        with torch.no_grad():
            return run()

    return wrapped


def ratios(times: dict[str, dict[str, float]], floors: dict[str, float]) -> dict[str, float]:
    """Floor over time, and how many times faster than the baselines, from medians."""
    median = {name: value["median_us"] for name, value in times.items()}
    found = {}
    for name, floor in floors.items():
        found[f"{name}_floor_share"] = floor / median[name]
        found[f"{name}_vs_B"] = median["B"] / median[name]
        found[f"{name}_vs_A"] = median["A"] / median[name]
    if "fp8" in floors:
        found["fp8_vs_bf16"] = median["bf16"] / median["fp8"]
    return found


def print_row(measured: dict[str, Any], l2_bytes: int) -> None:
    """Print one line of the table."""
    name = measured["name"]
    if measured["faults"]:
        print(f"{name:38s} NOT TIMED: {'; '.join(measured['faults'])}", flush=True)
        return
    times = measured["times"]
    cells = []
    for label in ("bf16", "fp8", "B", "A"):
        if label in times:
            value = times[label]
            cells.append(f"{label} {value['median_us']:8.0f} [{value['low_us']:.0f}-{value['high_us']:.0f}]")
    cells += [f"{label} {times[label]['median_us']:.0f}" for label in times if label.endswith("plain")]
    cells += [f"B/bf16 {measured['bf16_vs_B']:.2f}", f"A/bf16 {measured['bf16_vs_A']:.1f}"]
    if "fp8_vs_bf16" in measured:
        cells.append(f"bf16/fp8 {measured['fp8_vs_bf16']:.2f}")
    if measured["level_bytes"] > 2 * l2_bytes:
        cells.append(f"floor {measured['floor_us']['bf16']:.0f} share {measured['bf16_floor_share']:.3f}")
        if "fp8" in measured["floor_us"]:
            cells.append(f"fp8 share {measured['fp8_floor_share']:.3f}")
    else:
        cells.append(f"{measured['barriers']['bf16']} barriers")
    print(f"{name:38s} {'  '.join(cells)}", flush=True)


def capacity_of(row: Row, rows: list[Row]) -> int:
    """Longest prefix among the rows that share this one's kernel and packed weights."""
    return max(other.prefix for other in rows if replace(other, prefix=0) == replace(row, prefix=0))


def jobs_of(rows: list[Row], problems: Problems) -> list[tuple[Row, Job]]:
    """One compilation for each kernel that the rows need, first needed first."""
    from ..kernels.host import chip_of
    from ..kernels.tuned_cache import default_cache

    chip, cache = chip_of(problems.device), default_cache()
    jobs: list[tuple[Row, Job]] = []
    for row in dict.fromkeys(replace(row, prefix=0) for row in rows):
        for name in supported_weights(problems.device):
            cfg = problems.config(row, name, capacity_of(row, rows))
            jobs.append((row, Job(MODELS[row.model], cfg, cache.lookup(cfg, chip))))
    return jobs


def run(
    rows: list[Row], problems: Problems, seconds: float, rounds: int,
    capture_graph: Callable[[Callable[[], object]], Callable[[], object]], started: float,
) -> dict[str, Any]:  # fmt: skip
    """Measure rows until the time is up; those left out are named in the result."""
    device = problems.device
    described = machine(device)
    l2_bytes = int(described.get("l2_bytes", 0))
    print(" ".join(f"{key}={value}" for key, value in described.items()), flush=True)

    def left() -> float:
        return seconds - (time.perf_counter() - started)

    jobs = jobs_of(rows, problems)
    done = compile_all([job for _, job in jobs], max(1.0, left() * 0.5)) if device.type == "cuda" else []
    ready = {row for (row, _), good in zip(jobs, done, strict=False) if good}
    print(f"{sum(done)} of {len(jobs)} kernels compiled ahead, {left():.0f} s left", flush=True)
    # Kernels that are not ready cost seconds each: their rows come last. The order within is kept.
    rows = sorted(rows, key=lambda row: replace(row, prefix=0) not in ready)
    bandwidth = copy_bytes_per_s(device, 2 << 30 if device.type == "cuda" else 1 << 20)
    print(f"device copy, read + write: {bandwidth / 1e12:.3f} TB/s", flush=True)
    bench = Bench(problems, bandwidth, rounds, capture_graph)
    measured: list[dict[str, Any]] = []
    left_out: list[str] = []
    longest = 0.0
    for row in rows:
        begin = time.perf_counter()
        if left() < longest:
            left_out.append(row.name)
            continue
        measured.append(run_row(bench, row, capacity_of(row, rows)))
        print_row(measured[-1], l2_bytes)
        longest = max(longest, time.perf_counter() - begin)
    if left_out:
        print(f"out of time, left out: {' '.join(left_out)}", flush=True)
    return {
        "machine": described, "copy_bytes_per_s": bandwidth, "top_k": TOP_K, "total_tokens": TOTAL_TOKENS,
        "num_new": NUM_NEW, "rounds": rounds, "kernels_compiled_ahead": sum(done), "kernels": len(jobs),
        "seconds": time.perf_counter() - started, "rows": measured, "left_out": left_out,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="python -m eagle_slim.runtime.bench.draft", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only the headline rows")
    parser.add_argument("--rows", metavar="REGEX", help="only rows whose name this matches, as v32000/d5/b1/")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--seconds", type=float, default=240, help="stop by then, and name the rows left out")
    parser.add_argument("--rounds", type=int, default=20, help="samples per variant (baseline A: a quarter)")
    parser.add_argument(
        "--stages", action="store_true", help="time the phases of the kernel instead, by stamps at barriers"
    )
    parser.add_argument("--out", type=Path, help="write JSON here, and PNG curves beside it where matplotlib is there")
    args = parser.parse_args(argv)
    try:
        rows = [row for row in all_rows() if re.search(args.rows or "", row.name)]
    except re.error as error:
        parser.error(f"argument --rows: {args.rows!r} is no regular expression: {error}")
    if args.quick:
        rows = [row for row in rows if replace(row, prefix=HEADLINE.prefix) == HEADLINE]
    if args.list:
        print("\n".join(row.name for row in rows))
        return
    if not rows:
        parser.error("no row matches")
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs an NVIDIA GPU\n")
    problems = Problems(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if args.stages:
        result = run_stages(rows, problems, args.seconds, started)
        if args.out:
            write_json(result, args.out)
        print(json.dumps(result))
        return
    result = run(rows, problems, args.seconds, args.rounds, capture, started)
    if args.out:
        write(result, args.out)
    print(json.dumps(result))
    if any(row["faults"] for row in result["rows"]):
        sys.exit(1)


def run_stages(rows: list[Row], problems: Problems, seconds: float, started: float) -> dict[str, Any]:
    """Time the phases of each row's kernels, compiled with time stamps, until the time is up."""
    stamp_barriers()
    measured: dict[str, Any] = {}
    for row in rows:
        for name in supported_weights(problems.device):
            if time.perf_counter() - started > seconds:
                print(f"out of time, left out: {row.name} {name}", flush=True)
                continue
            cfg = problems.config(row, name)
            weights = problems.packed(row, name, cfg)
            bufs = allocate_buffers(cfg, weights)
            found = time_phases(cfg, random_step(cfg, row.prefix, NUM_NEW, bufs), weights, bufs)
            measured[f"{row.name} {name}"] = found
            print_phases(f"{row.name} {name}", found)
    return {"machine": machine(problems.device), "stages": measured}


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def write(result: dict[str, Any], path: Path) -> None:
    """Write JSON and, where matplotlib is installed, the curves."""
    write_json(result, path)
    try:
        from .plots import plot_curves
    except ModuleNotFoundError as error:
        print(f"no curves: {error}. Draw them later: python -m eagle_slim.runtime.bench.plots {path}", flush=True)
        return
    plot_curves(result, path)


if __name__ == "__main__":
    main()
