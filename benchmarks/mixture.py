"""Check a mixture of experts on a GPU, then time it: passes by rows, plain steps, drafting, and prompts.

    python -m benchmarks.mixture [--seconds 150] [--rows REGEX] [--out benchmarks/results/DATE-h100-mixture.json]
    python -m benchmarks.mixture --dims gpt-oss-20b

Random weights of Qwen3-30B-A3B's dimensions, or gpt-oss' with experts in MXFP4; 61 GB of them are made on the card, 14
of gpt-oss-20b, 65 of gpt-oss-120b. Where a token goes is drawn by the LAW ``uniform`` or ``biased`` (`shared.routing`).
Each row says what a layer of it touched. Rows:

* ``exact``: a layer's kernels against their twins, and each row's bits alone, in company, and in prompts;
* ``tokens``: drafted answers are the plain ones, of a model of four layers, alone and side by side;
* ``pass/LAW/SEQUENCES/ROWS``: a pass of the target after 512 tokens of each sequence, and the time that its bytes take
  at the card's copy rate;
* ``price/LAW/SEQUENCES/ROWS``: what exact rows cost: such a pass beside the same with both products of the experts by
  `torch._grouped_mm`, over rows that the device sorts by expert, and all around them by `torch.compile`;
* ``step/LAW/SEQUENCES``: a plain step, its tokens chosen;
* ``draft/LAW/NODES[/all]``: chains, over plain steps in turn: 2.2 tokens a step (gpt-oss 2.35 and 2.41; of 3 nodes
  1.9), a head of 32,000 rows, or of all;
* ``memory/TOKENS``: what is allocated with a cache of so many tokens and a head, and a plain step at its end;
* ``layer/ROWS``: a layer's router and experts, beside transformers' module with `torch._grouped_mm`;
* ``prompt/TOKENS``: a prompt to its first token, beside transformers' forward of as many tokens.

gpt-oss stands beside no module of transformers: those are of other packages, or of weights that were dequantised.

Exit status 1 where something is not exact; nothing is timed then.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.drafter.tuning.problem import MODELS
from eagle_slim.runtime.ops import Ops
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.cache import KVCache
from eagle_slim.runtime.target.fused import FusedTarget
from eagle_slim.runtime.target.kernels import experts as kernels
from eagle_slim.runtime.target.kernels.experts import Experts, Routing
from eagle_slim.runtime.target.kernels.products import (
    Norm,
    NormedRows,
    embed,
    embed_ref,
    lift_of,
    num_groups,
    put_residual_ref,
    source_of,
)
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import (
    EXPERTS,
    SPARE_LENGTH,
    TARGET_WEIGHTS,
    capture_steps,
    captured_pass,
    guessable_model,
    only_compiled,
    pass_over,
    phase_times,
    prompt_time,
    random_target,
    take_turns,
)
from benchmarks.shared.drawn_verdicts import draw_lengths
from benchmarks.shared.routing import STAND_OUT, RoutedModel
from benchmarks.shared.timing import copy_bytes_per_s, machine, time_queued_us

PREFIX, ROWS, ROOM = 512, 32000, 512
ACCEPTED = {"gpt-oss-20b": 2.35, "gpt-oss-120b": 2.41}
"""Tokens a step at chains of 3, as published; of others 2.2."""
PASSES = {1: (1, 2, 4, 8, 60), 16: (1,)}
"""Rows of a pass, by its sequences."""
MEMORY, LAST = "memory/131072", 64
STEPS = 240
"""Steps of a round; their lengths have the mean that is asked for."""
MOST_DIFFERENT = 0.05
"""Norm of the difference of logits over their norm, from which on products are wrong: rounding leaves less."""


@dataclass(frozen=True)
class OtherOps(Ops):
    """Our operations, but for ``parts`` by name."""

    parts: Mapping[str, Any]

    def __call__(self, operation: Any) -> Any:
        """Return what runs in place of the operation."""
        return self.parts.get(operation.__name__) or super().__call__(operation)


class GroupedProducts:
    """Both products of the experts by `torch._grouped_mm`, whose sums depend on how many rows an expert has.

    ``fuse`` compiles what is around them.
    """

    def __init__(self, fuse: Callable[[Any], Any]) -> None:
        self._sort, self._gate, self._add = map(fuse, (self._sorted, self._gated, self._added))
        self._order: tuple[Tensor, ...] = ()
        """Of the last rows: their pairs by expert, the place of each pair among these, and where each expert's end."""

    @staticmethod
    def _sorted(picked: Tensor, scaled: Tensor, count: int) -> tuple[Tensor, ...]:
        experts, pair = picked.flatten(), torch.arange(picked.numel(), device=picked.device)
        is_before = (experts[None] < experts[:, None]) | ((experts[None] == experts[:, None]) & (pair < pair[:, None]))
        place = is_before.sum(1)
        order = torch.zeros_like(place).scatter(0, place, pair)
        ends = (experts[None] <= torch.arange(count, device=picked.device)[:, None]).sum(1).to(torch.int32)
        return scaled[order // picked.shape[1]], order, place, ends

    @staticmethod
    def _gated(both: Tensor, factor: Tensor, order: Tensor, top_k: int) -> Tensor:
        gate, up = (both.float() * factor[order // top_k]).chunk(2, -1)
        return (F.silu(gate) * up).to(both.dtype)

    @staticmethod
    def _added(parts: Tensor, place: Tensor, weights: Tensor, norm: Norm, rows: NormedRows, tap: Tensor | None) -> None:
        of_row = parts.float()[place].view(*weights.shape, -1) * weights[..., None]
        put_residual_ref(rows.residual.float() + of_row.sum(1), norm, rows, tap)

    def gated_experts(
        self, rows: NormedRows, norm: Norm, experts: Experts, routing: Routing, lift: float = 1.0
    ) -> None:
        """Compute `kernels.gated_experts` of rows that are all in use, sorted by expert; ``lift`` is 1."""
        scaled, picked = rows.scaled, routing.picks.experts[: len(rows.scaled)]
        x, *order_of = self._sort(picked, scaled, experts.count)
        order, _, ends = self._order = tuple(order_of)
        weight = source_of(experts.gate_up).view(experts.count, -1, scaled.shape[1]).transpose(1, 2)
        both = torch._grouped_mm(x, weight, offs=ends)
        routing.gated[: len(x)] = self._gate(both, rows.factor(norm), order, experts.top_k)

    def add_experts(
        self, experts: Experts, routing: Routing, norm: Norm, rows: NormedRows, tap: Tensor | None = None
    ) -> None:
        """Compute `kernels.add_experts` after `gated_experts`."""
        order, place, ends = self._order
        weight = source_of(experts.down).view(experts.count, -1, experts.width).transpose(1, 2)
        parts = torch._grouped_mm(routing.gated[: len(order)], weight, offs=ends)
        self._add(parts, place, routing.picks.weights[: len(rows.scaled)], norm, rows, tap)


class Mixture:
    """A random model whose routing is drawn."""

    def __init__(
        self, name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, weights: str = "bf16"
    ) -> None:
        self.name, self.device = name, device
        self.random = RoutedModel(name, device, dtype, weights)
        self.model, self.follow, self.layers = self.random.model, self.random.follow, self.random.layers

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.layers[0].size_bytes // self.layers[0].count

    def read_bytes(self, touched: float, kv_rows: int) -> float:
        """Count the bytes that a pass reads which touches as many experts of each layer."""
        more = len(self.layers) * (touched - self.layers[0].top_k)
        return self.random.weight_bytes + more * self.expert_bytes + self.random.kv_bytes(kv_rows)

    def compile_passes(self, names: list[str]) -> None:
        """Compile the kernels of all passes among some rows, side by side."""
        shapes = sorted({tuple(map(int, name.split("/")[2:])) for name in names if name.startswith("pass")})
        target = self.random.target
        if shapes and self.device.type == "cuda":
            cache = self.random.new_cache(max(places for places, _ in shapes), PREFIX + ROOM)
            tokens = [torch.zeros(shape, dtype=torch.int64, device=self.device) for shape in shapes]
            runs = [pass_over(target, cache, each, PREFIX)[0] for each in tokens]
            with only_compiled():
                for run in runs:
                    run()

    def time_pass(self, law: str, places: int, nodes: int, bandwidth: float) -> dict[str, Any]:
        """Time a pass of so many rows of each of ``places`` sequences."""
        cache, tokens = self._prepare(law, places, nodes)
        found = captured_pass(self.random.target, cache, tokens, PREFIX)
        touched = found.touched()
        ms = statistics.median(time_queued_us(found.run, self.device, 5) for _ in range(5)) / 1e3
        floor_ms = self.read_bytes(touched, places * PREFIX) / bandwidth * 1e3
        return {"touched": touched, "pass_ms": ms, "floor_ms": floor_ms, "over_floor": ms / floor_ms}

    def _prepare(self, law: str, places: int, nodes: int) -> tuple[KVCache, Tensor]:
        """Return a cache, and tokens [places, nodes] of so many sequences that are routed by a law."""
        self.follow(law, places)
        draw = torch.Generator().manual_seed(nodes)
        tokens = torch.randint(self.random.target.vocab_size // places, (places, nodes), generator=draw) * places
        tokens += torch.arange(places)[:, None]
        return self.random.new_cache(places, PREFIX + ROOM), tokens.to(self.device)

    def time_price(self, law: str, places: int, nodes: int) -> dict[str, Any]:
        """Time a pass, and the same with grouped products, in turn."""
        experts = self.random.target.experts
        if experts is None or not isinstance(experts.gate_up, Tensor):
            return {"not_run": "grouped products take experts in the model's type"}
        cache, tokens = self._prepare(law, places, nodes)
        target: Any = self.random.target
        grouped = GroupedProducts(partial(torch.compile, dynamic=False) if tokens.is_cuda else lambda run: run)
        parts = {"gated_experts": grouped.gated_experts, "add_experts": grouped.add_experts}
        runs, logits = [], []
        for ops in (target.ops, OtherOps(target.ops.use_kernels, parts)):
            with mock.patch.object(target, "ops", ops):
                found = captured_pass(target, cache, tokens, PREFIX)
            found.run()
            runs.append(found.run)
            logits.append(found.logits.float())
        norms = [float(each.norm()) for each in (logits[0] - logits[1], logits[0])]
        if norms[0] > MOST_DIFFERENT * norms[1]:
            raise RuntimeError(f"Grouped products give other logits: {norms[0] / norms[1]:.3f} of their norm.")
        times = [[time_queued_us(run, self.device, 5) / 1e3 for run in runs] for _ in range(9)]
        ours, theirs = map(statistics.median, zip(*times, strict=True))
        return {"ours_ms": ours, "grouped_ms": theirs, "percent": 100 * (ours / theirs - 1)}

    def time_step(self, law: str, places: int) -> dict[str, Any]:
        """Time a plain step."""
        self.follow(law, places)
        decoder = self.random.decoder(self.random.new_cache(places, PREFIX + ROOM), None)
        capture_steps([(decoder, places)], PREFIX)
        return phase_times(decoder, places, PREFIX, has_phases=False)

    def time_draft(self, law: str, nodes: int, rows: int) -> dict[str, Any]:
        """Time drafting of chains, in turn with plain steps; lengths that are accepted are drawn."""
        self.follow(law, 1)
        tree, steps = TreeConfig(nodes - 2, 1, nodes), STEPS
        cache = self.random.new_cache(1, PREFIX + (steps + 2) * nodes + ROOM)
        accepted = ACCEPTED.get(self.name, 2.2) if nodes == 4 else 1.9
        lengths = draw_lengths(accepted + SPARE_LENGTH, nodes)
        decoders = [self.random.decoder(cache, None), self.random.drawn_decoder(cache, tree, rows, lengths)]
        capture_steps([(each, 1) for each in decoders], PREFIX)
        plain, drafted = take_turns(decoders, 1, PREFIX, steps, 3)
        phases = phase_times(decoders[1], 1, PREFIX)
        return {"plain": plain, "drafted": drafted, "phases": phases} | {
            "over_plain": drafted["tokens_per_s"] / plain["tokens_per_s"]
        }

    def time_memory(self, tokens: int) -> dict[str, Any]:
        """Allocate a cache of ``tokens`` for a drafting decoder, and time plain steps at its end."""
        cache, tree, prefix = self.random.new_cache(1, tokens), TreeConfig(2, 1, 4), tokens - LAST
        decoders = [self.random.decoder(cache, None), self.random.drawn_decoder(cache, tree, ROWS, [1] * 4)]
        capture_steps([(each, 1) for each in decoders], prefix)
        used = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"allocated_GB": used / 1e9, "cache_GB": cache.size_bytes / 1e9} | phase_times(
            decoders[0], 1, prefix, has_phases=False
        )

    def time_layer(self, rows: int) -> dict[str, Any]:
        """Time a layer's router and experts, and transformers' module over the same rows."""
        layer, target = self.model.model.layers[1].mlp, self.random.target
        assert target.experts is not None
        x = torch.randn(rows, target.hidden_size, dtype=target.dtype, device=self.device) * STAND_OUT
        ours, _ = run_layer(target.experts, x, torch.arange(rows, dtype=torch.int32, device=self.device))
        runs: dict[str, Callable[[], object]] = {"ours": ours}
        if target.experts.clamp is None:
            runs["transformers"] = partial(layer, x[None])
        found: dict[str, Any] = {}
        for name, run in runs.items():
            try:
                run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                found[f"{name}_us"] = statistics.median(time_queued_us(graph.replay, self.device, 20) for _ in range(5))
            except RuntimeError as error:  # transformers' own may wait for the device
                torch.cuda.synchronize()
                found[f"{name}_error"] = str(error).splitlines()[0]
                found[f"{name}_us"] = statistics.median(time_queued_us(run, self.device, 20) for _ in range(5))
        return found

    def time_prompt(self, tokens: int) -> dict[str, Any]:
        """Time a prompt to its first token, and transformers' forward of as many tokens."""
        self.follow("uniform", 1)
        decoder = self.random.decoder(self.random.new_cache(1, tokens + ROOM), None)
        ours = prompt_time(decoder, tokens, rounds=3)
        if self.layers[0].clamp is not None:
            return {"ours_ms": ours}
        ids = torch.randint(self.random.target.vocab_size, (1, tokens), device=self.device)
        run = partial(self.model, ids, logits_to_keep=1, use_cache=True)
        run()
        theirs = statistics.median(time_queued_us(run, self.device, 1) for _ in range(3)) / 1e3
        return {"ours_ms": ours, "transformers_ms": theirs, "over_transformers": ours / theirs}


def run_layer(
    experts: Experts, x: Tensor, kv_rows: Tensor, is_twin: bool = False
) -> tuple[Callable[[], None], tuple[Routing, NormedRows]]:
    """Return a run of a layer's router and experts over rows that were embedded, and what it writes."""
    norm, lift = Norm.of(torch.ones_like(x[0]), 1e-6, experts.gate_up), lift_of(experts.down, x.dtype)
    rows = NormedRows(x.clone(), torch.empty_like(x), torch.empty(len(x), num_groups(x.shape[1]), device=x.device))
    routing = Routing.allocate(experts, len(x))
    (embed_ref if is_twin else embed)(x, torch.arange(len(x), dtype=torch.int32, device=x.device), norm, rows)
    suffix = "_ref" if is_twin else ""
    route, gate, add = (getattr(kernels, f"{name}{suffix}") for name in ("route", "gated_experts", "add_experts"))

    def run() -> None:
        route(rows, norm, experts, kv_rows, routing)
        gate(rows, norm, experts, routing, lift)
        add(experts, routing, norm, rows)

    return run, (routing, rows)


@torch.inference_mode()
def check_layer(name: str, device: torch.device) -> dict[str, Any]:
    """Compare a layer's kernels with their twins, and rows with themselves in other company: rows that differ."""
    draw = torch.Generator(device).manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = random_target(name, MODELS[name], torch.bfloat16, device, layers=1)
    experts, ints = FusedTarget(model, None).experts, torch.arange(1500, dtype=torch.int32, device=device)
    assert experts is not None
    x = torch.empty(1500, MODELS[name].hidden, dtype=torch.bfloat16, device=device).normal_(generator=draw)
    x[:600] += 2 * x[:1]  # of one kind, which share experts

    def whole_of(chosen: Tensor, is_twin: bool = False) -> tuple[Routing, NormedRows]:
        run, written = run_layer(experts, x[chosen].contiguous(), ints[: len(chosen)], is_twin)
        run()
        return written

    counts = (1, 2, 4, 16, 17, 60, 65, 130, 512)
    orders = [torch.randperm(len(x), device=device, generator=draw)[:size] for size in counts * 3]
    with only_compiled():
        for order in [ints.long(), *orders[: len(counts)]]:
            whole_of(order)
    (routing, rows), (wanted, wanted_rows) = whole_of(ints.long()), whole_of(ints.long(), True)
    # Where two logits nearly tie, rounding decides which expert is taken.
    same = (routing.picks.experts == wanted.picks.experts).all(1)
    errors = (rows.residual - wanted_rows.residual).float().abs().amax(1)[same]
    differing = 0
    for order in orders:
        of_routing, of_rows = whole_of(order)
        pairs = [(of_routing.picks.experts, routing.picks.experts), (of_routing.picks.weights, routing.picks.weights)]
        pairs += zip(of_rows, rows, strict=True)
        differing += int(torch.stack([(mine != theirs[order]).any(1) for mine, theirs in pairs]).any(0).sum())
    error = float(errors.max() / wanted_rows.residual.float().abs().max())
    compared = sum(map(len, orders))
    found = {"other_picks": int((~same).sum()), "of": len(x), "error": error, "compared": compared}
    return found | {"differing": differing, "is_exact": differing == 0 and error < 0.02 and float(same.sum()) > 1400}


def check_tokens(name: str, device: torch.device) -> dict[str, Any]:
    """Compare drafted answers of a model of four layers with plain ones: answers that differ."""
    base = SpeculativeModel.from_pretrained(device=device, dtype=torch.bfloat16)
    model = guessable_model(name, device, base.tokenizer, "bf16", layers=4)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4096, (size,), generator=draw).tolist() for size in (5, 200, 64, 63, 700, 17)]
    options: dict[str, Any] = {"max_new_tokens": 96, "ignore_eos": True}
    plain = [model.generate(prompt, speculative=False, **options).token_ids[0] for prompt in prompts]
    differing, tokens, accepted = 0, 0, []
    for tree in (TreeConfig(2, 1, 4), TreeConfig(2, 4, 8)):
        drafting = model.with_tree(tree)
        for group in [[0], [1], [4], list(range(6))]:
            output = drafting.generate([prompts[each] for each in group], **options)
            accepted.append(output.stats.mean_accepted_length)
            tokens += sum(map(len, output.token_ids))
            differing += sum(
                list(mine) != list(plain[each]) for mine, each in zip(output.token_ids, group, strict=True)
            )
    return {"tokens": tokens, "accepted": accepted, "differing": differing, "is_exact": differing == 0}


def all_rows() -> list[str]:
    """List the names of all rows, those first that tell most; checks first of all."""
    passes = [
        f"pass/{law}/{places}/{nodes}" for law in ("biased", "uniform") for places in PASSES for nodes in PASSES[places]
    ]
    steps = [f"step/{law}/{places}" for law, places in (("uniform", 1), ("uniform", 16), ("biased", 16))]
    drafts = [f"draft/{law}/{nodes}" for law in ("biased", "uniform") for nodes in (4, 3)]
    drafts.insert(1, "draft/biased/4/all")
    layers = [f"layer/{rows}" for rows in (1, 4, 16, 60)]
    prices = [f"price/{law}/{rows}" for rows in ("1/1", "1/4", "16/1") for law in ("biased", "uniform")]
    timed = [*passes, *steps, *drafts[:2], "prompt/4096", *prices, *layers, *drafts[2:], "prompt/512", MEMORY]
    return ["exact", "tokens", *timed]


@torch.inference_mode()
def measured_row(mixture: Mixture, kind: str, rest: list[str], bandwidth: float) -> dict[str, Any]:
    """Time the row of a kind."""
    if kind == "pass":
        return mixture.time_pass(rest[0], int(rest[1]), int(rest[2]), bandwidth)
    if kind == "price":
        return mixture.time_price(rest[0], int(rest[1]), int(rest[2]))
    if kind == "step":
        return mixture.time_step(rest[0], int(rest[1]))
    if kind == "draft":
        return mixture.time_draft(rest[0], int(rest[1]), MODELS[mixture.name].vocab if rest[2:] else ROWS)
    one = {"layer": mixture.time_layer, "prompt": mixture.time_prompt, "memory": mixture.time_memory}[kind]
    return one(int(rest[0]))


def measured(dims: str, names: list[str], device: torch.device, weights: str) -> Iterator[dict[str, Any]]:
    """Measure rows one after another; what is checked is in bf16."""
    bandwidth = copy_bytes_per_s(device)
    yield {"copy_TB_per_s": bandwidth / 1e12}
    mixture: Mixture | None = None
    for name in names:
        kind, *rest = name.split("/")
        if kind in ("exact", "tokens"):
            row = (check_layer if kind == "exact" else check_tokens)(dims, device)
            torch.cuda.empty_cache()
        else:
            if mixture is None:
                mixture = Mixture(dims, device, weights=weights)
                with torch.inference_mode():
                    mixture.compile_passes(names)
            row = measured_row(mixture, kind, rest, bandwidth)
        yield {"row": name} | row


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    started = time.perf_counter()
    command = Command("mixture", __doc__, all_rows())
    command.add_argument("--seconds", type=float, default=3600, help="begin no row later")
    command.add_argument("--target-weights", choices=TARGET_WEIGHTS, default="bf16")
    command.add_argument("--dims", choices=EXPERTS, default="qwen3-30b-a3b")
    args = command.parse_args(argv)
    if args.dims in ACCEPTED and args.target_weights != "bf16":
        command.error(f"{args.dims} has experts in MXFP4: leave --target-weights out")
    names, device = command.chosen(args), command.gpu()
    named = {"dims": args.dims, "target_weights": args.target_weights}
    result: dict[str, Any] = {"machine": machine(device), **named, "rows": []}
    for row in measured(args.dims, names, device, args.target_weights):
        result["rows"].append(row | {"at_s": time.perf_counter() - started})
        show(result["rows"][-1])
        write(result, args.out)
        if not row.get("is_exact", True):
            sys.exit(1)
        if time.perf_counter() - started > args.seconds:
            sys.exit("out of time")


if __name__ == "__main__":
    main()
