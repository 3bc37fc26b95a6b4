"""Decoders over random targets and heads of known dimensions, their steps as generation runs them, and drawn verdicts.

A target's time does not depend on its weights' values, so random ones give the cost of a step. Accepted lengths are
drawn (`drawn_verdicts`). All that benchmarks need of the decoder's insides is here.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from eagle_slim.convert.heads.taps import default_taps
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.drafter import BufferedDrafter, Drafter, choose_drafter
from eagle_slim.runtime.drafter.launch_params import chip_of
from eagle_slim.runtime.drafter.packing import SharedPacking
from eagle_slim.runtime.drafter.tuned_cache import open_tuned_cache
from eagle_slim.runtime.drafter.tuning.precompile import LaunchCase, compile_all
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims, draft_config, random_head
from eagle_slim.runtime.ops import Ops
from eagle_slim.runtime.settings import MAX_NEW_TOKENS, PartialVerification, TreeConfig
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.step.graphs import Phase
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows
from eagle_slim.runtime.step.kernels.slot_state import RECORD_HEAD
from eagle_slim.runtime.step.partial import PartialChains
from eagle_slim.runtime.step.shapes import LARGE, ShapeChooser
from eagle_slim.runtime.step.slots import Slots
from eagle_slim.runtime.target.cache import KVCache, Target
from eagle_slim.runtime.target.expert_loading import Fp8Experts, Mxfp4Experts
from eagle_slim.runtime.target.fp8 import SCALE_BLOCK, Fp8Linear, Fp8Weight, quantise_rows
from eagle_slim.runtime.target.fused import FusedTarget
from eagle_slim.runtime.target.kernels import attention, attention_kernels
from eagle_slim.runtime.target.kernels.attention import (
    AttentionParams,
    AttentionScratch,
    AttentionTiles,
    tree_attention,
)
from eagle_slim.runtime.target.kernels.experts import route
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows
from eagle_slim.runtime.target.wrapper import TargetModel
from eagle_slim.runtime.tree import Trees
from torch import Tensor, nn
from triton import AsyncCompileMode, JITFunction

from benchmarks.shared.drawn_verdicts import DrawnSurvivals, DrawnVerdicts, draw_lengths, survivals
from benchmarks.shared.timing import synchronize, time_queued_us

LAYERS = {
    "smollm2-135m": 30,
    "qwen2.5-0.5b": 24,
    "llama-3.2-1b": 16,
    "llama-3.1-8b": 32,
    "qwen3-8b": 36,
    "llama-3.3-70b": 80,
    "qwen3-30b-a3b": 48,
    "gpt-oss-20b": 24,
    "gpt-oss-120b": 36,
}
_QWEN3 = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3,
    "gpt-oss-20b": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880},
    "gpt-oss-120b": {"num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880},
}
"""Settings of mixtures; gpt-oss' experts are in MXFP4."""
TIED = ("smollm2-135m", "llama-3.2-1b")
TARGET_WEIGHTS = ("bf16", "fp8", "fp8-blocks")
"""Matrices of a target's layers: in the model's type, or in FP8 with scales of rows, or of blocks of 128 x 128."""
DRAFT_WEIGHTS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PEAKED = 20.0
"""Gain of a random LM head whose distributions are as peaked as a trained one's: trees then reach their depth."""
GREEDY, SAMPLED = ChoiceRules(), ChoiceRules(sampled=True, has_top_p=True)
SPARE_LENGTH = 0.02
"""Tokens a pass that are drawn beyond a stated accepted length, so that the measured one is not below it."""
COMPILE_S = 180
FEW_LAYERS = 8
"""Layers of which some are tapped and others not."""
AT_ONCE = 6
"""Processes whose targets of few layers fit beside one another."""


