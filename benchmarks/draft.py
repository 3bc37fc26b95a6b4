"""How fast is the persistent drafter, against eager PyTorch, against a CUDA graph of PyTorch, and against the memory?

    python -m benchmarks.draft [--rows REGEX] [--out benchmarks/results/DATE-h200-draft.json]

Each row is one (model dimensions, draft vocabulary, depth, batch, prefix) with top_k 10 and total_tokens 60, random
weights in bf16, 4 newly accepted tokens per sequence. Variants, interleaved in one run:

    bf16, fp8           the persistent kernel, weights in bf16 and in e4m3, replayed from a CUDA graph
    B                   `baseline.TorchDraft` (cuBLAS, SDPA, torch.topk; fc and tree build too), one CUDA graph
    A                   the same, eager
    floor               bytes of weights and KV that must be read, over the copy bandwidth measured here

Before a row is timed, every variant's draft is replayed by the fp32 reference (`agreement.replay`), its graph must give
what the plain launch gave, and a row that fails is not timed. Each sample starts on an idle device right after another
variant ran; times are from event to event, median of ``--rounds`` with 10th and 90th percentile.
Exit status 1: a draft was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from eagle_slim.runtime.drafter.drafter import BufferedDrafter, Drafter
from eagle_slim.runtime.drafter.launch import check_finished
from eagle_slim.runtime.drafter.packing import SharedPacking
from eagle_slim.runtime.drafter.tuning.agreement import (
    Step,
    draft_and_replay,
    exact_head,
    log_prob_atol,
    replay,
    tree_of,
)
from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head, random_step
from eagle_slim.runtime.drafter.tuning.timing import capture, interleave
from eagle_slim.runtime.drafter.weights import HeadWeights
from eagle_slim.runtime.settings import TreeConfig

from benchmarks.shared.baseline import TorchDraft
from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import compile_ahead, draft_bytes, level_bytes
from benchmarks.shared.timing import copy_bytes_per_s, machine

TOP_K, TOTAL_TOKENS, NUM_NEW = 10, 60, 4
CAPACITY = 8192
"""Room for prefixes, the same for all rows that share a kernel."""
WEIGHTS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
Record = Callable[[Callable[[], object]], Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """A draft to measure: of a head for a known model, after ``prefix`` tokens of each of ``batch`` sequences."""

    model: str
    draft_vocab: int
    depth: int
    batch: int
    prefix: int

    @property
    def tree(self) -> TreeConfig:
        """Shape of the trees."""
        return TreeConfig(self.depth, TOP_K, TOTAL_TOKENS)

    @property
    def name(self) -> str:
        """Short name, as llama-3.1-8b/v32000/d5/b1/p512."""
        return f"{self.model}/v{self.draft_vocab}/d{self.depth}/b{self.batch}/p{self.prefix}"


def all_rows() -> list[Row]:
    """List the rows, the most wanted first; rows that share a compiled kernel are neighbours."""
    eight, vocabularies, prefixes = "llama-3.1-8b", (32000, 128256, 16000, 8192), (512, 8192)
    wanted = [Row(eight, 32000, 5, 1, prefix) for prefix in prefixes]
    wanted += [Row(model, 32000, 5, 1, 512) for model in MODELS if model != eight]
    wanted += [Row("llama-3.2-1b", 128256, 5, 1, 512)]
    wanted += [
        Row(eight, vocab, depth, batch, prefix)
        for depth in (5, 7)
        for batch in (1, 2, 4, 8)
        for vocab in vocabularies
        for prefix in prefixes
    ]
    return list(dict.fromkeys(wanted))


class Problems:
    """Random heads and their packings, kept while rows are of one model."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self._model = ""
        self._heads: dict[int, HeadWeights] = {}
        self._packings: dict[tuple[int, str], SharedPacking] = {}

    def head(self, row: Row) -> HeadWeights:
        """The head of a row; 0 rows are all of them."""
        if row.model != self._model:
            self._heads.clear()
            self._packings.clear()
            self._model, self._heads[0] = row.model, random_head(MODELS[row.model], self.device, self.dtype)
        if row.draft_vocab not in self._heads:
            self._heads[row.draft_vocab] = self._heads[0].of_rows(slice(row.draft_vocab))
        return self._heads[row.draft_vocab]

    def drafter(self, row: Row, weights: str) -> BufferedDrafter:
        """A drafter whose buffers hold the step of a row; packed weights are shared by rows of one vocabulary."""
        head, key = self.head(row), (row.draft_vocab, weights)
        if key not in self._packings:
            self._packings[key] = SharedPacking(head, weight_dtype=self._stored(weights))
        drafter = Drafter(head, row.tree, "triton", self._packings[key])
        found = drafter.on_slots(row.batch, max(row.prefix, CAPACITY))
        found.features.copy_(random_step(found.cfg, row.prefix, NUM_NEW, found.bufs))
        return found

    def _stored(self, weights: str) -> torch.dtype:
        return self.dtype if weights == "bf16" else WEIGHTS[weights]


