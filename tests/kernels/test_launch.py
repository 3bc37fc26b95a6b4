"""`launch_drafter` and `prefill_drafter` by the reference: what they take up to its limits, and refuse beyond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.config import DrafterConfig
from eagle_slim.runtime.drafter.reference import NewPairs, ReferenceDrafter
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.kernels.launch import Weights, allocate_buffers, launch_drafter, prefill_drafter
from eagle_slim.runtime.slots import ActiveSlots
from support.drafting import random_head
from torch import Tensor

HEAD = random_head()
TREE = TreeConfig(depth=3, top_k=4, total_tokens=20)
CFG = DrafterConfig.of(HEAD, TREE, num_slots=3, capacity=32)
WEIGHTS = Weights(HEAD)
FEATURES = torch.randn(3, 16, HEAD.feature_width, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def bufs() -> Buffers:
    return allocate_buffers(CFG, WEIGHTS)


def draft(bufs: Buffers, features: Tensor = FEATURES) -> tuple[Tensor, ...]:
    return launch_drafter(CFG, features, WEIGHTS, bufs, backend="reference")


def alone(new_tokens: list[int], features: Tensor) -> Tensor:
    """The tree of one sequence without a prefix, by a drafter with a cache of its own."""
    drafter = ReferenceDrafter(HEAD, TREE)
    drafter.allocate(1, 40)
    new = len(new_tokens)
    pairs = NewPairs(features[None, :new], torch.tensor([new_tokens]), torch.tensor([new]), (new,))
    return drafter.draft(ActiveSlots.of([0], 1), pairs).draft_tokens[0]


def test_slots_of_any_number_of_new_tokens_in_any_order(bufs: Buffers) -> None:
    new = {2: list(range(40, 56)), 0: [7]}
    bufs.set_step(list(new), list(new.values()), [0, 0])
    tokens = draft(bufs)[0]
    for slot, given in new.items():
        assert torch.equal(tokens[slot], alone(given, FEATURES[slot]))
    assert tokens[1].eq(-1).all()


def test_a_cache_that_is_full_to_the_last_row(bufs: Buffers) -> None:
    room = CFG.max_positions - TREE.depth * TREE.top_k
    past = torch.randn(room - 1, HEAD.feature_width, generator=torch.Generator().manual_seed(3))
    prefill_drafter(CFG, past, torch.arange(room - 1), WEIGHTS, bufs, 0)
    bufs.set_step([0, 1], [[5], [1, 2, 3]], [room - 1, 0])
    full, other = draft(bufs)[0][:2]
    wide = allocate_buffers(wider := replace(CFG, max_positions=CFG.max_positions + 64), WEIGHTS)
    prefill_drafter(wider, past, torch.arange(room - 1), WEIGHTS, wide, 0)
    wide.set_step([0, 1], [[5], [1, 2, 3]], [room - 1, 0])
    expected = launch_drafter(wider, FEATURES, WEIGHTS, wide, backend="reference")[0]
    assert torch.equal(full, expected[0])
    assert torch.equal(other, expected[1])


def test_no_active_slot(bufs: Buffers) -> None:
    bufs.set_step([], [], [])
    draft_tokens, retrieve_indices, tree_mask, tree_position_ids = draft(bufs)
    assert draft_tokens.eq(-1).all()
    assert retrieve_indices.eq(-1).all()
    assert not tree_mask.any()
    assert tree_position_ids.eq(0).all()
    assert bufs.num_leaves.eq(0).all()


@pytest.mark.parametrize(
    ("step", "message"),
    [(([0, 1], [[1]], [0, 0]), "2 slots, 1 lists of tokens"), (([0], [[-1]], [0]), "token id -1"),
     (([0], [[2, HEAD.embedding.shape[0]]], [0]), "token id 300; the target has 0 to 299"),
     (([0], [[1.5]], [0]), "are integers"), (([0], [1], [0]), "a list for each slot"),
     (([0], [[1]], [0.0]), "are integers")],
)  # fmt: skip
def test_steps_that_are_none(bufs: Buffers, step: tuple[list[int], list[list[int]], list[int]], message: str) -> None:
    before = bufs.new_tokens.clone()
    with pytest.raises(UsageError, match=message):
        bufs.set_step(*step)
    assert torch.equal(bufs.new_tokens, before)


def test_fewer_features_than_new_tokens(bufs: Buffers) -> None:
    bufs.set_step([1], [[1, 2, 3]], [0])
    with pytest.raises(UsageError, match="Slot 1 has 3 new tokens, but features of 2"):
        draft(bufs, FEATURES[:, :2])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_new", 17, "Slot 0 has 17 new tokens, but features of 16"), ("num_new", 0, "1 to 16 new tokens, got 0"),
     ("prefix", 40, "Slot 0: 40 cached pairs, 1 new and 12 tree rows exceed"), ("prefix", -1, "-1 cached pairs"),
     ("new_tokens", 300, "token id 300"), ("active_slots", 7, "must be different and below 3"),
     ("active_slots", -1, "must be different and below 3"), ("active_count", 4, "The 4 active slots")],
)  # fmt: skip
def test_steps_written_into_the_buffers(bufs: Buffers, field: str, value: int, message: str) -> None:
    getattr(bufs, field)[0] = value
    with pytest.raises(UsageError, match=message):
        draft(bufs)
    assert bufs.draft_tokens.eq(-2).all()


@pytest.mark.parametrize(
    "features",
    [FEATURES[0, 0], torch.tensor(1.0), None, FEATURES.numpy(), FEATURES[:, :0], FEATURES.to("meta"), FEATURES.half(),
     ()],
    ids=["one row", "a number", "none", "numpy", "no tokens", "another device", "another type", "no taps"],
)  # fmt: skip
def test_features_of_other_forms(bufs: Buffers, features: object) -> None:
    with pytest.raises(UsageError, match="Features"):
        draft(bufs, features)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [("new_tokens", torch.zeros(3, 16, dtype=torch.int64), r"new_tokens must be torch.int32 \(3, 16\)"),
     ("values", torch.zeros(3, 1, 44, 16), r"values must be .* \(3, 2, 44, 16\)"),
     ("parents", torch.zeros(3, 3, dtype=torch.int64), r"parents must be torch.int64 \(3, 20\)"),
     ("keys", torch.zeros(3, 2, 16, 44).transpose(2, 3), "keys must be contiguous"),
     ("keys", torch.zeros(3, 2, 44), r"keys \[slots, kv_heads, positions, head_dim\]"),
     ("prefix", torch.zeros(3, dtype=torch.int32, device="meta"), "contiguous on cpu")],
)  # fmt: skip
def test_buffers_that_are_none(bufs: Buffers, name: str, tensor: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(bufs, **{name: tensor})


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden", 64.0), ("hidden", "64"), ("num_slots", True), ("feature_width", 0), ("target_vocab", 0),
     ("draft_vocab", 301), ("norm_eps", float("nan")), ("norm_eps", -1.0), ("weight_dtype", "fp8"), ("has_fc", False)],
)  # fmt: skip
def test_configurations_that_are_none(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        replace(CFG, **{field: value})


def test_numpy_numbers_are_numbers() -> None:
    cfg = replace(CFG, hidden=np.int64(64), norm_eps=np.float32(1e-5))
    assert type(cfg.hidden) is int
    assert cfg.hidden == CFG.hidden


def test_what_set_step_wrote_is_known_until_something_else_writes(bufs: Buffers) -> None:
    bufs.set_step([0, 2], [[1], [2, 3]], [0, 0])
    assert bufs.most_new_tokens() == 2
    bufs.num_new.fill_(1)
    assert bufs.most_new_tokens() is None


def test_an_eagle_1_configuration_has_features_as_wide_as_the_head() -> None:
    eagle = replace(CFG, kind="eagle", feature_width=64)
    with pytest.raises(UsageError, match="feature_width = 192, hidden = 64"):
        replace(CFG, kind="eagle")
    with pytest.raises(UsageError, match="fc at every level"):
        replace(eagle, has_fc=False)


def tensors_without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in HEAD.tensors.items() if key != name}


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"embedding": torch.zeros(300, 32)}, r"embedding must be \[target_vocab, 64\]; got \(300, 32\)"),
     ({"lm_head": torch.zeros(120, 32)}, r"lm_head must be \[draft_vocab, 64\]"),
     ({"draft_to_target": torch.arange(119)}, r"draft_to_target must be int64 \[120\]"),
     ({"draft_to_target": torch.arange(120, device="meta")}, "draft_to_target is on meta, lm_head on cpu"),
     ({"tensors": tensors_without("norm.weight")}, "norm.weight is missing among the tensors of this eagle3 head"),
     ({"tensors": {**HEAD.tensors, "norm.weight": torch.ones(64).half()}}, "norm.weight is torch.float16 on cpu"),
     ({"tensors": {**HEAD.tensors, "fc.weight": torch.ones(64, 128)}}, r"fc.weight must be \(64, 192\)"),
     ({"num_kv_heads": 4}, r"self_attn.k_proj.weight must be \(64, 128\) .* got \(32, 128\)")],
)  # fmt: skip
def test_heads_whose_tensors_do_not_fit(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(HEAD, **changed)


OTHERS: dict[str, tuple[Callable[[], tuple[DrafterConfig, Weights]], str]] = {
    "tree": (lambda: (replace(CFG, total_tokens=12), WEIGHTS), "draft_tokens .3, 20., the configuration needs .3, 12"),
    "depth": (lambda: (replace(CFG, depth=2), WEIGHTS), "retrieve_indices"),
    "positions": (lambda: (replace(CFG, max_positions=500), WEIGHTS), "keys"),
    "top_k": (lambda: (replace(CFG, top_k=5), WEIGHTS), "depth \\* top_k = 15"),
    "intermediate": (lambda: (replace(CFG, intermediate=64), WEIGHTS), "intermediate = 96, the configuration 64"),
    "epsilon": (lambda: (replace(CFG, norm_eps=1e-6), WEIGHTS), "norm_eps"),
    "biases": (lambda: (replace(CFG, has_qkv_bias=True), WEIGHTS), "has_qkv_bias = False"),
    "target": (lambda: (replace(CFG, target_vocab=299), WEIGHTS), "target_vocab"),
    "type": (lambda: (CFG, Weights(random_head(dtype=torch.float16))), "dtype = torch.float16"),
    "no weights": (lambda: (CFG, HEAD), "takes a DrafterConfig, Weights and Buffers; got HeadWeights"),  # type: ignore
    "head": (lambda: (CFG, Weights(random_head(hidden=32))), "hidden = 32, the configuration 64"),
    "kind": (lambda: (CFG, Weights(random_head(kind="eagle"))), "kind = eagle"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_parts_of_another_configuration(bufs: Buffers, other: str) -> None:
    build, message = OTHERS[other]
    cfg, weights = build()
    with pytest.raises(UsageError, match=message):
        launch_drafter(cfg, FEATURES, weights, bufs, backend="reference")
    with pytest.raises(UsageError, match=message):
        prefill_drafter(cfg, FEATURES[0], torch.zeros(16, dtype=torch.int64), weights, bufs, 0)


@pytest.mark.parametrize(
    ("features", "tokens", "slot", "message"),
    [(FEATURES[0], 16, 3, "Slot 3 is not among the 3"), (FEATURES[0], 16, -1, "Slot -1"),
     (FEATURES[0], 5, 0, r"got \(16, 192\) and \(5,\)"), (FEATURES[0, :, :9], 16, 0, r"\[seq, 192\]")],
)  # fmt: skip
def test_prompts_that_do_not_fit(bufs: Buffers, features: Tensor, tokens: int, slot: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prefill_drafter(CFG, features, torch.zeros(tokens, dtype=torch.int64), WEIGHTS, bufs, slot)


def test_prompts_with_ids_that_the_target_lacks(bufs: Buffers) -> None:
    before = bufs.keys.clone()
    for wrong in (-1, 300):
        with pytest.raises(UsageError, match=f"Slot 1: token id {wrong}; the target has 0 to 299"):
            prefill_drafter(CFG, FEATURES[0, :2], torch.tensor([5, wrong]), WEIGHTS, bufs, 1)
    with pytest.raises(UsageError, match="an int64 tensor"):
        prefill_drafter(CFG, FEATURES[0, :2], torch.tensor([5.0, 1.0]), WEIGHTS, bufs, 1)
    assert torch.equal(bufs.keys, before)


def test_a_prompt_of_separate_taps(bufs: Buffers) -> None:
    for wrong in ([], [FEATURES[0]], FEATURES[0].numpy()):
        with pytest.raises(UsageError, match="one tensor, or a tuple of three"):
            prefill_drafter(CFG, wrong, torch.arange(16), WEIGHTS, bufs, 0)  # type: ignore[arg-type]
    tokens = torch.arange(16)
    prefill_drafter(CFG, FEATURES[0], tokens, WEIGHTS, bufs, 0)
    prefill_drafter(CFG, FEATURES[0].chunk(3, -1), tokens, WEIGHTS, bufs, 1)
    assert bufs.keys[0, :, :16].any()
    assert torch.equal(bufs.keys[0], bufs.keys[1])


def test_the_public_names() -> None:
    import eagle_slim.runtime as runtime

    assert runtime.launch_drafter is launch_drafter
    assert runtime.Buffers is Buffers
    assert all(hasattr(runtime, name) for name in runtime.__all__)


def test_slots_that_are_none() -> None:
    for wrong in ([0, 0], [3], [-1]):
        with pytest.raises(UsageError, match="must be different and below 3"):
            ActiveSlots.of(wrong, 3)


def test_a_head_without_key_heads() -> None:
    with pytest.raises(UsageError, match="num_kv_heads from 1 to 4; got 0"):
        replace(CFG, num_kv_heads=0)