def random_target(
    name: str, dims: Dims, dtype: torch.dtype, device: torch.device, weights: str = "bf16", layers: int | None = None
) -> nn.Module:
    """Build a random Llama, Qwen2, Qwen3, Qwen3-MoE or gpt-oss of these dimensions on the device.

    ``layers``: fewer than `LAYERS`. ``weights``: one of `TARGET_WEIGHTS`; the matrices of layers in FP8 or MXFP4 are
    made one at a time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    more = EXPERTS.get(name, {})
    is_gpt_oss = "num_local_experts" in more
    sizes = {
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": layers or LAYERS[name],
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": name in TIED,
    }
    kind = "gpt_oss" if is_gpt_oss else "qwen3_moe" if more else name[:5] if name.startswith("qwen") else "llama"
    config = AutoConfig.for_model(kind, **sizes | more)
    is_packed = is_gpt_oss or weights != "bf16"
    with torch.device("meta") if is_packed else device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if is_gpt_oss:
        for layer in model.model.layers:
            layer.mlp.experts = _random_mxfp4(layer.mlp.experts, device)
    if is_packed:
        _fill(model, dtype, device, weights)
    random_model: nn.Module = model.eval()
    return random_model


def _random_mxfp4(plain: Any, device: torch.device) -> Mxfp4Experts:
    """Draw experts in MXFP4: numbers uniformly, of which one in three is above 2, and scales near 2^-7."""
    experts = Mxfp4Experts(plain, device)
    for weight in (experts.gate_up, experts.down):
        weight.words.random_(-(1 << 31), (1 << 31) - 1)
        weight.put_scales(torch.randint(119, 122, (weight.shape[0], weight.shape[1] // 32), device=device))
    return experts


def _fill(model: Any, dtype: torch.dtype, device: torch.device, weights: str) -> None:
    """Give a model on the meta device random weights, those of its layers' matrices in FP8 if ``weights`` says so."""
    is_by_blocks = weights == "fp8-blocks"
    for layer in model.model.layers if weights != "bf16" else ():
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = experts = Fp8Experts(layer.mlp.experts, is_by_blocks, device)
            for weight in (experts.gate_up, experts.down):
                for words, scales in zip(weight.words.chunk(16), weight.scales.chunk(16), strict=True):
                    drawn = torch.empty((len(words), weight.shape[1]), dtype=dtype, device=device).normal_(std=0.02)
                    quantised = quantise_rows(drawn)
                    words.copy_(quantised.words)
                    scales.copy_(quantised.scales)
        for path, linear in [(path, each) for path, each in layer.named_modules() if isinstance(each, nn.Linear)]:
            weight = quantise_rows(torch.empty(linear.weight.shape, dtype=dtype, device=device).normal_(std=0.02))
            if is_by_blocks:
                groups = -(-linear.in_features // SCALE_BLOCK)
                weight = Fp8Weight(weight.words, weight.scales.repeat(1, groups))
            parent, _, name = path.rpartition(".")
            setattr(layer.get_submodule(parent), name, Fp8Linear(weight, linear.bias))
    for path, parameter in list(model.named_parameters()):
        parent, _, name = path.rpartition(".")
        values = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(std=0.02)
        values += path.endswith("norm.weight")
        setattr(model.get_submodule(parent), name, nn.Parameter(values, requires_grad=False))
    model.tie_weights()
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def guessable_model(
    name: str, device: torch.device, tokenizer: Any, weights: str, layers: int | None = None, **options: Any
) -> SpeculativeModel:
    """Build a random model in bf16, and an EAGLE-1 head over its embedding and LM head that often guesses it.

    Each of 4,096 ids is mostly followed by one of two, whatever comes before; the layers add as much again to its
    embedding. ``weights``: one of `TARGET_WEIGHTS`; ``layers``: fewer than `LAYERS`; ``options`` of `SpeculativeModel`.
    """
    torch.manual_seed(0)
    dims = replace(MODELS[name], vocab=len(tokenizer), kind="eagle")
    model: Any = random_target(name, dims, torch.bfloat16, device, weights, layers)
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            parameter.data.normal_(std=0.3)
    embedding, lm_head = model.model.embed_tokens.weight.data.normal_(), model.lm_head.weight.data.normal_()
    first, second = (embedding[torch.randperm(4096, device=device)] for _ in range(2))
    lm_head *= 0.3
    lm_head[:4096] = 0.75 * first + 0.7 * second
    lm_head *= dims.hidden**-0.5
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    head = replace(random_head(dims, device), embedding=embedding, lm_head=lm_head)
    head.tensors["fc.weight"][:, : dims.hidden] = torch.eye(dims.hidden, device=device)
    target = TargetModel(model, None, "fused")
    return SpeculativeModel(target, choose_drafter("auto", head, LARGE), tokenizer, is_tree_sized=True, **options)


class RandomModel:
    """A random target and a random head over its whole vocabulary; decoders over them share every weight.

    ``name``: one of `LAYERS`. ``backend``: "fused" for our own forward, "transformers" for theirs. ``weights``: one of
    `TARGET_WEIGHTS`. ``layers``: fewer than the target has.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "fused",
        weights: str = "bf16",
        layers: int | None = None,
    ) -> None:
        self.dims = MODELS[name]
        model = random_target(name, self.dims, dtype, device, weights, layers)
        target = TargetModel(model, default_taps(layers or LAYERS[name]), backend)
        self.target, self.weight_bytes = target.runs, target.weight_bytes
        self._waits = target.eager_reason is not None
        self.head = random_head(self.dims, device, dtype, lm_head_gain=PEAKED)
        self._drafters: dict[tuple[int, str, int | None], Drafter] = {}

    def kv_bytes(self, rows: int) -> int:
        """Count the bytes of the target's keys and values of ``rows`` tokens."""
        numbers = sum(each.kv_heads * (each.key_dim + each.value_dim) for each in self.target.layer_shapes)
        return rows * numbers * self.target.dtype.itemsize

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """Allocate a cache of random keys and values, as if every row had been written."""
        cache = KVCache.allocate(self.target, num_slots, capacity)
        for keys, values in cache.stacks:
            keys.normal_()
            values.normal_()
        self.target.reserve_positions(capacity + MAX_NEW_TOKENS)
        return cache

    def decoder(
        self,
        cache: KVCache,
        tree: TreeConfig | None,
        draft_vocab: int = 0,
        draft_weights: str = "bf16",
        window: int | None = None,
    ) -> Decoder:
        """Build a decoder over the whole cache that drafts over the first ``draft_vocab`` rows; plain without a tree.

        ``draft_weights``: one of `DRAFT_WEIGHTS`; "bf16" is the model's own type. ``window``: last tokens that drafts
        look back on; None for all. Packed weights are kept for the next decoder of the same rows and window.
        """
        drafter = None if tree is None else self._drafter(cache, tree, draft_vocab, draft_weights, window)
        return Decoder.of_drafter(self.target, cache, drafter, self._waits)

    def drawn_decoder(
        self, cache: KVCache, tree: TreeConfig, draft_vocab: int, drawn: Sequence[int] | Tensor
    ) -> Decoder:
        """Build a drafting decoder whose steps accept what is ``drawn`` (`DrawnVerdicts`)."""
        verdicts = DrawnVerdicts(drawn, cache.num_slots, self.target.device)
        drafter = self._drafter(cache, tree, draft_vocab)
        return Decoder.of_drafter(self.target, cache, drafter, self._waits, revise=verdicts)

    def partial_decoder(
        self,
        cache: KVCache,
        tree: TreeConfig,
        draft_vocab: int,
        option: PartialVerification,
        drawn: Sequence[int],
        survivals: Sequence[int],
    ) -> tuple[Decoder, DrawnSurvivals]:
        """Build a decoder of partial verification whose partial passes accept ``drawn`` lengths.

        Its full passes confirm ``survivals``; returned with it.
        """
        drafter = self._drafter(cache, tree, draft_vocab)
        verdicts = DrawnVerdicts(drawn, cache.num_slots, self.target.device)
        slots = Slots.allocate(self.target, cache, drafter, option.chain)
        chains = PartialChains(slots, drafter, option, self._waits, verdicts)
        confirmed = DrawnSurvivals(survivals, chains)
        return Decoder(slots, chains, self._waits, revise=confirmed), confirmed

    def _drafter(
        self,
        cache: KVCache,
        tree: TreeConfig,
        draft_vocab: int,
        draft_weights: str = "bf16",
        window: int | None = None,
    ) -> BufferedDrafter:
        key = (draft_vocab, draft_weights, window)
        if key not in self._drafters:
            backend = "triton" if self.target.device.type == "cuda" else "reference"
            head = self.head.of_rows(slice(draft_vocab)).with_window(window)
            stored = torch.float8_e4m3fn if draft_weights == "fp8" else None
            packing = SharedPacking(head, weight_dtype=stored) if backend == "triton" else None
            self._drafters[key] = Drafter(head, tree, backend, packing)
        drafter, room = self._drafters[key], (cache.num_slots, cache.capacity)
        found = drafter.like(drafter.weights, tree).on_slots(*room, drafter.allocate_cache(*room) if window else None)
        found.bufs.keys.normal_()
        found.bufs.values.normal_()
        return found


def level_bytes(cfg: DrafterConfig) -> int:
    """Count the bytes of weights that drafting one level reads."""
    layer = cfg.qkv_size * cfg.qkv_in + cfg.num_heads * cfg.head_dim * cfg.hidden
    layer += 3 * cfg.intermediate * cfg.hidden + cfg.draft_vocab * cfg.hidden
    layer += cfg.fc_in * cfg.hidden if cfg.kind == "eagle" else 0
    return layer * cfg.weight_dtype.itemsize


def draft_bytes(cfg: DrafterConfig, prefixes: list[int]) -> int:
    """Count the least bytes of weights and KV that drafting after these prefixes reads."""
    fc = cfg.fc_in * cfg.hidden * cfg.weight_dtype.itemsize if cfg.kind == "eagle3" and cfg.has_fc else 0
    kv = sum(prefixes) * 2 * cfg.num_kv_heads * cfg.head_dim * cfg.dtype.itemsize
    return fc + (cfg.depth + 1) * (level_bytes(cfg) + kv)


def compile_ahead(
    model: str,
    shapes: Iterable[tuple[TreeConfig, int, int]],
    device: torch.device,
    weights: Sequence[torch.dtype] = (torch.bfloat16,),
    capacity: int = 2048,
) -> None:
    """Compile the drafter's kernels for trees, numbers of sequences and draft vocabularies, in parallel."""
    dims, chip, find = MODELS[model], chip_of(device), open_tuned_cache().find
    configs = [
        draft_config(dims, rows, tree, batch, capacity, torch.bfloat16, stored)
        for tree, batch, rows in dict.fromkeys(shapes)
        for stored in weights
    ]
    jobs = [LaunchCase(dims, cfg, find(cfg, chip)[0]) for cfg in configs]
    compiled = sum(compile_all(jobs, chip.capability, COMPILE_S))
    print(f"{compiled} of {len(jobs)} kernels compiled ahead", flush=True)


def run_ahead(
    name: str,
    weights: Sequence[str],
    places: Sequence[tuple[TreeConfig | None, int, int]],
    draft: tuple[int, str],
    prefix: int,
) -> None:
    """Compile the kernels of steps outside the drafter, in processes that each run one with a target of few layers.

    ``places``: trees, numbers of sequences and capacities of their caches; ``draft``: draft vocabulary and the head's
    type. What fails will fail again, in full, where it is measured.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, context, max_tasks_per_child=1) as pool:
        jobs = [pool.submit(run_once, name, each, *place, draft, prefix) for each in weights for place in places]
    failed = [job.exception() for job in jobs if job.exception() is not None]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} steps run ahead", *map(repr, failed[:1]), flush=True)


@torch.inference_mode()
def run_once(
    name: str, weights: str, tree: TreeConfig | None, batch: int, capacity: int, draft: tuple[int, str], prefix: int
) -> None:
    """Run a step of a target of few layers, greedy, and of one sequence sampled and with a prompt, too."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = RandomModel(name, device, weights=weights, layers=FEW_LAYERS)
    decoder = model.decoder(model.new_cache(batch, capacity), tree, *draft)
    phase_times(decoder, batch, prefix, rounds=1, times=1)
    if batch == 1:
        set_sampling(decoder, temperature=0.7, top_p=0.9)
        phase_times(decoder, batch, prefix, SAMPLED, rounds=1, times=1)
        prompt_time(decoder, prefix, rounds=1)


@torch.inference_mode()
def fill(decoder: Decoder, num_active: int, prefix: int, turn: int = 0) -> None:
    """Pretend that sequences of ``prefix`` tokens are running; ``turn``: drawn lengths that each has used so far.

    Each goes on from a token of its own: after the same one, a mixture's sequences would take the same experts.
    """
    decoder.fill_(num_active, prefix)
    decoder.state.new_tokens[:num_active, 0] += torch.arange(num_active, device=decoder.target.device)
    if isinstance(decoder.steps.revise, DrawnVerdicts):
        decoder.steps.revise.turns.fill_(turn)


def set_sampling(decoder: Decoder, temperature: float, top_p: float) -> None:
    """Set the numbers and the noise keys that steps with the rules `SAMPLED` use."""
    decoder.slots.choice.numbers.copy_(torch.tensor([temperature, 0, top_p, 0, 1, 0]))
    decoder.slots.choice.keys.random_()


def filled_phases(decoder: Decoder, num_active: int, prefix: int, rules: ChoiceRules = GREEDY) -> Iterator[Phase]:
    """Fill the decoder, and yield the phases of one step: each must be run before the next is asked for."""
    fill(decoder, num_active, prefix)
    yield from decoder.timed_step(num_active, rules, decoder.tree)


def phase_times(
    decoder: Decoder,
    num_active: int,
    prefix: int,
    rules: ChoiceRules = GREEDY,
    rounds: int = 10,
    times: int = 4,
    has_phases: bool = True,
) -> dict[str, float]:
    """Time each phase where it stands, and whole steps: milliseconds, medians of means of ``times`` replays in a row.

    A phase can be repeated: only the walk moves on, by a few rows a time, and no phase depends much on that.
    """
    device = decoder.target.device
    row = {}
    for phase in filled_phases(decoder, num_active, prefix, rules) if has_phases else ():
        phase.run()
        samples = [time_queued_us(phase.run, device, times) for _ in range(rounds)]
        row[f"{phase.name}_ms"] = statistics.median(samples) / 1e3
    samples = []
    for _ in range(rounds):
        fill(decoder, num_active, prefix)
        samples.append(time_queued_us(partial(decoder.step, num_active, rules, decoder.tree), device, times))
    return row | {"step_ms": statistics.median(samples) / 1e3}


def prompt_time(decoder: Decoder, num_tokens: int, rounds: int = 10, times: int = 2) -> float:
    """Time a prompt of ``num_tokens`` up to its first new token: milliseconds of the device, the median."""
    decoder.clear_()
    numbers = decoder.slots.box.numbers
    numbers.fill_(-1)
    numbers[:4] = torch.tensor([0, num_tokens, 1 << 20, 0])

    def run() -> None:
        for chunk in decoder.prompts.begin(num_tokens):
            decoder.prompts.run_chunk(chunk, GREEDY)
        decoder.prompts.end()

    if decoder.graphs.can_capture:
        decoder.graphs.warm_up(decoder.prompts.groups(GREEDY, [num_tokens]), GREEDY)
    return statistics.median(time_queued_us(run, decoder.target.device, times) for _ in range(rounds)) / 1e3


def prompt_with_head(decoder: Decoder, num_tokens: int) -> dict[str, float]:
    """Time one prompt of ``num_tokens``, and apart the pairs that its head keeps: ms; count their cache's bytes."""
    drafter, device = decoder.drafts.drafter, decoder.target.device
    assert drafter is not None
    first_token_ms = prompt_time(decoder, num_tokens, rounds=1, times=1)
    kept = [nodes for nodes, is_kept in decoder.prompts.begin(num_tokens) if is_kept]
    place, slot = (torch.arange(length, dtype=torch.int32, device=device) for length in (max(kept), 1))
    features = torch.randn(len(place), drafter.cfg.feature_width, device=device).to(drafter.cfg.dtype)

    def pairs() -> None:
        for nodes in kept:
            rows = place[:nodes]
            drafter.prefill(features[:nodes], torch.zeros_like(rows), rows, rows, slot)

    pairs()
    cache = (drafter.bufs.keys, drafter.bufs.values)
    return {
        "first_token_ms": first_token_ms,
        "head_ms": time_queued_us(pairs, device, 1) / 1e3,
        "head_cache_bytes": sum(each.nbytes for each in cache),
    }


def prompt_logits(target: Target, prompt: Sequence[int]) -> Tensor:
    """Compute the logits [prompt, target_vocab] of a prompt that is run as one chunk."""
    device, num_rows = target.device, len(prompt)
    target.reserve_positions(num_rows)
    box, lengths = PromptBox.allocate(num_rows, device), torch.zeros(1, dtype=torch.int32, device=device)
    box.numbers[1] = num_rows
    box.tokens.copy_(torch.tensor(prompt))
    rows, bufs = ChunkRows.allocate(num_rows, lengths), target.new_buffers(1, num_rows, num_rows, num_rows + 1)
    Ops.for_device(device)(chunk_rows)(box, rows)
    target.forward(rows.forward, KVCache.allocate(target, 1, num_rows + 1), bufs)
    return bufs.logits


class NotingOps:
    """Runs a target's operations, and notes how many experts each launch of a router touched in ``touched``."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.use_kernels = ops, ops.use_kernels
        self.touched: list[int] = []

    def __call__(self, operation: Any) -> Any:
        """Return the operation, or its twin; a router notes what it chose."""
        run = self.ops(operation)
        return partial(self._route, run) if operation is route else run

    def _route(self, run: Any, rows: Any, norm: Any, experts: Any, *given: Any) -> None:
        run(rows, norm, experts, *given)
        chosen = given[-1].picks.experts[: len(rows.scaled)]
        self.touched.append(len(chosen[chosen < experts.count].unique()))


class Pass(NamedTuple):
    """A pass of the target alone, the mean of the experts that a layer of it touches, and the logits it writes."""

    run: Callable[[], None]
    touched: Callable[[], float]
    logits: Tensor


def pass_over(target: Target, cache: KVCache, tokens: Tensor, prefix: int) -> tuple[Callable[[], None], Tensor]:
    """Return a pass over ``tokens`` int64 [places, nodes], chains after ``prefix`` tokens of a slot, and its logits."""
    places, nodes = tokens.shape
    device, places_of = tokens.device, torch.arange(places, dtype=torch.int32, device=tokens.device)
    lengths = torch.full((places,), prefix, dtype=torch.int32, device=device)
    rows = ForwardRows.allocate(places, nodes, lengths, is_path=True)
    node = torch.arange(nodes, device=device).expand(places, nodes).contiguous()
    count = torch.tensor([places], dtype=torch.int32, device=device)
    Ops.for_device(device)(tree_rows)(Trees(places_of, count, tokens, node - 1, node), rows)
    bufs = target.new_buffers(places, nodes, places * nodes, cache.capacity)
    return partial(target.forward, rows, cache.first(places), bufs), bufs.logits


def captured_pass(target: Target, cache: KVCache, tokens: Tensor, prefix: int) -> Pass:
    """Return a `pass_over` tokens, captured on a GPU; call it in inference mode."""
    assert isinstance(target, FusedTarget)
    run, logits = pass_over(target, cache, tokens, prefix)

    def touched() -> float:
        noting = NotingOps(target.ops)
        with mock.patch.object(target, "ops", noting):
            run()
        return sum(noting.touched) / max(1, len(noting.touched))

    if tokens.device.type != "cuda":
        return Pass(run, touched, logits)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # What the graph reads and writes lives as long as it does.
    return Pass(partial(_replay, graph, run), touched, logits)


def _replay(graph: torch.cuda.CUDAGraph, _held: object) -> None:
    graph.replay()


def attention_of_layers(decoder: Decoder, prefix: int) -> Callable[[], None]:
    """Return a run of all layers' attention over the tree that one sequence drafted last, after ``prefix`` tokens."""
    target = decoder.target
    assert decoder.drafts.drafter is not None
    assert isinstance(target, FusedTarget)
    tree, nodes = decoder.drafts.drafter.bufs, decoder.drafts.buffers(decoder.tree).nodes
    lengths = torch.full((1,), prefix, dtype=torch.int32, device=target.device)
    rows, first = ForwardRows.allocate(1, nodes, lengths), torch.zeros_like(lengths)
    decoder.ops(tree_rows)(Trees(first, first + 1, tree.draft_tokens, tree.parents, tree.tree_position_ids), rows)
    bufs = target.new_buffers(1, nodes, nodes, decoder.cache.capacity)
    bufs.query.normal_()

    def run() -> None:
        for keys, values in decoder.cache.layers:
            params = AttentionParams(target.scale)
            target.ops(tree_attention)(bufs.query, keys, values, rows.attention, params, bufs.attended, bufs.scratch)

    return run


def step_with_tiles(
    decoder: Decoder, num_active: int, prefix: int, tiles: AttentionTiles
) -> tuple[Callable[[], None], Tensor]:
    """Return a greedy step whose attention has these tiles, and the logits of its first run after ``prefix`` tokens."""
    assert decoder.slots.features is not None
    decoder.graphs.kept.clear()
    decoder.slots.features.zero_()
    with mock.patch.object(attention, "attention_tiles", return_value=tiles):
        fill(decoder, num_active, prefix)
        decoder.step(num_active, GREEDY, decoder.tree)
    run = decoder.graphs.get(("step", decoder.tree, decoder.batch_for(num_active)), GREEDY)
    logits = decoder.drafts.buffers(decoder.tree).bufs.logits.clone()
    return run or partial(decoder.step, num_active, GREEDY, decoder.tree), logits


class CountingKernel:
    """Launches attention's main parts, and counts the blocks of keys that they go through."""

    def __init__(self, device: torch.device) -> None:
        self.num_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        self._kernel = attention_kernels.main_kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launch over a grid, with a counter in the place of the last argument."""

        def launch(*given: Any, **options: Any) -> None:
            self._kernel[grid](*given[:-1], self.num_blocks, **options)

        return launch


def count_blocks(decoder: Decoder, num_active: int, prefix: int, tiles: AttentionTiles) -> int:
    """Count the blocks of keys that main parts of these tiles go through in one layer of a step, by the kernel."""
    for phase in filled_phases(decoder, num_active, prefix):
        phase.run()
        if phase.name == "verify":
            break
    trees, (keys, values) = decoder.drafts.buffers(decoder.tree), decoder.cache.layers[0]
    batch, shape, device = decoder.batch_for(num_active), decoder.target.layer_shapes[0], decoder.target.device
    query = torch.zeros((batch * trees.nodes, shape.heads * shape.key_dim), dtype=keys.dtype, device=device)
    sizes = [(shape.heads, shape.kv_heads, shape.key_dim)]
    counting = CountingKernel(device)
    with (
        mock.patch.object(attention_kernels, "main_kernel", counting),
        mock.patch.object(attention_kernels, "tail_kernel", mock.MagicMock()),
        mock.patch.object(attention, "attention_tiles", return_value=tiles),
    ):
        scratch = AttentionScratch.allocate(batch, trees.nodes, sizes, decoder.cache.capacity, device)
        rows = trees.rows(batch).attention
        tree_attention(query, keys, values, rows, AttentionParams(1.0), torch.empty_like(query), scratch)
    return int(counting.num_blocks)


class StepsRun(NamedTuple):
    """A run of steps: wall-clock milliseconds of one, tokens that all sequences gained, and their steps.

    ``timing_s``: of steps that were run only to time a shape, not counted in ``step_ms``.
    """

    step_ms: float
    tokens: int
    passes: int
    timing_s: float


def run_steps(
    decoder: Decoder, num_active: int, steps: int, chooser: ShapeChooser | None = None, context: int = 0
) -> StepsRun:
    """Run greedy steps as generation does: the host reads each step's record while the next one runs.

    ``chooser`` chooses the shape of each, after ``context`` tokens; timing a shape first, on a GPU, is not counted.
    """
    record, device, places = decoder.state.record, decoder.target.device, decoder.batch_for(num_active)
    first_rank = RECORD_HEAD + decoder.state.path.shape[1] + 1
    # One for each step: none is read before its copy is done, or overwritten before it is read.
    values = torch.empty((steps, *record.shape), dtype=record.dtype, pin_memory=record.is_cuda)
    ready = [torch.cuda.Event(enable_timing=True) for _ in range(steps)] if record.is_cuda else []
    shapes: list[TreeConfig | None] = []
    pauses: list[int] = []
    tokens, apart_s = 0, 0.0
    synchronize(device)
    begun = time.perf_counter()
    for step in range(steps + 1):
        if step < steps:
            shape = decoder.tree if chooser is None else chooser.next(places, context, range(num_active))
            while chooser is not None and any(chooser.is_unmeasured(each, places) for each in (shape, None)):
                synchronize(device)
                started = time.perf_counter()
                for each in (shape, None):
                    chooser.time(each, places, context, decoder.time_step(num_active, GREEDY, each))
                apart_s += time.perf_counter() - started
                shape = chooser.next(places, context, range(num_active))
            decoder.step(num_active, GREEDY, shape)
            values[step].copy_(record, non_blocking=True)
            if ready:
                ready[step].record()
            shapes.append(shape)
            pauses.append(decoder.graphs.num_pauses)
        if step == 0:
            continue
        read = step - 1
        if ready:
            ready[read].synchronize()
        rows = {slot: row for slot, row in enumerate(values[read].tolist()[:-1]) if row[0] > 0}
        tokens += sum(row[0] for row in rows.values())
        if chooser is not None:
            chooser.steps[shapes[read]] += 1
            chooser.see(shapes[read], {slot: row[first_rank : first_rank + row[0] - 1] for slot, row in rows.items()})
            if ready and read > 0 and pauses[read - 1] == pauses[read]:
                chooser.time(shapes[read], places, context, ready[read - 1].elapsed_time(ready[read]))
    synchronize(device)
    return StepsRun((time.perf_counter() - begun - apart_s) * 1e3 / steps, tokens, steps * num_active, apart_s)


@contextmanager
def only_compiled() -> Iterator[None]:
    """Compile, side by side in threads, the kernels that a block launches, and launch none of them."""
    launch = mock.patch.object(
        JITFunction, "__getitem__", lambda kernel, grid: partial(kernel.run, grid=grid, warmup=True)
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool), launch:
        yield


def capture_steps(decoders: Sequence[tuple[Decoder, int]], prefix: int) -> None:
    """Compile and capture the steps of decoders, each of so many sequences.

    On a GPU all kernels but drafts are compiled first, side by side in threads: a launch only hands over its kernel.
    """
    if decoders[0][0].graphs.can_capture:
        with only_compiled():
            for decoder, count in decoders:
                phases = decoder.steps.of(decoder.batch_for(count), GREEDY, decoder.tree)
                decoder.graphs.practise([phase.run for phase in phases if phase.name != "draft"])
    for decoder, count in decoders:
        fill(decoder, count, prefix)
        run_steps(decoder, count, 2)


def take_turns(
    decoders: Sequence[Decoder], batch: int, prefix: int, steps: int | Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Run ``steps`` of ``batch`` sequences from a prefix with every decoder, ``rounds`` times, and once to warm up.

    ``steps``: of each decoder, or of all. Each round goes on in the drawn lengths. Returns for each decoder what was
    accepted, counted; the median step of all rounds; tokens/s of all sequences from the two. ``is_length_met``: trees
    that are never deep enough, and lengths that were not all used, may give another mean than was drawn.
    """
    runs: list[list[StepsRun]] = [[] for _ in decoders]
    numbers = [steps] * len(decoders) if isinstance(steps, int) else steps
    for turn in range(-1, rounds):
        for decoder, decoded, number in zip(decoders, runs, numbers, strict=True):
            fill(decoder, batch, prefix, max(turn, 0) * number)
            run = run_steps(decoder, batch, 2 if turn < 0 else number)
            if turn >= 0:
                decoded.append(run)
    found = []
    for decoder, decoded in zip(decoders, runs, strict=True):
        accepted = sum(run.tokens for run in decoded) / sum(run.passes for run in decoded)
        step_ms = statistics.median(run.step_ms for run in decoded)
        row = {"accepted_length": accepted, "step_ms": step_ms, "tokens_per_s": accepted * batch / step_ms * 1e3}
        if isinstance(decoder.steps.revise, DrawnVerdicts):
            drawn = float(decoder.steps.revise.drawn.double().mean())
            row["is_length_met"] = abs(accepted - drawn) <= SPARE_LENGTH
        found.append(row)
    return found


@torch.inference_mode()
def measure_partial(
    model: RandomModel,
    draft_vocab: int,
    tree: TreeConfig,
    batch: int,
    prefix: int,
    options: Sequence[PartialVerification],
    accepted: float,
    chances: Sequence[float],
    steps: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Measure a row for every option and chance: plain steps, ``steps`` with full passes, and partial verification.

    All in turn. Ratios are those of tokens/s: partial verification over full passes, and either over plain steps. A
    step of partial verification holds ``num_steps`` trees, so fewer of them are run; plain steps are all alike.
    """
    room = tree.total_tokens + (steps + 2) * max(option.num_tokens + 1 for option in options)
    cache = model.new_cache(batch, prefix + room)
    lengths = draw_lengths(accepted + SPARE_LENGTH, tree.path_width)
    plain, full = model.decoder(cache, None), model.drawn_decoder(cache, tree, draft_vocab, lengths)
    base = {"batch": batch, "prefix": prefix, "nodes": tree.total_tokens}
    for option in options:
        numbers = [max(1, steps // 4), steps, max(1, steps // option.num_steps)]
        # Each run takes all of them: where it begins must not decide how much survives.
        drawn = [survivals(chance, option.num_tokens, numbers[-1] * rounds) for chance in chances]
        ahead, confirmed = model.partial_decoder(cache, tree, draft_vocab, option, lengths, drawn[0])
        for chance, lengths_ahead in zip(chances, drawn, strict=True):
            confirmed.survivals.copy_(torch.tensor(lengths_ahead))
            without, before, now = take_turns([plain, full, ahead], batch, prefix, numbers, rounds)
            yield base | {
                "blocks": option.num_blocks,
                "steps_ahead": option.num_steps,
                "survival": chance,
                "plain": without,
                "full": before,
                "ahead": now,
                "ratio": now["tokens_per_s"] / before["tokens_per_s"],
                "full_over_plain": before["tokens_per_s"] / without["tokens_per_s"],
                "over_plain": now["tokens_per_s"] / without["tokens_per_s"],
            }
