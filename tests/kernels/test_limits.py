"""What the persistent drafter refuses, and what it says then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.config import DrafterConfig
from eagle_slim.runtime.errors import DrafterError, UnsupportedModelError, UsageError
from eagle_slim.runtime.kernels.launch import (
    TritonDrafter,
    Weights,
    allocate_buffers,
    check_finished,
    launch_drafter,
    prefill_drafter,
)
from eagle_slim.runtime.kernels.launch_params import KNOWN_CHIPS, choose_launch
from eagle_slim.runtime.kernels.packed_head import pack_head
from support.drafting import problem, random_head

TREE = TreeConfig(2, 3, 12)


@pytest.fixture(scope="module")
def step(device: str) -> tuple[DrafterConfig, torch.Tensor, Weights, Buffers]:
    return problem(random_head(device=device), TREE, [5, 3], [2, 1])


Problem = tuple[DrafterConfig, torch.Tensor, Weights, Buffers]


def test_new_tokens(step: Problem) -> None:
    bufs = step[3]
    before = bufs.new_tokens.clone(), bufs.prefix.clone()
    for tokens, said in (([1] * 17, "got 17"), ([], "got 0")):
        with pytest.raises(UsageError, match=f"1 to 16 new tokens, {said}"):
            bufs.set_step([0, 1], [[1], tokens], [0, 0])
    for active in ([0, 0], [2], [-1]):
        with pytest.raises(UsageError, match="must be different and below 2"):
            bufs.set_step(active, [[1]] * len(active), [0] * len(active))
    assert torch.equal(bufs.new_tokens, before[0])
    assert torch.equal(bufs.prefix, before[1])


def test_a_full_cache(step: Problem) -> None:
    cfg, _, weights, bufs = step
    room = cfg.max_positions - TREE.depth * TREE.top_k
    bufs.set_step([0], [[1, 2]], [room - 2])
    with pytest.raises(UsageError, match=f"Slot 1: {room - 1} cached pairs, 2 new and 6 tree rows exceed"):
        bufs.set_step([1], [[1, 2]], [room - 1])
    features = torch.zeros(room + 1, cfg.feature_width, device=bufs.keys.device)
    tokens = torch.zeros(room + 1, dtype=torch.int64, device=bufs.keys.device)
    with pytest.raises(UsageError, match=r"exceed the drafter's KV cache"):
        prefill_drafter(cfg, features, tokens, weights, bufs, 0)
    drafter = TritonDrafter(weights.head, TREE)
    with pytest.raises(UsageError, match="allocate"):
        drafter.prefill(0, features, tokens)
    drafter.allocate(1, 4)
    with pytest.raises(UsageError, match="exceed"):
        drafter.prefill(0, features[:40], tokens[:40])


def test_features(step: Problem) -> None:
    cfg, features, weights, bufs = step
    wrong = {
        "Features must be": [
            features[:1], features[..., :-1], features[0], features.repeat(1, 2, 1), features.double(),
            features.transpose(1, 2).contiguous().transpose(1, 2),
        ],
        "one tensor, or three": [features.chunk(3, -1)[:2], (*features.chunk(3, -1)[:2], features[..., :64].half())],
    }  # fmt: skip
    for said, cases in wrong.items():
        for case in cases:
            with pytest.raises(UsageError, match=said):
                launch_drafter(cfg, case, weights, bufs)


def test_backends_and_parts(step: Problem, device: str) -> None:
    cfg, features, weights, bufs = step
    with pytest.raises(UsageError, match="'cuda' is unknown; expected triton or reference"):
        launch_drafter(cfg, features, weights, bufs, backend="cuda")
    with pytest.raises(DrafterError, match="packed weights"):
        launch_drafter(cfg, features, Weights(weights.head), bufs)
    with pytest.raises(DrafterError, match="workspace"):
        launch_drafter(cfg, features, weights, Buffers.allocate(cfg, device))
    with pytest.raises(UsageError, match="the head has 120 rows"):
        launch_drafter(replace(cfg, draft_vocab=121), features, weights, bufs)
    plain = allocate_buffers(cfg, Weights(weights.head))
    assert plain.workspace == {}
    check_finished(plain)


def test_more_programs_than_can_be_resident(step: Problem) -> None:
    cfg, features, weights, bufs = step
    assert weights.packed is not None
    packed = replace(weights.packed, params=replace(weights.packed.params, num_programs=1000))
    many = Weights(weights.head, packed)
    with pytest.raises(UsageError, match=r"workspace has .* partial, these weights need .* \(1000, 32\)"):
        launch_drafter(cfg, features, many, bufs)
    with pytest.raises(DrafterError, match="1000 programs cannot be resident"):
        launch_drafter(cfg, features, many, allocate_buffers(cfg, many))


def test_weights_packed_for_another_configuration(step: Problem) -> None:
    cfg, features, weights, _ = step
    fp8 = replace(cfg, weight_dtype=torch.float8_e4m3fn)
    with pytest.raises(UsageError, match=r"packed in torch.float32, the configuration has weight_dtype = torch.float8"):
        launch_drafter(fp8, features, weights, allocate_buffers(fp8, weights))
    with pytest.raises(UsageError, match="hidden = 32, the configuration 64"):
        Weights.pack(random_head(hidden=32), cfg)
    with pytest.raises(UsageError, match="120 LM-head rows are packed, the head has 90"):
        Weights(random_head(draft_vocab=90), weights.packed)
    with pytest.raises(UsageError, match="ids of the target, 0 to 299"):
        Weights.pack(replace(weights.head, draft_to_target=weights.head.draft_to_target + 200), cfg)


def test_a_workspace_larger_than_needed(device: str) -> None:
    """As `bench.stages` makes the barrier's, for time stamps."""
    cfg, features, weights, bufs = problem(random_head(device=device), TreeConfig(1, 2, 5), [3], [1])
    plain = launch_drafter(cfg, features, weights, bufs)[0].clone()
    bufs.workspace["barrier"] = torch.zeros(100, dtype=torch.int32, device=device)
    larger = replace(bufs)
    assert torch.equal(launch_drafter(cfg, features, weights, larger)[0], plain)
    larger.workspace["hidden"] = larger.workspace["hidden"].half()
    with pytest.raises(UsageError, match=r"workspace has torch\.float16"):
        launch_drafter(cfg, features, weights, replace(larger))


