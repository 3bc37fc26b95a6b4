"""The persistent drafter on a GPU: every type against the fp32 reference, real dimensions, and graphs."""

import pytest
import torch
from eagle_slim.runtime import DrafterConfig, EagleSlimError, Weights, allocate_buffers, check_finished, launch_drafter
from eagle_slim.runtime.drafter.kernels.persistent import draft_kernel
from eagle_slim.runtime.drafter.tuning.agreement import LOG_PROB_ATOL, Step, candidates_of, exact_head, replay, tree_of
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims, random_head, random_step
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.settings import TreeConfig
from kernels.cases import OPTIONS
from kernels.replaying import FIELDS, assert_agrees, assert_equal_trees, draft, run
from support.drafting import random_head as small_head
from support.drafting import with_options

pytestmark = pytest.mark.gpu
MEDIUM = {"hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 2, "head_dim": 64}
MEDIUM |= {"target_vocab": 4000, "draft_vocab": 3001, "device": "cuda"}

NEEDS_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="FP8 needs sm_89 or later"
)
WEIGHTS = [pytest.param(None, id="bf16"), pytest.param(torch.float8_e4m3fn, id="fp8", marks=NEEDS_FP8)]
TYPES = [
    pytest.param(torch.bfloat16, None, id="bf16"),
    pytest.param(torch.float16, None, id="fp16"),
    pytest.param(torch.bfloat16, torch.float8_e4m3fn, id="fp8", marks=NEEDS_FP8),
    pytest.param(torch.float32, None, id="fp32"),
]


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_every_type(dtype, weight_dtype, record_property):
    head = small_head(dtype=dtype, **MEDIUM)
    drafted = draft(head, (5, 10, 60), [300, 1000, 40], [3, 16, 1], [2, 0], weight_dtype)
    record_property("agreement", str(drafted.agreement))
    assert_agrees(drafted)
    if dtype == torch.float32:
        assert_equal_trees(drafted.tree, drafted.reference_tree())


def test_eagle_2_and_odd_sizes():
    options = {**MEDIUM, "heads": 6, "kv_heads": 2, "hidden": 480, "head_dim": 80, "draft_vocab": 1777}
    head = small_head("eagle", dtype=torch.bfloat16, qkv_bias=True, **options)
    assert_agrees(draft(head, (3, 7, 33), [129], [5]))


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize(("slots", "tree"), [(4, (3, 10, 60)), (16, (3, 10, 60)), (16, (6, 1, 8)), (9, (3, 3, 20))])
def test_batches(slots, tree, kind, weight_dtype):
    head = small_head(kind, dtype=torch.bfloat16, **MEDIUM)
    prefixes, num_new = [7 + 61 * slot for slot in range(slots)], [1 + (5 * slot) % 16 for slot in range(slots)]
    active = [slot for slot in reversed(range(slots)) if slot % 5 != 2]
    assert_agrees(draft(head, tree, prefixes, num_new, active, weight_dtype))


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (MODELS["llama-3.1-8b"], {}),
        (MODELS["llama-3.1-8b"], {**OPTIONS["each tap normed"], "sliding_window": 200}),
        (MODELS["llama-3.1-8b"], {**OPTIONS["all taps normed"], "sliding_window": 3}),
        # Llama-3.1-405B's, with fewer token ids.
        (Dims(16384, 53248, 128, 8, 128, 32000), {"norm_before_residual": True}),
    ],
    ids=["llama-3.1-8b", "llama-3.1-8b, each tap normed", "llama-3.1-8b, all taps normed", "16,384 wide"],
)
def test_real_dimensions(dims, options, weight_dtype, record_property):
    head = with_options(random_head(dims, torch.device("cuda")).of_rows(slice(32000)), **options)
    cfg = DrafterConfig.of(head, TreeConfig(5, 10, 60), 1, 4096 + 16, weight_dtype)
    weights = Weights.pack(head, cfg)
    bufs = allocate_buffers(cfg, weights)
    for prefix in (512, 4000):
        drafted = run(cfg, random_step(cfg, prefix, 4, bufs), weights, bufs)
        record_property(f"agreement_{prefix}", str(drafted.agreement))
        assert_agrees(drafted)


def test_graph_replays_take_new_inputs():
    """One graph, recorded once, drafts what a plain launch drafts, also after its inputs changed, to the last bit."""
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
        launched, scores = tree_of(bufs), candidates_of(bufs).scores
        for name in FIELDS:
            getattr(bufs, name).fill_(-2 if name != "tree_mask" else 1)
        for _ in range(20):
            graph()
            assert torch.equal(candidates_of(bufs).scores, scores)
        check_finished(bufs)
        assert_equal_trees(tree_of(bufs), launched)
        drafted = candidates_of(bufs), tree_of(bufs), bufs.keys, bufs.values
        atol = LOG_PROB_ATOL[plain.cfg.weight_dtype]
        agreement = replay(exact_head(head, plain.cfg), plain.cfg.tree, step, *drafted, atol=atol)
        assert agreement.agrees, str(agreement)


def test_trees_within_a_bound_share_one_compiled_kernel():
    """Of any depth and number of nodes, 16 and 32 among them, which Triton would tell from others."""

    def num_kernels():
        return sum(len(found[0]) for found in draft_kernel.device_caches.values())

    head = small_head(dtype=torch.bfloat16, **MEDIUM)
    wide = draft(head, (7, 10, 60), [300, 1000, 40], [3, 16, 1], [2, 0])
    before = num_kernels()
    for tree in ((5, 10, 60), (5, 10, 32), (2, 10, 16), (1, 10, 7), (0, 10, 2), (7, 10, 59)):
        wide.bufs.keys.copy_(wide.step.keys)
        wide.bufs.values.copy_(wide.step.values)
        assert_agrees(run(wide.cfg, wide.features, wide.weights, wide.bufs.of_tree(TreeConfig(*tree))))
    assert num_kernels() == before


@NEEDS_FP8
def test_fp8_is_what_the_name_gives():
    from eagle_slim.runtime import SpeculativeModel

    try:
        options = {"dtype": torch.bfloat16, "device": "cuda", "draft_weights": "fp8"}
        model = SpeculativeModel.from_pretrained(**options, tree=TreeConfig())
    except EagleSlimError as error:
        pytest.skip(f"no built-in target here: {error}")
    prompt = model.encode_chat("What is 12 times 7?")
    smaller = model.with_draft_vocab(4096).with_tree(TreeConfig(3, 8, 30))
    for each in (model, smaller):
        assert each.draft_weights == "fp8"
        drafted = each.generate(prompt, max_new_tokens=32)
        assert "; drafter triton, fp8 weights, the last 768 tokens" in drafted.stats.path
        assert drafted.stats.mean_accepted_length > 1.5
