"""Time the persistent drafter against eager PyTorch, a CUDA graph of PyTorch, and the speed of the memory.

    python -m benchmarks.draft [--rows REGEX] [--out benchmarks/results/DATE-h200-draft.json]

Each row is one (model dimensions, draft vocabulary, depth, batch, prefix) with top_k 10 and total_tokens 60, random
weights in bf16, 4 newly accepted tokens per sequence; rows with a window (w4096) have no baseline. Variants,
interleaved in one run:

    bf16, fp8           the persistent kernel, weights in bf16 and in e4m3, replayed from a CUDA graph
    B                   `TorchDraft` (cuBLAS, SDPA, torch.topk; fc and tree build too), one CUDA graph
    A                   the same, eager
    floor               bytes of weights and KV that must be read, over the copy bandwidth measured here

Before a row is timed, every variant's draft is replayed by the fp32 reference (`agreement.replay`), its graph must give
what the plain launch gave, and a row that fails is not timed. Each sample starts on an idle device right after another
variant ran; times are from event to event, median of ``--rounds`` with 10th and 90th percentile.
Exit status 1: a draft was wrong.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.drafter import BufferedDrafter, Drafter, check_finished
from eagle_slim.runtime.drafter.packing import SharedPacking
from eagle_slim.runtime.drafter.rope import apply_rotary
from eagle_slim.runtime.drafter.tuning.agreement import (
    LOG_PROB_ATOL,
    Agreement,
    Step,
    draft_and_replay,
    exact_head,
    replay,
    tree_of,
)
from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head, random_step
from eagle_slim.runtime.drafter.tuning.timing import capture, interleave
from eagle_slim.runtime.drafter.weights import HeadWeights
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.tree import Candidates, build_tree, join_levels
from torch import Tensor

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
    """A draft to measure: a head for a known model drafts for ``batch`` sequences of ``prefix`` tokens."""

    model: str
    draft_vocab: int
    depth: int
    batch: int
    prefix: int
    window: int = 0
    """Last tokens that a draft looks back on; 0 for all."""

    @property
    def tree(self) -> TreeConfig:
        """Shape of the trees."""
        return TreeConfig(self.depth, TOP_K, TOTAL_TOKENS)

    @property
    def seen(self) -> int:
        """Tokens that a draft looks back on."""
        return min(self.prefix, self.window or self.prefix)

    @property
    def name(self) -> str:
        """Short name, as llama-3.1-8b/v32000/d5/b1/p512."""
        window = f"/w{self.window}" if self.window else ""
        return f"{self.model}/v{self.draft_vocab}/d{self.depth}/b{self.batch}/p{self.prefix}{window}"


def all_rows() -> list[Row]:
    """List the rows, the most wanted first; rows that share a compiled kernel are neighbours."""
    eight, vocabularies, prefixes = "llama-3.1-8b", (32000, 128256, 16000, 8192), (512, 8192)
    wanted = [Row(eight, 32000, 5, 1, prefix) for prefix in prefixes]
    wanted += [Row(eight, 32000, 5, 1, 131072, 4096), Row(eight, 32000, 5, 1, 4096), Row(eight, 32000, 5, 1, 131072)]
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


class TorchDraft:
    """One draft with PyTorch's own operations, over fixed prefixes; `run` never waits, so a CUDA graph can hold it.

    This is what a careful engineer can do without writing a kernel: everything stays on the device, shapes are fixed,
    the extend pass goes past attention with one row only, query heads of one kv head share a row block so that SDPA
    needs no repeated keys, and the tree is built by `tree.build_tree`. EAGLE-3 only.
    """

    def __init__(self, cfg: DrafterConfig, head: HeadWeights, bufs: Buffers, features: Tensor) -> None:
        self.cfg, self.head, self.w = cfg, head, head.tensors
        self.features = features
        self.new = int(bufs.num_new[0])
        self.prefix = int(bufs.prefix[0])
        assert (bufs.num_new == self.new).all(), "one length for all slots"
        assert (bufs.prefix == self.prefix).all(), "one length for all slots"
        self.tokens = bufs.new_tokens[:, : self.new].long()
        self.keys, self.values = bufs.keys.clone(), bufs.values.clone()
        projections = [self.w[f"self_attn.{x}_proj.weight"] for x in "qkv"]
        self.qkv_weight = torch.cat(projections)
        self.gate_up = torch.cat([self.w["mlp.gate_proj.weight"], self.w["mlp.up_proj.weight"]])
        positions = torch.arange(cfg.max_positions, device=features.device)
        self.cos, self.sin = head.rotary.at(positions)
        self.candidates: Candidates | None = None
        """Candidates of the last draft, for `agreement.replay`."""

    def run(self) -> tuple[Tensor, ...]:
        """Draft, and return the fields of `tree.DraftTree`."""
        cfg, top_k, slots = self.cfg, self.cfg.top_k, self.cfg.num_slots
        past = self.prefix + self.new
        hidden = F.linear(self.features[:, : self.new], self.w["fc.weight"])
        rows = slice(self.prefix, past)
        seen = torch.ones(slots, 1, past, dtype=torch.bool, device=hidden.device)
        hidden = self.layer(hidden, self.tokens, rows, self.cos[rows], self.sin[rows], seen, last_only=True)
        scores, tokens = self.children(hidden)
        scores, tokens = scores[:, 0], tokens[:, 0]
        level_scores, level_tokens, frontiers = [scores], [tokens], []
        frontier = torch.arange(top_k, device=hidden.device).expand(slots, top_k)
        hidden = hidden.expand(-1, top_k, -1)
        own = torch.eye(top_k, dtype=torch.bool, device=hidden.device).expand(slots, -1, -1)
        ancestors = own
        seen = seen.expand(-1, top_k, -1)
        for level in range(1, cfg.depth + 1):
            frontiers.append(frontier)
            rows = slice(past + (level - 1) * top_k, past + level * top_k)
            at = past - 1 + level
            cos, sin = (table[at].expand(top_k, -1) for table in (self.cos, self.sin))
            hidden = self.layer(hidden, tokens, rows, cos, sin, torch.cat((seen, ancestors), -1))
            log_probs, children = self.children(hidden)
            child_scores = (scores[..., None] + log_probs).flatten(1)
            children = children.flatten(1)
            level_scores.append(child_scores)
            level_tokens.append(children)
            scores, frontier = torch.topk(child_scores, top_k)
            parent = frontier // top_k
            tokens = children.gather(1, frontier)
            hidden = hidden.gather(1, parent[..., None].expand_as(hidden))
            ancestors = torch.cat((ancestors.gather(1, parent[..., None].expand_as(ancestors)), own), 2)
        self.candidates = join_levels(level_tokens, level_scores, frontiers, top_k)
        tree = build_tree(self.tokens[:, -1], self.candidates, cfg.tree)
        return tree.draft_tokens, tree.retrieve_indices, tree.tree_mask, tree.tree_position_ids

    def layer(
        self,
        hidden: Tensor,
        tokens: Tensor,
        rows: slice,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Run the decoder layer on [slots, nodes, hidden]; ``mask`` bool [slots, queries, keys]."""
        cfg, w = self.cfg, self.w
        embedded = F.rms_norm(self.head.embedding[tokens], (cfg.hidden,), w["input_layernorm.weight"], cfg.norm_eps)
        normed = F.rms_norm(hidden, (cfg.hidden,), w["hidden_norm.weight"], cfg.norm_eps)
        inputs = torch.cat((embedded, normed), -1)
        fused = F.linear(inputs, self.qkv_weight).unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)
        query, key, value = fused.split([cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads], 1)
        self.keys[:, :, rows] = apply_rotary(key, cos[None], sin[None])
        self.values[:, :, rows] = value
        query = apply_rotary(query, cos[None], sin[None])
        if last_only:
            query, hidden = query[:, :, -1:], hidden[:, -1:]
        group = cfg.num_heads // cfg.num_kv_heads
        nodes = query.shape[2]
        grouped = query.unflatten(1, (cfg.num_kv_heads, group)).flatten(2, 3)
        mask = mask[:, None].repeat(1, 1, group, 1)
        keys, values = (cache[:, :, : rows.stop] for cache in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        attended = attended.unflatten(2, (group, nodes)).permute(0, 3, 1, 2, 4).flatten(2)
        hidden = hidden + F.linear(attended, w["self_attn.o_proj.weight"])
        normed = F.rms_norm(hidden, (cfg.hidden,), w["post_attention_layernorm.weight"], cfg.norm_eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])

    def children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Rank each node's best children: log-probabilities and target ids [slots, nodes, top_k]."""
        normed = F.rms_norm(hidden, (self.cfg.hidden,), self.w["norm.weight"], self.cfg.norm_eps)
        logits = F.linear(normed, self.head.lm_head)
        best, rows = torch.topk(logits, self.cfg.top_k)
        lse = torch.logsumexp(logits.float(), -1, keepdim=True)
        return best.float() - lse, self.head.draft_to_target[rows]