@pytest.mark.parametrize("order", [torch.arange(5), torch.zeros(120, dtype=torch.int64), torch.arange(120.0), [1, 2]])
def test_orders_that_are_none(step: Problem, order: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="order must be"):
        Weights.pack(step[2].head, step[0], order)


def test_no_gpu_and_no_interpreter(step: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own words, without a GPU and with tensors elsewhere; a fault of the kernel stays what it is."""
    cfg, features, weights, bufs = step
    if bufs.keys.is_cuda:
        pytest.skip("there is a GPU")

    from eagle_slim.runtime.kernels import host

    bufs.set_step([0], [[1]], [0])
    for error, raised in (
        (RuntimeError("0 active drivers ([]). There should only be one."), DrafterError),
        (ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"), DrafterError),
        (RuntimeError("device-side assert"), RuntimeError),
    ):
        monkeypatch.setattr(host, "launch", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(raised, match="needs an NVIDIA GPU" if raised is DrafterError else "assert"):
            launch_drafter(cfg, features, weights, bufs)


def test_more_new_tokens_than_features(device: str) -> None:
    _, features, weights, bufs = problem(random_head(device=device), TREE, [5], [2])
    cfg = DrafterConfig.of(weights.head, TREE, 1, 21)
    bufs.set_step([0], [[1, 2, 3]], [5])
    with pytest.raises(UsageError, match="3 new tokens, but features of 2"):
        launch_drafter(cfg, features[:, :2], weights, bufs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 8208), ("head_dim", 258), ("draft_vocab", 2), ("draft_vocab", 262_145), ("depth", 0), ("depth", 11),
        ("total_tokens", 129), ("num_slots", 0), ("num_slots", 17), ("max_positions", 131_072 + 257),
        ("hidden", 72), ("intermediate", 40), ("num_heads", 3), ("head_dim", 15), ("kind", "medusa"),
        ("dtype", torch.float64), ("weight_dtype", torch.int8),
    ],
)  # fmt: skip
def test_dimensions(step: Problem, field: str, value: object) -> None:
    with pytest.raises(UsageError, match="computes in bfloat16 or float16" if field == "dtype" else field):
        replace(step[0], **{field: value})


def test_top_k_limits(step: Problem) -> None:
    with pytest.raises(UsageError, match="top_k from 1 to 16; got 17"):
        replace(step[0], top_k=17, draft_vocab=120)
    with pytest.raises(UsageError, match="top_k"):
        replace(step[0], top_k=0)


def test_options_of_a_head_that_the_kernel_lacks() -> None:
    head = random_head()
    for changed, said in (
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"),
        ({"activation": "gelu"}, "gelu"),
        ({"tensors": {**head.tensors, "input_norm.weight": torch.ones(192)}}, "input_norm"),
    ):
        with pytest.raises(UnsupportedModelError, match=said):
            TritonDrafter(replace(head, **changed), TREE)


def test_fp8_before_sm_89(step: Problem) -> None:
    cfg = replace(step[0], weight_dtype=torch.float8_e4m3fn)
    with pytest.raises(DrafterError, match=r"FP8 weights need sm_89 or later; this is sm_80"):
        choose_launch(cfg, KNOWN_CHIPS[80])
    assert choose_launch(cfg, KNOWN_CHIPS[89]).num_programs == 128


def test_fp8_multiplies_32_numbers_at_a_time(step: Problem) -> None:
    fp8 = replace(step[0], weight_dtype=torch.float8_e4m3fn)
    assert (fp8.hidden, fp8.intermediate, fp8.num_heads) == (64, 96, 4)
    for changed, said in (
        ({"hidden": 80, "feature_width": 240}, "with FP8 weights needs hidden to be a multiple of 32; got 80"),
        ({"intermediate": 112}, "needs intermediate to be a multiple of 32; got 112"),
        ({"num_heads": 5, "num_kv_heads": 1}, "product a multiple of 32 with FP8 weights"),
    ):
        replace(step[0], **changed)
        with pytest.raises(UsageError, match=said):
            replace(fp8, **changed)


def test_triton_by_name_needs_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from eagle_slim.runtime.loading import build_drafter

    with pytest.raises(DrafterError, match="needs an NVIDIA GPU"):
        build_drafter("triton", random_head(), TREE)


def test_packing_keeps_every_row(step: Problem) -> None:
    """Each LM-head row's id is in the packed table once."""
    cfg, _, weights, _ = step
    packed = pack_head(weights.head, cfg, choose_launch(cfg, KNOWN_CHIPS[90]))
    ids = packed.row_ids.flatten().tolist()
    for target_id in weights.head.draft_to_target.tolist():
        assert ids.count(target_id) == 1 or target_id == 0
