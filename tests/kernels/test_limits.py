"""What the persistent drafter refuses, and what it says then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.dimensions import DrafterConfig, check_kernel_limits
from eagle_slim.runtime.drafter.drafter import Drafter
from eagle_slim.runtime.drafter.launch import (
    Weights,
    allocate_buffers,
    check_finished,
    launch_drafter,
)
from eagle_slim.runtime.drafter.launch_params import choose_launch
from eagle_slim.runtime.drafter.tuned_cache import FixedLaunch
from eagle_slim.runtime.errors import DrafterError, UnsupportedModelError, UsageError
from eagle_slim.runtime.settings import TreeConfig
from kernels.chips import KNOWN_CHIPS
from support.drafting import problem, random_head, with_options
from support.raising import raises, raises_with

TREE = TreeConfig(2, 3, 12)


@pytest.fixture(scope="module")
def step(device: str) -> tuple[DrafterConfig, torch.Tensor, Weights, Buffers]:
    return problem(random_head(device=device), TREE, [5, 3], [2, 1])


Problem = tuple[DrafterConfig, torch.Tensor, Weights, Buffers]


def test_three_taps_of_a_head_that_norms_two(step: Problem) -> None:
    cfg, features, weights, bufs = problem(with_options(step[2].head, tap_norms=2), TREE, [5], [1])
    with raises(UsageError):
        launch_drafter(cfg, features.chunk(3, -1), weights, bufs)


def test_backends_and_parts(step: Problem, device: str) -> None:
    cfg, features, weights, bufs = step
    with raises(UsageError, option="backend") as unknown:
        launch_drafter(cfg, features, weights, bufs, backend="cuda")
    assert str(unknown.value) == "backend = 'cuda' is unknown; expected one of 'triton', 'reference'."
    with raises(DrafterError):
        launch_drafter(cfg, features, Weights(weights.head), bufs)
    with raises(DrafterError):
        launch_drafter(cfg, features, weights, Buffers.allocate(cfg, weights.head))
    with raises(UsageError):
        launch_drafter(replace(cfg, draft_vocab=121), features, weights, bufs)
    plain = allocate_buffers(cfg, Weights(weights.head))
    assert plain.workspace == {}
    check_finished(plain)


def test_more_programs_than_can_be_resident(step: Problem) -> None:
    cfg, features, weights, bufs = step
    assert weights.packed is not None
    params = weights.packed.launches.get(cfg)
    params = replace(params, layout=replace(params.layout, num_programs=1000))
    packed = replace(weights.packed, launches=FixedLaunch(params))
    many = Weights(weights.head, packed)
    with raises_with(DrafterError, "workspace"):
        launch_drafter(cfg, features, many, bufs)
    with raises_with(DrafterError, "1000 programs"):
        launch_drafter(cfg, features, many, allocate_buffers(cfg, many))


def test_weights_packed_for_another_configuration(step: Problem) -> None:
    cfg, features, weights, _ = step
    fp8 = replace(cfg, weight_dtype=torch.float8_e4m3fn)
    with raises(UsageError):
        launch_drafter(fp8, features, weights, allocate_buffers(fp8, weights))
    with raises(UsageError):
        Weights.pack(random_head(hidden=32), cfg)
    with raises(UsageError):
        Weights(random_head(draft_vocab=90), weights.packed)
    with raises(UsageError):
        Weights.pack(replace(weights.head, draft_to_target=weights.head.draft_to_target + 200), cfg)


@pytest.mark.parametrize("order", [torch.arange(5), torch.zeros(120, dtype=torch.int64), torch.arange(120.0)])
def test_orders_of_other_rows(step: Problem, order: torch.Tensor) -> None:
    with raises(UsageError):
        Weights.pack(step[2].head, step[0], order)


def test_no_gpu_and_no_interpreter(step: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, features, weights, bufs = step
    if bufs.keys.is_cuda:
        pytest.skip("there is a GPU")
    monkeypatch.setattr("eagle_slim.runtime.drafter.launch.is_interpreted", lambda: False)
    with raises_with(DrafterError, "NVIDIA GPU"):
        launch_drafter(cfg, features, weights, bufs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 16_400), ("head_dim", 258), ("draft_vocab", 2), ("draft_vocab", 262_145), ("depth", 11),
        ("num_slots", 0), ("num_slots", 17), ("max_positions", 131_072 + 257),
        ("hidden", 72), ("intermediate", 40), ("num_heads", 3), ("head_dim", 15), ("kind", "medusa"),
        ("dtype", torch.float64), ("weight_dtype", torch.int8), ("top_k", 17), ("total_tokens", 129),
    ],
)  # fmt: skip
def test_dimensions(step: Problem, field: str, value: object) -> None:
    with raises(UsageError):
        others = {"dtype": {"weight_dtype": value}, "total_tokens": {"top_k": 10}}.get(field, {})
        check_kernel_limits(replace(step[0], **{"max_positions": 200, **others, field: value}))


def test_options_of_a_head_that_the_kernel_lacks() -> None:
    head = random_head()
    for activation in ("relu", "quick_gelu"):
        with raises(UnsupportedModelError, option="activation"):
            Drafter(replace(head, activation=activation), TREE, "triton")


def test_fp8_before_sm_89(step: Problem) -> None:
    cfg = replace(step[0], weight_dtype=torch.float8_e4m3fn)
    with raises(DrafterError) as refused:
        choose_launch(cfg, KNOWN_CHIPS[80])
    assert "FP8 weights need sm_89 or later; this is sm_80." in str(refused.value)
    assert choose_launch(cfg, KNOWN_CHIPS[89]).num_programs == 128


def test_fp8_multiplies_32_numbers_at_a_time(step: Problem) -> None:
    fp8 = replace(step[0], weight_dtype=torch.float8_e4m3fn)
    assert (fp8.hidden, fp8.intermediate, fp8.num_heads) == (64, 96, 4)
    for changed, field, found in (
        ({"hidden": 80, "feature_width": 240}, "hidden", 80),
        ({"intermediate": 112}, "intermediate", 112),
        ({"num_heads": 5, "num_kv_heads": 1}, "num_heads * head_dim", 80),
    ):
        check_kernel_limits(replace(step[0], **changed))
        with raises_with(UsageError, field, str(found)):
            check_kernel_limits(replace(fp8, **changed))