def drafter_of(head: HeadWeights, row: Row, weights: str) -> BufferedDrafter:
    """Build a drafter whose buffers hold the step of a row; ``head`` is over the whole vocabulary."""
    head = head.of_rows(slice(row.draft_vocab)).with_window(row.window or None)
    packing = SharedPacking(head, weight_dtype=head.dtype if weights == "bf16" else WEIGHTS[weights])
    wanted, room = Drafter(head, row.tree, "triton", packing), (row.batch, max(row.prefix, CAPACITY))
    drafter = wanted.on_slots(*room, wanted.allocate_cache(*room))
    features = random_step(drafter.cfg, row.prefix, NUM_NEW, drafter.bufs)
    drafter.features[:, : features.shape[1]] = features
    return drafter


def supported_weights(device: torch.device) -> list[str]:
    """List the weight types that this device computes with."""
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return list(WEIGHTS) if has_fp8 else ["bf16"]


def judge_baseline(baseline: TorchDraft, drafter: BufferedDrafter) -> Agreement:
    """Draft with PyTorch's own operations, and replay that draft."""
    cfg = drafter.cfg
    step = Step.of(drafter.features, drafter.bufs)
    baseline.run()
    assert baseline.candidates is not None
    head, caches = exact_head(drafter.head, cfg), (baseline.keys, baseline.values)
    return replay(
        head, cfg.tree, step, baseline.candidates, None, *caches, atol=LOG_PROB_ATOL[cfg.weight_dtype], exact_ties=False
    )