def supported_weights(device: torch.device) -> list[str]:
    """Which weight types this device has."""
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return list(WEIGHTS) if has_fp8 else ["bf16"]


@torch.no_grad()
def measure(problems: Problems, row: Row, bandwidth: float, rounds: int, record: Record = capture) -> dict[str, Any]:
    """Check and time one row; ``faults`` in the result say why a row was not timed. ``record`` makes a graph."""
    checks: dict[str, str] = {}
    faults: list[str] = []
    runs: dict[str, Callable[[], object]] = {}
    floors: dict[str, float] = {}
    for name in supported_weights(problems.device):
        drafter = problems.drafter(row, name)
        bufs = drafter.bufs
        agreement = draft_and_replay(drafter.cfg, drafter.features, drafter.weights, bufs)
        checks[name] = str(agreement)
        faults += [f"{name}: {fault}" for fault in agreement.faults]
        if not agreement.agrees:
            continue
        wanted = tree_of(bufs)
        runs[name] = record(drafter.draft)
        bufs.draft_tokens.fill_(-2)
        bufs.retrieve_indices.fill_(-2)
        runs[name]()
        check_finished(bufs)
        if not all(map(torch.equal, vars(wanted).values(), vars(tree_of(bufs)).values())):
            faults.append(f"{name}: the CUDA graph drafts another tree than the plain launch")
        floors[name] = draft_bytes(drafter.cfg, [row.prefix] * row.batch) / bandwidth * 1e6

    drafter = problems.drafter(row, "bf16")
    cfg, bufs, head = drafter.cfg, drafter.bufs, drafter.head
    step, baseline = Step.of(drafter.features, bufs), TorchDraft(cfg, head, bufs, drafter.features)
    baseline.run()
    assert baseline.candidates is not None
    agreement = replay(
        exact_head(head, cfg), cfg.tree, step, baseline.candidates, None, baseline.keys, baseline.values,
        atol=log_prob_atol(cfg), exact_ties=False,
    )  # fmt: skip
    checks["baseline"] = str(agreement)
    faults += [f"baseline: {fault}" for fault in agreement.faults]
    measured: dict[str, Any] = {
        **asdict(row), "name": row.name, "checks": checks, "faults": faults,
        "level_bytes": level_bytes(cfg), "draft_bytes": draft_bytes(cfg, [row.prefix] * row.batch), "floor_us": floors,
    }  # fmt: skip
    if not faults:
        timed = {**runs, "B": record(baseline.run), "A": baseline.run}
        times = {name: sorted(samples) for name, samples in interleave(timed, problems.device, rounds).items()}
        tenth = rounds // 10
        measured["times"] = {
            name: {"median_us": median(each), "low_us": each[tenth], "high_us": each[-1 - tenth]}
            for name, each in times.items()
        }
        for name, floor in floors.items():
            own_us = median(times[name])
            measured[f"{name}_floor_share"] = floor / own_us
            measured |= {f"{name}_vs_{other}": median(times[other]) / own_us for other in "AB"}
    return measured


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    rows = {row.name: row for row in all_rows()}
    command = Command("draft", __doc__, rows)
    command.add_argument("--rounds", type=int, default=20, help="samples per variant")
    args = command.parse_args(argv)
    chosen = [rows[name] for name in command.chosen(args)]
    problems = Problems(command.gpu())
    device = problems.device
    result: dict[str, Any] = {"machine": machine(device)}
    weights = [WEIGHTS[name] for name in supported_weights(device)]
    for model in dict.fromkeys(row.model for row in chosen):
        shapes = [(row.tree, row.batch, row.draft_vocab) for row in chosen if row.model == model]
        compile_ahead(model, shapes, device, weights, CAPACITY)
    result["copy_bytes_per_s"] = bandwidth = copy_bytes_per_s(device)
    result |= {"top_k": TOP_K, "total_tokens": TOTAL_TOKENS, "num_new": NUM_NEW, "rounds": args.rounds, "rows": []}
    for row in chosen:
        result["rows"].append(measure(problems, row, bandwidth, args.rounds))
        show(result["rows"][-1])
        write(result, args.out)
    if any(row["faults"] for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
