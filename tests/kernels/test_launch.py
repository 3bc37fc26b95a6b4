"""`launch_drafter` and `prefill_drafter`: a full cache, and inputs that they refuse."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from eagle_slim.runtime import Buffers, TreeConfig, Weights, allocate_buffers, launch_drafter, prefill_drafter
from eagle_slim.runtime.drafter.dimensions import DrafterConfig, check_kernel_limits
from eagle_slim.runtime.drafter.launch_params import choose_launch
from eagle_slim.runtime.drafter.tuned_cache import always
from eagle_slim.runtime.errors import DrafterError, UsageError
from kernels.chips import KNOWN_CHIPS
from support.drafting import problem, random_head, with_options
from support.raising import raises, raises_with
from torch import Tensor

HEAD = random_head()
TREE = TreeConfig(depth=3, top_k=4, total_tokens=20)
CFG = DrafterConfig.of(HEAD, TREE, num_slots=3, capacity=32)
ROOM = CFG.max_positions - TREE.depth * TREE.top_k
WEIGHTS = Weights(HEAD)
FEATURES = torch.randn(3, 16, HEAD.feature_width, generator=torch.Generator().manual_seed(2))
Problem = tuple[DrafterConfig, Tensor, Weights, Buffers]


@pytest.fixture
def bufs():
    return allocate_buffers(CFG, WEIGHTS)


@pytest.fixture(scope="module")
def step(device):
    return problem(random_head(device=device), TreeConfig(2, 3, 12), [5, 3], [2, 1])


def draft(bufs, features=FEATURES):
    return launch_drafter(CFG, features, WEIGHTS, bufs, backend="reference")


def test_a_cache_that_is_full_to_the_last_row(bufs):
    past = torch.randn(ROOM - 1, HEAD.feature_width, generator=torch.Generator().manual_seed(3))
    prefill_drafter(CFG, past, torch.arange(ROOM - 1), WEIGHTS, bufs, 0)
    bufs.set_step([0, 1], [[5], [1, 2, 3]], [ROOM - 1, 0])
    found = draft(bufs)[0]
    wide = allocate_buffers(wider := replace(CFG, max_positions=CFG.max_positions + 64), WEIGHTS)
    prefill_drafter(wider, past, torch.arange(ROOM - 1), WEIGHTS, wide, 0)
    wide.set_step([0, 1], [[5], [1, 2, 3]], [ROOM - 1, 0])
    expected = launch_drafter(wider, FEATURES, WEIGHTS, wide, backend="reference")[0]
    assert torch.equal(found[:2], expected[:2])


def test_steps_that_do_not_fit(bufs):
    for active, tokens, prefix, words in (
        ([0, 1], [[1]], [0, 0], "2 slots, 1"),
        ([0], [[-1]], [0], "token id -1"),
        ([0], [[2, HEAD.embedding.shape[0]]], [0], "token id 300"),
        ([0], [[1.5]], [0], "integers"),
        ([0], [1], [0], "integers"),
        ([0, 1], [[1], [1] * 17], [0, 0], "got 17"),
        ([0], [[]], [0], "got 0"),
        ([2, 2], [[1]] * 2, [0, 0], "[2, 2]"),
        ([3], [[1]], [0], "below 3"),
        ([-1], [[1]], [0], "[-1]"),
        ([1], [[1, 2]], [ROOM - 1], "KV cache"),
    ):
        before = bufs.new_tokens.clone(), bufs.prefix.clone()
        with raises_with(UsageError, words):
            bufs.set_step(active, tokens, prefix)
        assert torch.equal(bufs.new_tokens, before[0])
        assert torch.equal(bufs.prefix, before[1])


def test_features_of_other_forms(bufs):
    bufs.set_step([1], [[1, 2, 3]], [0])
    taps = FEATURES.chunk(3, -1)
    others = [FEATURES[0, 0], None, FEATURES[:, :0], FEATURES.to("meta"), FEATURES.half(), (), FEATURES[:1]]
    others += [FEATURES[..., :-1], FEATURES.repeat(1, 65, 1), FEATURES.transpose(1, 2).contiguous().transpose(1, 2)]
    # The last are fewer than the new tokens.
    others += [taps[:2], (*taps[:2], taps[2].half()), FEATURES[:, :2]]
    for features in others:
        with raises(UsageError):
            draft(bufs, features)
    # Three taps of a head that norms two.
    cfg, joined, weights, bufs = problem(with_options(HEAD, tap_norms=2), TREE, [5], [1])
    with raises(UsageError):
        launch_drafter(cfg, joined.chunk(3, -1), weights, bufs)


def test_parts_of_another_kind(bufs):
    parts = {"cfg": CFG, "X": FEATURES, "weights": Weights(HEAD), "bufs": bufs}
    for name, other in (("cfg", HEAD), ("weights", HEAD), ("bufs", None)):
        with raises_with(UsageError, name):
            launch_drafter(**{**parts, name: other})


def test_buffers_of_other_forms(bufs):
    for name, tensor in (
        ("new_tokens", torch.zeros(3, 16, dtype=torch.int64)),
        ("values", torch.zeros(3, 1, 44, 16)),
        ("keys", torch.zeros(3, 2, 16, 44).transpose(2, 3)),
        ("prefix", torch.zeros(3, dtype=torch.int32, device="meta")),
    ):
        with raises_with(UsageError, name):
            draft(replace(bufs, **{name: tensor}))


def test_configurations_out_of_range():
    none = dict.fromkeys(("feature_width", "target_vocab", "num_kv_heads", "sliding_window"), 0)
    no_type = {"hidden": "64", "num_slots": True, "weight_dtype": "fp8", "norm_eps": math.nan}
    beyond = {"hidden": 64.0, "draft_vocab": 301, "norm_eps": -1.0, "tap_norms": 5, "has_fc": False, "kind": "eagle"}
    alone = ({name: value} for wrong in (none, no_type, beyond) for name, value in wrong.items())
    # Without fc, features are as wide as the head.
    for changed in (*alone, {"tap_norms": 1, "has_fc": False, "feature_width": 64}):
        with raises(UsageError):
            replace(CFG, **changed)
    # NumPy's numbers are numbers.
    cfg = replace(CFG, hidden=np.int64(64), norm_eps=np.float32(1e-5))
    assert type(cfg.hidden) is int
    assert cfg.hidden == CFG.hidden


def test_what_set_step_wrote_is_known_until_something_else_writes(bufs):
    bufs.set_step([0, 2], [[1], [2, 3]], [0, 0])
    assert bufs.max_new_tokens() == 2
    bufs.num_new.fill_(1)
    assert bufs.max_new_tokens() == 0


def test_heads_whose_tensors_do_not_fit():
    for name, changed in (
        ("embedding", {"embedding": torch.zeros(300, 32)}),
        ("lm_head", {"lm_head": torch.zeros(120, 32)}),
        ("draft_to_target", {"draft_to_target": torch.arange(119)}),
        ("draft_to_target", {"draft_to_target": torch.arange(120, device="meta")}),
        ("norm.weight", {"tensors": {**HEAD.tensors, "norm.weight": torch.ones(64).half()}}),
        ("mlp.up_proj.weight", {"tensors": {**HEAD.tensors, "mlp.up_proj.weight": HEAD.lm_head}}),
        ("fc.weight", {"tensors": {name: each for name, each in HEAD.tensors.items() if name != "fc.weight"}}),
        ("self_attn.q_proj.weight", {"num_heads": HEAD.num_heads + HEAD.num_kv_heads}),
    ):
        with raises_with(UsageError, name):
            replace(HEAD, **changed)


def test_parts_of_another_configuration(bufs):
    for changed, head in (
        *(({name: size}, {}) for name, size in (("total_tokens", 12), ("max_positions", 500), ("intermediate", 64))),
        *(({name: size}, {}) for name, size in (("has_qkv_bias", True), ("target_vocab", 299))),
        *(({}, head) for head in ({"dtype": torch.float16}, {"hidden": 32}, {"kind": "eagle"})),
    ):
        cfg, weights, (field,) = replace(CFG, **changed), Weights(random_head(**head)), {**changed, **head}
        with raises_with(UsageError, field):
            launch_drafter(cfg, FEATURES, weights, bufs, backend="reference")
        with raises_with(UsageError, field):
            prefill_drafter(cfg, FEATURES[0], torch.zeros(16, dtype=torch.int64), weights, bufs, 0)


def test_prompts_that_do_not_fit(bufs):
    for features, tokens, slot, words in (
        (FEATURES[0, :2], [5, 1], 3, "Slot 3"),
        (FEATURES[0, :2], [5, 1], -1, "Slot -1"),
        (torch.zeros(ROOM + 1, HEAD.feature_width), [0] * (ROOM + 1), 0, "KV cache"),
        (FEATURES[0, :2], [5], 0, "(2, 192) and torch.int64 (1,)"),
        (FEATURES[0, :2, :9], [5, 1], 0, "(2, 9) and torch.int64 (2,)"),
        (FEATURES[0, :2], [5, -1], 0, "-1"),
        (FEATURES[0, :2], [5, 300], 0, "300"),
        (FEATURES[0, :2], [5.0, 1.0], 0, "float32"),
    ):
        before = bufs.keys.clone()
        with raises_with(UsageError, words):
            prefill_drafter(CFG, features, torch.tensor(tokens), WEIGHTS, bufs, slot)
        assert torch.equal(bufs.keys, before)


def test_a_prompt_of_separate_taps(bufs):
    tokens = torch.arange(16)
    prefill_drafter(CFG, FEATURES[0], tokens, WEIGHTS, bufs, 0)
    prefill_drafter(CFG, FEATURES[0].chunk(3, -1), tokens, WEIGHTS, bufs, 1)
    assert bufs.keys[0, :, :16].any()
    assert torch.equal(bufs.keys[0], bufs.keys[1])


def test_backends_and_parts(step):
    cfg, features, weights, bufs = step
    with raises(UsageError, option="backend"):
        launch_drafter(cfg, features, weights, bufs, backend="cuda")
    with raises(DrafterError):
        launch_drafter(cfg, features, Weights(weights.head), bufs)
    with raises(DrafterError):
        launch_drafter(cfg, features, weights, Buffers.allocate(cfg, weights.head))
    with raises(UsageError):
        launch_drafter(replace(cfg, draft_vocab=121), features, weights, bufs)
    assert allocate_buffers(cfg, Weights(weights.head)).workspace == {}


def test_more_programs_than_can_be_resident(step):
    cfg, features, weights, bufs = step
    assert weights.packed is not None
    params = weights.packed.launches(cfg)[0]
    params = replace(params, layout=replace(params.layout, num_programs=1000))
    packed = replace(weights.packed, launches=always(params))
    many = Weights(weights.head, packed)
    with raises_with(DrafterError, "workspace"):
        launch_drafter(cfg, features, many, bufs)
    with raises_with(DrafterError, "1000 programs"):
        launch_drafter(cfg, features, many, allocate_buffers(cfg, many))


def test_weights_packed_for_another_configuration(step):
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
    for order in (torch.arange(5), torch.zeros(120, dtype=torch.int64), torch.arange(120.0)):
        with raises(UsageError):
            Weights.pack(weights.head, cfg, order)


def test_no_gpu_and_no_interpreter(step, monkeypatch):
    cfg, features, weights, bufs = step
    if bufs.keys.is_cuda:
        pytest.skip("there is a GPU")
    monkeypatch.setattr("eagle_slim.runtime.drafter.launch.is_interpreted", lambda: False)
    with raises_with(DrafterError, "NVIDIA GPU"):
        launch_drafter(cfg, features, weights, bufs)


def test_dimensions(step):
    large = {"hidden": 16_400, "head_dim": 258, "draft_vocab": 262_145, "depth": 11, "num_slots": 17, "top_k": 17}
    large |= {"max_positions": 131_072 + 257, "total_tokens": 129}
    odd = {"hidden": 72, "intermediate": 40, "num_heads": 3, "head_dim": 15, "draft_vocab": 2, "num_slots": 0}
    kinds = {"kind": "medusa", "dtype": torch.float64, "weight_dtype": torch.int8}
    for field, value in (*large.items(), *odd.items(), *kinds.items()):
        others = {"dtype": {"weight_dtype": value}, "total_tokens": {"top_k": 10}}.get(field, {})
        with raises(UsageError):
            check_kernel_limits(replace(step[0], **{"max_positions": 200, **others, field: value}))


def test_fp8_needs_sm_89_and_multiplies_32_numbers_at_a_time(step):
    fp8 = replace(step[0], weight_dtype=torch.float8_e4m3fn)
    with raises_with(DrafterError, "FP8", "sm_89", "sm_80"):
        choose_launch(fp8, KNOWN_CHIPS[80])
    assert choose_launch(fp8, KNOWN_CHIPS[89]).num_programs == 128
    assert (fp8.hidden, fp8.intermediate, fp8.num_heads) == (64, 96, 4)
    for changed, field, found in (
        ({"hidden": 80, "feature_width": 240}, "hidden", 80),
        ({"intermediate": 112}, "intermediate", 112),
        ({"num_heads": 5, "num_kv_heads": 1}, "num_heads * head_dim", 80),
    ):
        check_kernel_limits(replace(step[0], **changed))
        with raises_with(UsageError, field, str(found)):
            check_kernel_limits(replace(fp8, **changed))