@torch.no_grad()
def measure(head: HeadWeights, row: Row, bandwidth: float, rounds: int, record: Record = capture) -> dict[str, Any]:
    """Check and time one row; ``faults`` in the result say why a row was not timed. ``record`` makes a graph."""
    checks: dict[str, str] = {}
    faults: list[str] = []
    runs: dict[str, Callable[[], object]] = {}
    floors: dict[str, float] = {}
    for name in supported_weights(head.device):
        drafter = drafter_of(head, row, name)
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
        floors[name] = draft_bytes(drafter.cfg, [row.seen] * row.batch) / bandwidth * 1e6

    drafter = drafter_of(head, row, "bf16")
    cfg, bufs = drafter.cfg, drafter.bufs
    baseline = None if row.window else TorchDraft(cfg, drafter.head, bufs, drafter.features)
    if baseline is not None:
        agreement = judge_baseline(baseline, drafter)
        checks["baseline"] = str(agreement)
        faults += [f"baseline: {fault}" for fault in agreement.faults]
    measured: dict[str, Any] = {
        **asdict(row),
        "name": row.name,
        "checks": checks,
        "faults": faults,
        "level_bytes": level_bytes(cfg),
        "draft_bytes": draft_bytes(cfg, [row.seen] * row.batch),
        "floor_us": floors,
    }
    if not faults:
        timed = runs if baseline is None else {**runs, "B": record(baseline.run), "A": baseline.run}
        times = {name: sorted(samples) for name, samples in interleave(timed, head.device, rounds).items()}
        tenth = rounds // 10
        measured["times"] = {
            name: {"median_us": median(each), "low_us": each[tenth], "high_us": each[-1 - tenth]}
            for name, each in times.items()
        }
        for name, floor in floors.items():
            own_us = median(times[name])
            measured[f"{name}_floor_share"] = floor / own_us
            measured |= {f"{name}_vs_{other}": median(times[other]) / own_us for other in "AB" if other in times}
    return measured


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    rows = {row.name: row for row in all_rows()}
    command = Command("draft", __doc__, rows)
    command.add_argument("--rounds", type=int, default=20, help="samples per variant")
    args = command.parse_args(argv)
    chosen = [rows[name] for name in command.chosen(args)]
    device = command.gpu()
    result: dict[str, Any] = {"machine": machine(device)}
    weights = [WEIGHTS[name] for name in supported_weights(device)]
    for model in dict.fromkeys(row.model for row in chosen):
        shapes = [(row.tree, row.batch, row.draft_vocab) for row in chosen if row.model == model]
        compile_ahead(model, shapes, device, weights, CAPACITY)
    result["copy_bytes_per_s"] = bandwidth = copy_bytes_per_s(device)
    result |= {"top_k": TOP_K, "total_tokens": TOTAL_TOKENS, "num_new": NUM_NEW, "rounds": args.rounds, "rows": []}
    for model, of_model in itertools.groupby(chosen, key=lambda row: row.model):
        head = random_head(MODELS[model], device, torch.bfloat16)
        for row in of_model:
            result["rows"].append(measure(head, row, bandwidth, args.rounds))
            show(result["rows"][-1])
            write(result, args.out)
    if any(row["faults"] for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
