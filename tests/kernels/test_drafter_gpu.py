"""The persistent drafter on a GPU: every type against the fp32 reference, real dimensions, graphs, and a real head."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.kernels.grid_barrier import ERROR, _count_rounds_kernel, count_rounds, count_rounds_ref
from eagle_slim.runtime.drafter.launch import allocate_buffers, check_finished, launch_drafter
from eagle_slim.runtime.drafter.packed_weights import Weights
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.drafter.tuning.agreement import (
    Agreement,
    Step,
    candidates_of,
    exact_head,
    log_prob_atol,
    replay,
    tree_of,
)
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims, draft_config, first_rows, random_head, random_step
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.drafter.weights import HeadWeights
from eagle_slim.runtime.errors import EagleSlimError
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.tree import Candidates
from kernels.replaying import FIELDS, assert_agrees, assert_equal_trees, draft, run
from support.drafting import random_head as small_head
from support.drafting import with_follow, with_options

pytestmark = pytest.mark.gpu
PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
MEDIUM = {
    "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 2, "head_dim": 64, "target_vocab": 4000,
    "draft_vocab": 3001, "device": "cuda",
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, None),
    ],
    ids=["bf16", "fp16", "fp8", "fp32"],
)
def test_every_type(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, record_property: Callable[[str, object], None]
) -> None:
    if weight_dtype is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89 or later")
    head = small_head(dtype=dtype, **MEDIUM)
    drafted = draft(head, (5, 10, 60), [300, 1000, 40], [3, 16, 1], [2, 0], weight_dtype)
    record_property("agreement", str(drafted.agreement))
    assert_agrees(drafted)
    if dtype == torch.float32:
        assert_equal_trees(drafted.tree, drafted.reference_tree())


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn), (torch.float32, None)],
    ids=["bf16", "fp8", "fp32"],
)
def test_tails(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    """Full tails, one of a single row and none at all, side by side."""
    if weight_dtype is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89 or later")
    head = with_follow(small_head(dtype=dtype, **{**MEDIUM, "draft_vocab": 801}), 500)
    one = [follow_ids(head)[7]]
    texts = {3: list(range(4000)), 1: one, 0: list(range(2000))}
    drafted = draft(
        head, (5, 10, 60), [300, 90, 7, 40], [3, 16, 2, 1], [3, 1, 2, 0], weight_dtype, texts=texts
    )  # fmt: skip
    assert drafted.bufs.tails is not None
    assert drafted.bufs.tails.sizes.tolist() == [500, 1, 0, 500]
    assert_agrees(drafted)
    joined = set(drafted.bufs.tails.ids[3, :500].tolist())
    assert len(joined & set(drafted.tree.draft_tokens[3].tolist())) > 5
    if dtype == torch.float32:
        assert_equal_trees(drafted.tree, drafted.reference_tree())


def follow_ids(head: HeadWeights) -> list[int]:
    assert head.follow is not None
    return head.follow.ids.tolist()


def test_eagle_2_and_odd_sizes() -> None:
    options = {**MEDIUM, "heads": 6, "kv_heads": 2, "hidden": 480, "head_dim": 80, "draft_vocab": 1777}
    head = small_head("eagle", dtype=torch.bfloat16, qkv_bias=True, **options)
    assert_agrees(draft(head, (3, 7, 33), [129], [5]))


@pytest.mark.parametrize("weight_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("slots", [4, 16])
def test_batches(slots: int, kind: str, weight_dtype: torch.dtype | None) -> None:
    if weight_dtype is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89 or later")
    head = small_head(kind, dtype=torch.bfloat16, **MEDIUM)
    prefixes, num_new = [7 + 61 * slot for slot in range(slots)], [1 + (5 * slot) % 16 for slot in range(slots)]
    active = [slot for slot in reversed(range(slots)) if slot % 5 != 2]
    assert_agrees(draft(head, (3, 10, 60), prefixes, num_new, active, weight_dtype))


EACH_TAP_NORMED = {
    "tap_norms": 3, "norm_before_residual": True, "norm_output": True, "o_bias": True, "mlp_bias": True,
    "activation": "gelu", "sliding_window": 200,
}  # fmt: skip
ALL_TAPS_NORMED = {"tap_norms": 1, "norm_output": True, "activation": "gelu_pytorch_tanh", "sliding_window": 3}


@pytest.mark.parametrize(
    ("options", "weight_dtype"),
    [(EACH_TAP_NORMED, None), (EACH_TAP_NORMED, torch.float8_e4m3fn), (ALL_TAPS_NORMED, None)],
    ids=["each tap normed, bf16", "each tap normed, fp8", "all taps normed, bf16"],
)
def test_options_of_a_head(
    options: dict[str, Any], weight_dtype: torch.dtype | None, record_property: Callable[[str, object], None]
) -> None:
    if weight_dtype is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89 or later")
    head = with_options(small_head(dtype=torch.bfloat16, **MEDIUM), **options)
    drafted = draft(head, (5, 10, 60), [300, 1000, 40], [3, 16, 1], [2, 0], weight_dtype)
    record_property("agreement", str(drafted.agreement))
    assert_agrees(drafted)


WIDEST = Dims(16384, 53248, 128, 8, 128, 32000)
"""Llama-3.1-405B's, with fewer token ids."""


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (MODELS["llama-3.1-8b"], {"norm_before_residual": True}),
        (MODELS["llama-3.1-8b"], EACH_TAP_NORMED),
        (WIDEST, {"norm_before_residual": True}),
    ],
    ids=["llama-3.1-8b, norm before residual", "llama-3.1-8b, each tap normed", "16,384 wide"],
)
def test_options_at_real_dimensions(
    dims: Dims, options: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    head = with_options(first_rows(random_head(dims, torch.device("cuda")), 32000), **options)
    cfg = DrafterConfig.of(head, TreeConfig(5, 10, 60), 1, 4096 + 16)
    weights = Weights.pack(head, cfg)
    bufs = allocate_buffers(cfg, weights)
    drafted = run(cfg, random_step(cfg, 4000, 4, bufs), weights, bufs)
    record_property("agreement", str(drafted.agreement))
    assert_agrees(drafted)


def test_fewer_nodes_than_levels() -> None:
    assert_agrees(draft(small_head(dtype=torch.bfloat16, **MEDIUM), (5, 3, 3), [50], [2]))


def test_a_chain_and_separate_taps() -> None:
    head = small_head(dtype=torch.bfloat16, **MEDIUM)
    assert_agrees(draft(head, (7, 1, 8), [64], [8], separate_taps=True))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_llama_8b_dimensions(weight_dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    if weight_dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89 or later")
    dims = MODELS["llama-3.1-8b"]
    head = first_rows(random_head(dims, torch.device("cuda")), 32000)
    cfg = draft_config(dims, 32000, TreeConfig(5, 10, 60), 1, 4096, weight_dtype=weight_dtype)
    weights = Weights.pack(head, cfg)
    bufs = allocate_buffers(cfg, weights)
    for prefix in (512, 4000):
        features = random_step(cfg, prefix, 4, bufs)
        drafted = run(cfg, features, weights, bufs)
        record_property(f"agreement_{prefix}", str(drafted.agreement))
        assert_agrees(drafted)


def test_graph_replays_take_new_inputs() -> None:
    """One graph, recorded once, drafts what a plain launch drafts, also after its inputs changed."""
    head = small_head(dtype=torch.bfloat16, **MEDIUM)
    plain = draft(head, (5, 10, 60), [300, 1000, 40], [3, 16, 1], [2, 0])
    bufs, features = plain.bufs, plain.features
    assert isinstance(features, torch.Tensor)
    before = torch.cuda.memory_allocated()
    launch_drafter(plain.cfg, features, plain.weights, bufs)
    assert torch.cuda.memory_allocated() == before
    graph = capture(lambda: launch_drafter(plain.cfg, features, plain.weights, bufs))
    for active, tokens, prefix in (([2, 0], [[5], [1, 2, 3]], [40, 300]), ([1], [[9] * 4], [777])):
        bufs.set_step(active, tokens, prefix)
        features.copy_(torch.randn_like(features))
        step = Step.of(features, bufs)
        launch_drafter(plain.cfg, features, plain.weights, bufs)
        launched = tree_of(bufs)
        for name in FIELDS:
            getattr(bufs, name).fill_(-2 if name != "tree_mask" else 1)
        graph()
        check_finished(bufs)
        assert_equal_trees(tree_of(bufs), launched)
        agreement = replay(
            exact_head(head, plain.cfg), plain.cfg.tree, step, candidates_of(bufs), tree_of(bufs), bufs.keys,
            bufs.values, atol=log_prob_atol(plain.cfg),
        )  # fmt: skip
        assert agreement.agrees, str(agreement)


def test_drafts_repeat_to_the_last_bit() -> None:
    head = small_head(dtype=torch.bfloat16, **MEDIUM)
    first = draft(head, (5, 10, 60), [300, 1000, 40], [3, 16, 1], [2, 0])
    scores = candidates_of(first.bufs).scores
    for _ in range(20):
        launch_drafter(first.cfg, first.features, first.weights, first.bufs)
        assert torch.equal(candidates_of(first.bufs).scores, scores)


def test_barrier_over_all_multiprocessors() -> None:
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    state = torch.zeros(4, dtype=torch.int32, device="cuda")
    for _ in range(3):
        assert torch.equal(count_rounds(state, programs, 500).cpu(), count_rounds_ref(programs, 500))
        assert state.tolist() == [0, 0, 0, 0]


def test_barrier_cannot_hang() -> None:
    """A program that never comes: the others give up within seconds and raise the flag."""
    state = torch.zeros(4, dtype=torch.int32, device="cuda")
    seen, out = (torch.zeros(8, dtype=torch.int32, device="cuda") for _ in range(2))
    _count_rounds_kernel[(7,)](state, seen, out, 3, NUM_CTAS=8, num_warps=8, launch_cooperative_grid=True)
    torch.cuda.synchronize()
    assert int(state[ERROR]) == 1


@dataclass
class Counts:
    steps: int = 0
    equal: int = 0
    """Trees equal to the fp32 reference's own."""
    agreeing: int = 0
    """Trees that differ at most where scores nearly tie: the replay agrees."""
    worst: list[Agreement] = field(default_factory=list)


INPUTS = (
    "new_tokens", "num_new", "prefix", "active_slots", "active_inverse", "active_count", "keys", "values",
)  # fmt: skip


class Watched:
    """A drafter that drafts with the kernel in bf16 and compares each step with the reference in fp32."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.cfg: DrafterConfig | None = None

    def __call__(self, cfg: DrafterConfig, features: torch.Tensor, head: HeadWeights, bufs: Buffers) -> None:
        if cfg != self.cfg:
            self._begin(cfg, head)
        mine, half = self.bufs, features.bfloat16()
        for name in INPUTS:
            getattr(mine, name).copy_(getattr(bufs, name))
        step = Step.of(half, mine)
        if not step.active:
            draft_ref(cfg, features, head, bufs)
            return
        launch_drafter(self.half_cfg, half, self.weights, mine)
        check_finished(mine)
        drafted, tree = candidates_of(mine), tree_of(mine)
        # The cache stays the reference's own.
        draft_ref(cfg, features, self.exact, bufs)
        for place, slot in enumerate(step.active):
            self.counts.steps += 1
            self.counts.equal += all(
                torch.equal(getattr(tree, name)[slot], getattr(bufs, name)[slot]) for name in FIELDS
            )
            one = Candidates(*(field[place : place + 1] for field in vars(drafted).values()))
            alone = replace(step, active=(slot,))
            agreement = replay(self.exact, cfg.tree, alone, one, tree, atol=log_prob_atol(self.half_cfg))
            self.counts.agreeing += agreement.agrees
            self.counts.worst.append(agreement)
        for name in FIELDS:
            getattr(bufs, name).copy_(getattr(tree, name))

    def _begin(self, cfg: DrafterConfig, head: HeadWeights) -> None:
        half = {name: tensor.bfloat16() for name, tensor in head.tensors.items()}
        rounded = replace(head, tensors=half, embedding=head.embedding.bfloat16(), lm_head=head.lm_head.bfloat16())
        self.cfg, self.half_cfg = cfg, replace(cfg, dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
        self.weights = Weights.pack(rounded, self.half_cfg)
        self.bufs = allocate_buffers(self.half_cfg, self.weights)
        self.exact = exact_head(rounded, self.half_cfg)


def test_smollm2_drafts_what_the_reference_drafts(record_property: Callable[[str, object], None]) -> None:
    """Exactly the target's text; the same trees, near-ties apart; the same accepted length."""
    from eagle_slim.runtime import SpeculativeModel

    options = {"dtype": torch.float32, "device": "cuda", "depth": 5, "top_k": 10, "total_tokens": 60}
    try:
        reference = SpeculativeModel.from_pretrained(**options)
    except EagleSlimError as error:
        pytest.skip(f"no built-in target here: {error}")
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:16]
    prompts = [reference.encode_chat(json.loads(line)["turns"][0]) for line in lines]
    by_reference = reference.generate(prompts, max_new_tokens=64)
    watched = Watched()
    counts = watched.counts
    output = SpeculativeModel.from_pretrained(**options, drafter=watched).generate(prompts, max_new_tokens=64)
    assert output.token_ids == reference.generate(prompts, max_new_tokens=64, speculative=False).token_ids
    lengths = output.stats.mean_accepted_length, by_reference.stats.mean_accepted_length
    record_property("steps_equal_agreeing", (counts.steps, counts.equal, counts.agreeing))
    record_property("largest_error", max(agreement.max_error for agreement in counts.worst))
    record_property("accepted_lengths", lengths)
    assert counts.steps > 100
    assert counts.agreeing >= 0.99 * counts.steps, str(max(counts.worst, key=lambda agreement: agreement.max_error))
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)


def test_fp8_is_what_the_name_gives() -> None:
    from eagle_slim.runtime import SpeculativeModel

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89 or later")
    try:
        model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device="cuda", draft_weights="fp8")
    except EagleSlimError as error:
        pytest.skip(f"no built-in target here: {error}")
    prompt = model.encode_chat("What is 12 times 7?")
    smaller = model.with_draft_vocab(4096).with_tree(TreeConfig(3, 8, 30))
    for each in (model, smaller):
        assert each.draft_weights == "fp8"
        drafted = each.generate(prompt, max_new_tokens=32)
        assert "; drafter triton, fp8 weights; " in drafted.stats.path
        assert drafted.stats.mean_accepted_length > 1.5
