"""`launch_drafter` and `prefill_drafter` by the reference: what they take up to its limits, and refuse beyond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.drafter import NewPairs, ReferenceDrafter
from eagle_slim.runtime.drafter_config import Buffers, DrafterConfig
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.launch import Weights, allocate_buffers, launch_drafter, prefill_drafter
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
     (([0], [[2, HEAD.embedding.shape[0]]], [0]), "token id 300; the target has 0 to 299")],
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


OTHERS: dict[str, tuple[Callable[[], tuple[DrafterConfig, Weights]], str]] = {
    "tree": (lambda: (replace(CFG, total_tokens=12), WEIGHTS), "draft_tokens .3, 20., the configuration needs .3, 12"),
    "depth": (lambda: (replace(CFG, depth=2), WEIGHTS), "retrieve_indices"),
    "positions": (lambda: (replace(CFG, max_positions=500), WEIGHTS), "keys"),
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


def test_a_head_without_key_heads() -> None:
    with pytest.raises(UsageError, match="num_kv_heads from 1 to 4; got 0"):
        replace(CFG, num_kv_heads=0)
