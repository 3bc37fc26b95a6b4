"""The persistent drafter on a GPU: every type against the fp32 reference, real dimensions, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.kernels.grid_barrier import ERROR, _count_rounds_kernel
from eagle_slim.runtime.drafter.launch import allocate_buffers, check_finished, launch_drafter
from eagle_slim.runtime.drafter.packed_weights import Weights
from eagle_slim.runtime.drafter.tuning.agreement import (
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
from kernels.replaying import FIELDS, assert_agrees, assert_equal_trees, draft, run
from support.drafting import random_head as small_head
from support.drafting import with_follow, with_options

pytestmark = pytest.mark.gpu
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


def test_barrier_cannot_hang() -> None:
    """A program that never comes: the others give up within seconds and raise the flag."""
    state = torch.zeros(4, dtype=torch.int32, device="cuda")
    seen, out = (torch.zeros(8, dtype=torch.int32, device="cuda") for _ in range(2))
    _count_rounds_kernel[(7,)](state, seen, out, 3, NUM_CTAS=8, num_warps=8, launch_cooperative_grid=True)
    torch.cuda.synchronize()
    assert int(state[ERROR]) == 1


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
