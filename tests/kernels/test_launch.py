"""`launch_drafter` and `prefill_drafter` by the reference: what they take up to its limits, and refuse beyond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.launch import Weights, allocate_buffers, launch_drafter, prefill_drafter
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig
from support.drafting import random_head
from support.raising import raises, raises_with
from torch import Tensor

Facts = dict[str, object]

HEAD = random_head()
TREE = TreeConfig(depth=3, top_k=4, total_tokens=20)
CFG = DrafterConfig.of(HEAD, TREE, num_slots=3, capacity=32)
ROOM = CFG.max_positions - TREE.depth * TREE.top_k
WEIGHTS = Weights(HEAD)
FEATURES = torch.randn(3, 16, HEAD.feature_width, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def bufs() -> Buffers:
    return allocate_buffers(CFG, WEIGHTS)


def draft(bufs: Buffers, features: Tensor = FEATURES) -> tuple[Tensor, ...]:
    return launch_drafter(CFG, features, WEIGHTS, bufs, backend="reference")


def test_a_cache_that_is_full_to_the_last_row(bufs: Buffers) -> None:
    past = torch.randn(ROOM - 1, HEAD.feature_width, generator=torch.Generator().manual_seed(3))
    prefill_drafter(CFG, past, torch.arange(ROOM - 1), WEIGHTS, bufs, 0)
    bufs.set_step([0, 1], [[5], [1, 2, 3]], [ROOM - 1, 0])
    full, other = draft(bufs)[0][:2]
    wide = allocate_buffers(wider := replace(CFG, max_positions=CFG.max_positions + 64), WEIGHTS)
    prefill_drafter(wider, past, torch.arange(ROOM - 1), WEIGHTS, wide, 0)
    wide.set_step([0, 1], [[5], [1, 2, 3]], [ROOM - 1, 0])
    expected = launch_drafter(wider, FEATURES, WEIGHTS, wide, backend="reference")[0]
    assert torch.equal(full, expected[0])
    assert torch.equal(other, expected[1])


@pytest.mark.parametrize(
    ("step", "facts"),
    [(([0, 1], [[1]], [0, 0]), {"slots": 2, "lists": 1}), (([0], [[-1]], [0]), {"slot": 0, "token": -1}),
     (([0], [[2, HEAD.embedding.shape[0]]], [0]), {"slot": 0, "token": 300}),
     (([0], [[1.5]], [0]), {"expected": "integers"}), (([0], [1], [0]), {"expected": "integers"}),
     (([0], [[1]], [0.0]), {"expected": "integers"}), (([0, 1], [[1], [1] * 17], [0, 0]), {"slot": 1, "num_new": 17}),
     (([0, 1], [[1], []], [0, 0]), {"slot": 1, "num_new": 0}), (([2, 2], [[1]] * 2, [0, 0]), {"active": [2, 2]}),
     (([3], [[1]], [0]), {"active": [3], "slots": 3}), (([-1], [[1]], [0]), {"active": [-1]}),
     (([1], [[1, 2]], [ROOM - 1]), {"slot": 1, "prefix": ROOM - 1, "rows": TREE.depth * TREE.top_k})],
)  # fmt: skip
def test_steps_that_do_not_fit(bufs: Buffers, step: tuple[list[int], list[list[int]], list[int]], facts: Facts) -> None:
    before = bufs.new_tokens.clone(), bufs.prefix.clone()
    with raises_with(UsageError, *map(str, facts.values())):
        bufs.set_step(*step)
    assert torch.equal(bufs.new_tokens, before[0])
    assert torch.equal(bufs.prefix, before[1])


def test_fewer_features_than_new_tokens(bufs: Buffers) -> None:
    bufs.set_step([1], [[1, 2, 3]], [0])
    with raises(UsageError):
        draft(bufs, FEATURES[:, :2])


@pytest.mark.parametrize(
    "features",
    [FEATURES[0, 0], torch.tensor(1.0), None, FEATURES.numpy(), FEATURES[:, :0], FEATURES.to("meta"), FEATURES.half(),
     (), FEATURES[:1], FEATURES[..., :-1], FEATURES.repeat(1, 2, 1),
     FEATURES.transpose(1, 2).contiguous().transpose(1, 2), FEATURES.chunk(3, -1)[:2],
     (*FEATURES.chunk(3, -1)[:2], FEATURES[..., :64].half())],
    ids=["one row", "a number", "none", "numpy", "no tokens", "another device", "another type", "no taps", "one slot",
         "narrower", "too many tokens", "strided", "two taps", "taps of two types"],
)  # fmt: skip
def test_features_of_other_forms(bufs: Buffers, features: object) -> None:
    with raises(UsageError):
        draft(bufs, features)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tensor", "facts"),
    [("new_tokens", torch.zeros(3, 16, dtype=torch.int64), {"expected": "torch.int32 [3, 16]"}),
     ("values", torch.zeros(3, 1, 44, 16), {"expected": "torch.float32 [3, 2, 44, 16]"}),
     ("parents", torch.zeros(3, 3, dtype=torch.int64), {"expected": "torch.int64 [3, 20]"}),
     ("keys", torch.zeros(3, 2, 16, 44).transpose(2, 3), {}),
     ("keys", torch.zeros(3, 2, 44), {}),
     ("prefix", torch.zeros(3, dtype=torch.int32, device="meta"), {})],
)  # fmt: skip
def test_buffers_of_other_forms(bufs: Buffers, name: str, tensor: Tensor, facts: Facts) -> None:
    with raises_with(UsageError, *map(str, facts.values())):
        draft(replace(bufs, **{name: tensor}))


@pytest.mark.parametrize(
    ("field", "changed"),
    [("hidden", {"hidden": 64.0}), ("hidden", {"hidden": "64"}), ("num_slots", {"num_slots": True}),
     ("feature_width", {"feature_width": 0}), ("target_vocab", {"target_vocab": 0}),
     ("draft_vocab", {"draft_vocab": 301}), ("num_kv_heads", {"num_kv_heads": 0}),
     ("norm_eps", {"norm_eps": float("nan")}), ("norm_eps", {"norm_eps": -1.0}),
     ("weight_dtype", {"weight_dtype": "fp8"}), ("sliding_window", {"sliding_window": 0}),
     ("tap_norms", {"tap_norms": 5}), ("tap_norms", {"tap_norms": 1, "has_fc": False, "feature_width": 64}),
     # Without fc, features are as wide as the head.
     ("feature_width", {"has_fc": False}), ("feature_width", {"kind": "eagle"})],
    ids=str,
)  # fmt: skip
def test_configurations_out_of_range(field: str, changed: Facts) -> None:
    with raises(UsageError):
        replace(CFG, **changed)


def test_numpy_numbers_are_numbers() -> None:
    cfg = replace(CFG, hidden=np.int64(64), norm_eps=np.float32(1e-5))
    assert type(cfg.hidden) is int
    assert cfg.hidden == CFG.hidden


def test_what_set_step_wrote_is_known_until_something_else_writes(bufs: Buffers) -> None:
    bufs.set_step([0, 2], [[1], [2, 3]], [0, 0])
    assert bufs.most_new_tokens() == 2
    bufs.num_new.fill_(1)
    assert bufs.most_new_tokens() == 0


@pytest.mark.parametrize(
    ("changed", "facts"),
    [({"embedding": torch.zeros(300, 32)}, {"tensor": "embedding", "found": (300, 32)}),
     ({"lm_head": torch.zeros(120, 32)}, {"tensor": "lm_head", "found": (120, 32)}),
     ({"draft_to_target": torch.arange(119)}, {"tensor": "draft_to_target", "expected": "int64 [120]"}),
     (
         {"draft_to_target": torch.arange(120, device="meta")},
         {"tensor": "draft_to_target", "found": "torch.int64 on meta"},
     ),
     ({"tensors": {**HEAD.tensors, "norm.weight": torch.ones(64).half()}},
      {"tensor": "norm.weight", "found": "torch.float16 on cpu"})],
)  # fmt: skip
def test_heads_whose_tensors_do_not_fit(changed: dict[str, object], facts: Facts) -> None:
    with raises_with(UsageError, *map(str, facts.values())):
        replace(HEAD, **changed)


@pytest.mark.parametrize(
    ("changed", "head", "facts"),
    [({"total_tokens": 12}, {},
      {"tensor": "draft_tokens", "found": "torch.int64 [3, 20]", "expected": "torch.int64 [3, 12]"}),
     ({"depth": 2}, {}, {"tensor": "retrieve_indices"}), ({"max_positions": 500}, {}, {"tensor": "keys"}),
     ({"top_k": 5}, {}, {"field": "top_k"}),
     ({"intermediate": 64}, {}, {"field": "intermediate", "found": 96, "expected": 64}),
     ({"norm_eps": 1e-6}, {}, {"field": "norm_eps"}),
     ({"has_qkv_bias": True}, {}, {"field": "has_qkv_bias", "found": False}),
     ({"norm_output": True}, {}, {"field": "norm_output", "found": False}),
     ({"has_head_norms": True}, {}, {"field": "has_head_norms", "found": False}),
     ({"target_vocab": 299}, {}, {"field": "target_vocab"}),
     ({}, {"dtype": torch.float16}, {"field": "dtype", "found": torch.float16}),
     ({}, {"hidden": 32}, {"field": "hidden", "found": 32, "expected": 64}),
     ({}, {"kind": "eagle"}, {"field": "kind", "found": "eagle"})],
    ids=str,
)  # fmt: skip
def test_parts_of_another_configuration(bufs: Buffers, changed: Facts, head: dict[str, Any], facts: Facts) -> None:
    cfg, weights = replace(CFG, **changed), Weights(random_head(**head))
    with raises_with(UsageError, *map(str, facts.values())):
        launch_drafter(cfg, FEATURES, weights, bufs, backend="reference")
    with raises_with(UsageError, *map(str, facts.values())):
        prefill_drafter(cfg, FEATURES[0], torch.zeros(16, dtype=torch.int64), weights, bufs, 0)


@pytest.mark.parametrize(
    ("features", "tokens", "slot", "facts"),
    [(FEATURES[0], 16, 3, {"slot": 3}), (FEATURES[0], 16, -1, {"slot": -1}),
     (torch.zeros(ROOM + 1, HEAD.feature_width), ROOM + 1, 0, {"tokens": ROOM + 1}),
     (FEATURES[0], 5, 0, {"found": "(16, 192) and torch.int64 (5,)"}),
     (FEATURES[0, :, :9], 16, 0, {"found": "(16, 9) and torch.int64 (16,)"})],
)  # fmt: skip
def test_prompts_that_do_not_fit(bufs: Buffers, features: Tensor, tokens: int, slot: int, facts: Facts) -> None:
    with raises_with(UsageError, *map(str, facts.values())):
        prefill_drafter(CFG, features, torch.zeros(tokens, dtype=torch.int64), WEIGHTS, bufs, slot)


def test_prompts_with_ids_that_the_target_lacks(bufs: Buffers) -> None:
    before = bufs.keys.clone()
    for wrong in (-1, 300):
        with raises(UsageError):
            prefill_drafter(CFG, FEATURES[0, :2], torch.tensor([5, wrong]), WEIGHTS, bufs, 1)
    with raises(UsageError):
        prefill_drafter(CFG, FEATURES[0, :2], torch.tensor([5.0, 1.0]), WEIGHTS, bufs, 1)
    assert torch.equal(bufs.keys, before)


def test_a_prompt_of_separate_taps(bufs: Buffers) -> None:
    tokens = torch.arange(16)
    prefill_drafter(CFG, FEATURES[0], tokens, WEIGHTS, bufs, 0)
    prefill_drafter(CFG, FEATURES[0].chunk(3, -1), tokens, WEIGHTS, bufs, 1)
    assert bufs.keys[0, :, :16].any()
    assert torch.equal(bufs.keys[0], bufs.keys[1])
