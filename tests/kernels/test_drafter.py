"""The whole draft in one launch, under the interpreter at toy sizes, against the reference."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from eagle_slim.runtime import TreeConfig, launch_drafter
from eagle_slim.runtime.drafter.kernels.weight_stream import Tile
from eagle_slim.runtime.drafter.launch_params import LaunchParams, chip_of, choose_launch
from eagle_slim.runtime.drafter.tuning.agreement import candidates_of, exact_head, replay, tree_of
from eagle_slim.runtime.drafter.workspace import allocate_workspace
from kernels.cases import OPTIONS, Case
from kernels.cases import draft as draft_case
from kernels.chips import KNOWN_CHIPS
from kernels.compiled_drafter import LLAMA_8B
from kernels.replaying import assert_agrees, assert_equal_trees, assert_is_the_references, draft, run
from support.drafting import nan_fill, problem, random_head, with_options
from support.sweeps import sweep

SLOW = pytest.mark.slow
ONE_KV_HEAD = {"heads": 6, "kv_heads": 1, "head_dim": 40, "hidden": 48, "qkv_bias": True}
CASES = {
    # name: (head options, tree, prefixes, new tokens, active slots)
    "eagle3": ({}, (3, 4, 20), [5], [3], None),
    "one level": ({}, (1, 3, 12), [9], [1], None),
    "eagle": ({"kind": "eagle"}, (1, 4, 12), [7], [2], None),
    "slots, order and gaps": ({}, (2, 3, 15), [4, 30, 1, 12], [16, 2, 1, 5], [3, 0]),
    "more new tokens than rows": ({}, (1, 3, 10), [4, 30, 1, 12, 5], [16, 2, 1, 5, 9], [3, 0, 4]),
    "full attention": ({"heads": 3, "kv_heads": 3, "head_dim": 16, "hidden": 48}, (1, 2, 5), [6], [4], None),
    "one kv head, qkv bias": (ONE_KV_HEAD, (1, 2, 5), [6], [4], None),
    "head_dim 20": ({"head_dim": 20, "draft_vocab": 37}, (2, 3, 9), [5], [4], None),
    "head_dim 96": ({"head_dim": 96, "heads": 2, "kv_heads": 1}, (1, 2, 5), [5], [1], None),
    "chain": ({"draft_vocab": 3}, (4, 1, 6), [5], [2], None),
    "deepest": ({}, (10, 16, 100), [50], [2], None),
    "empty prefix, wider target": ({"target_hidden": 80}, (1, 2, 5), [0], [2], None),
    "long prefix": ({}, (1, 2, 6), [200], [2], None),
}


@pytest.mark.parametrize("name", sweep(CASES, "eagle3", "eagle", "one kv head, qkv bias"))
def test_equals_the_reference_in_fp32(name: str, device: str) -> None:
    options, tree, prefixes, num_new, active = CASES[name]
    drafted = draft(random_head(**options, device=device), tree, prefixes, num_new, active)
    assert_is_the_references(drafted)


@pytest.mark.parametrize(
    ("bound", "trees"),
    [
        ((2, 3, 12), [(1, 3, 9), (2, 3, 2), (0, 3, 4), (2, 3, 12)]),
        pytest.param((3, 3, 20), [(3, 3, 19), (1, 3, 12), (2, 3, 2), (0, 3, 4), (2, 3, 17), (3, 3, 20)], marks=SLOW),
    ],
)
def test_trees_within_one_bound(bound: tuple[int, int, int], trees: list[tuple[int, int, int]], device: str) -> None:
    cfg, features, weights, bufs = problem(random_head(device=device), TreeConfig(*bound), [5, 9, 7], [3, 2, 1], [2, 0])
    keys, values = bufs.keys.clone(), bufs.values.clone()
    for tree in trees:
        bufs.keys.copy_(keys)
        bufs.values.copy_(values)
        drafted = run(cfg, features, weights, bufs.of_tree(TreeConfig(*tree)))
        assert drafted.tree.draft_tokens.shape == (3, tree[2])
        assert drafted.tree.retrieve_indices.shape == (3, tree[2], tree[0] + 2)
        assert_is_the_references(drafted)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_head(name: str, device: str) -> None:
    """Leaving any one of them out of the reference makes the draft a wrong one."""
    options = OPTIONS[name]
    drafted = draft(with_options(random_head(device=device), **options), (1, 2, 5), [5], [3])
    assert_is_the_references(drafted)
    neutral = {"norm_before_residual": False, "norm_output": False, "activation": "silu", "sliding_window": None}
    exact = exact_head(drafted.weights.head, drafted.cfg)
    others = [replace(exact, **{option: neutral[option]}) for option in options if option in neutral]
    for tensor in set(exact.tensors) - set(random_head().tensors):
        unlike = {tensor: exact.tensors[tensor] - 0.5}
        others.append(replace(exact, tensors={**exact.tensors, **unlike}))
    for other in others:
        assert not replay(other, drafted.cfg.tree, drafted.step, candidates_of(drafted.bufs), drafted.tree).agrees


def test_norms_of_a_wider_targets_taps(device: str) -> None:
    head = with_options(random_head(target_hidden=80, device=device), tap_norms=3, norm_output=True)
    assert_is_the_references(draft(head, (1, 2, 5), [5], [3]))


@pytest.mark.parametrize(
    ("kind", "weight_dtype", "size"),
    [
        ("eagle3", torch.float16, 1.0),
        ("eagle3", torch.float8_e4m3fn, 300.0),
        pytest.param("eagle3", torch.float8_e4m3fn, 0.01, marks=SLOW),
        pytest.param("eagle3", torch.float8_e4m3fn, 1.0, marks=SLOW),
        pytest.param("eagle", torch.float8_e4m3fn, 1.0, marks=SLOW),
        pytest.param("eagle", torch.float16, 1.0, marks=SLOW),
    ],
)
def test_lower_precision(kind: str, weight_dtype: torch.dtype, size: float, device: str) -> None:
    """Pairs of FP8 numbers hold values of order one: taps and hidden states are scaled to it, each by its own."""
    head = random_head(kind, dtype=torch.float16, device=device)
    cfg, features, weights, bufs = problem(head, TreeConfig(1, 3, 10), [9, 4], [2, 5], [1], weight_dtype)
    drafted = run(cfg, features * size, weights, bufs)
    assert_agrees(drafted)
    # The replay did not just accept anything: the error is that of rounding.
    assert drafted.agreement.rms_error > 1e-5


def test_separate_taps_are_the_concatenated_ones(device: str) -> None:
    drafted = draft(random_head(device=device), (1, 3, 10), [5, 2], [3, 2], separate_taps=True)
    assert_agrees(drafted)
    assert isinstance(drafted.features, tuple)
    joined = replace(drafted, step=replace(drafted.step, features=torch.cat(drafted.features, -1)))
    assert_equal_trees(drafted.tree, joined.reference_tree())


def odd_tiles(params: LaunchParams, columns: int = 16) -> LaunchParams:
    """Parts of stored chunks, several of the LM head's at once, and its stored tiles cut in two.

    ``columns``: the least that are multiplied, 32 of FP8.
    """
    layout = replace(params.layout, chunks={"layer": 32, "mlp": 2 * columns, "head": columns}, head_rows=64)
    tiles = {"layer": Tile(32, columns, 2), "mlp": Tile(16, columns, 1), "head": Tile(32, 2 * columns, 3)}
    return replace(params, layout=layout, tiles=tiles)


def no_groups(params: LaunchParams) -> LaunchParams:
    return replace(params, layout=replace(params.layout, split=dict.fromkeys(params.layout.split, 1)))


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle", marks=SLOW)])
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("change", [no_groups, odd_tiles], ids=["no groups", "odd tiles"])
def test_launch_parameters(kind: str, fp8: bool, change: Callable[[LaunchParams], LaunchParams], device: str) -> None:
    change = partial(odd_tiles, columns=32) if change is odd_tiles and fp8 else change
    case = Case(1, (1, 3, 12), [9, 4], [2, 5], head={"kind": kind, "device": device}, fp8=fp8, change=change)
    result = draft_case(case, chip_of(torch.device(device)), torch.float16 if fp8 else torch.float32)
    assert result["agrees"], result["is"]
    assert result["different"] == result["left"] == []


def test_without_fc(device: str) -> None:
    """One tap as wide as the head goes in as it is."""
    head = random_head(device=device)
    tensors = {name: tensor for name, tensor in head.tensors.items() if name != "fc.weight"}
    drafted = draft(replace(head, tensors=tensors, feature_width=head.hidden), (1, 3, 10), [6], [3])
    assert not drafted.cfg.has_fc
    assert_is_the_references(drafted)


def test_rope_scaling_by_length(device: str) -> None:
    """Tables are those of the cache's length, for the kernel, the reference and the prompt's keys alike."""
    head = random_head(device=device, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    short = head.rotary
    changes_at = 131072  # of `random_head`
    head = replace(head, rotary=replace(short, by_length=lambda length: short.for_length(changes_at * length)))
    drafted = draft(head, (1, 3, 10), [12], [3])
    assert drafted.cfg.num_tokens == 12
    assert_is_the_references(drafted)
    unscaled = replace(exact_head(head, drafted.cfg), rotary=short)
    assert not replay(unscaled, drafted.cfg.tree, drafted.step, candidates_of(drafted.bufs), drafted.tree).agrees


@pytest.mark.parametrize(
    ("window", "sinks", "prefixes"),
    [
        (5, 0, [1150, 4, 590]),
        (20, 3, [1150, 17, 622]),
        pytest.param(700, 32, [1290, 650, 1400], marks=SLOW),
        pytest.param(70, 40, [1231, 600, 0], marks=SLOW),
        pytest.param(1, 0, [601, 1177, 1], marks=SLOW),
    ],
)
def test_a_cache_that_holds_the_window_alone(window: int, sinks: int, prefixes: list[int], device: str) -> None:
    """Its rows begin anew behind the last; the trees are those over all keys, of which the window hides the others."""
    head = replace(random_head(device=device), sliding_window=window, window_sinks=sinks)
    given = TreeConfig(2, 3, 12), prefixes, [3, 1, 5], [2, 0, 1], None
    whole, small = (run(*problem(head, *given, holds_window)) for holds_window in (False, True))
    assert small.bufs.keys.shape[2] < min(max(prefixes), window + 600) < whole.bufs.keys.shape[2]
    assert_is_the_references(small)
    assert_equal_trees(small.tree, whole.tree)


def test_ties_go_to_the_smaller_row(device: str) -> None:
    """Rows of the LM head that are equal give equal logits to the last bit; every choice among them is decided."""
    head = random_head(device=device, draft_vocab=60)
    head = replace(head, lm_head=head.lm_head[:12].repeat(5, 1))
    drafted = draft(head, (2, 4, 20), [5], [2])
    assert_is_the_references(drafted)
    first = drafted.tree.draft_tokens[0][drafted.tree.parents[0] == 0]
    rows = [head.draft_to_target.tolist().index(token) for token in first.tolist()]
    assert [row % 12 for row in rows] == [rows[0] % 12] * len(rows)


def test_drafts_follow_each_other(device: str) -> None:
    """Two steps on one cache: the second finds what the first appended, and no state is left over."""
    head = random_head(device=device)
    first = draft(head, (1, 3, 10), [6], [2])
    accepted = first.tree.draft_tokens[0, :3].tolist()
    bufs = first.bufs
    bufs.set_step([0], [accepted], [8])
    second = run(first.cfg, first.features, first.weights, bufs)
    assert_is_the_references(second)


# Programs share the work out by a division by the number of sequences, whose result nothing uses when there are none.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in:RuntimeWarning")
@pytest.mark.parametrize("active", [[], [1]])
def test_inactive_slots_are_blank(active: list[int], device: str) -> None:
    cfg, features, weights, bufs = problem(random_head(device=device), TreeConfig(1, 2, 5), [4] * 3, [1] * 3, active)
    keys, trees = bufs.keys.clone(), []
    for backend in ("triton", "reference"):
        nan_fill(bufs)
        launch_drafter(cfg, features, weights, bufs, backend)
        trees.append(tree_of(bufs))
    assert_equal_trees(*trees)
    for slot in {0, 1, 2} - {*active}:
        assert (trees[0].draft_tokens[slot] == -1).all()
        assert (trees[0].retrieve_indices[slot] == -1).all()
        assert not trees[0].tree_mask[slot].any()
        assert (trees[0].tree_position_ids[slot] == 0).all()
        assert trees[0].num_leaves[slot] == 0
        assert torch.equal(bufs.keys[slot], keys[slot])


@pytest.mark.slow
def test_weights_of_any_strides(device: str) -> None:
    head = random_head(device=device)
    expected = draft(head, (2, 3, 12), [6], [2])

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor], -1)[..., 0]

    tensors = {name: strided(tensor) for name, tensor in head.tensors.items()}
    other = replace(head, tensors=tensors, embedding=strided(head.embedding), lm_head=strided(head.lm_head))
    assert_equal_trees(draft(other, (2, 3, 12), [6], [2]).tree, expected.tree)


def test_the_replay_sees_a_wrong_draft(device: str) -> None:
    drafted = draft(random_head(device=device), (2, 3, 12), [6], [2])
    cfg, step, tree = drafted.cfg, drafted.step, drafted.tree
    head, candidates = exact_head(drafted.weights.head, cfg), candidates_of(drafted.bufs)

    def faults(**changed: torch.Tensor) -> str:
        return " ".join(replay(head, cfg.tree, step, replace(candidates, **changed), tree).faults)

    assert faults() == ""
    shifted = candidates.scores.clone()
    shifted[0, 4] -= 0.01
    assert "log-probability" in faults(scores=shifted)
    swapped = candidates.tokens.clone()
    swapped[0, [3, 4]] = swapped[0, [4, 3]]
    assert "log-probability" in faults(tokens=swapped)
    parents = candidates.parents.clone()
    parents[0, 12:15], parents[0, 15:18] = candidates.parents[0, 15:18], candidates.parents[0, 12:15]
    assert "frontier" in faults(parents=parents)
    other = replace(tree, draft_tokens=tree.draft_tokens.flip(1))
    assert replay(head, cfg.tree, step, candidates, other).faults == ("draft_tokens is not what tree.build_tree gives",)
    keys = drafted.bufs.keys.clone()
    keys[0, 0, 7] += 0.01
    assert "KV cache" in " ".join(replay(head, cfg.tree, step, candidates, tree, keys, drafted.bufs.values).faults)


@pytest.mark.slow
def test_generation_is_the_targets_own(tmp_path_factory: pytest.TempPathFactory, device: str) -> None:
    from eagle_slim.runtime import SpeculativeModel
    from eagle_slim.runtime.generate_cli import figures
    from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head

    folder = tmp_path_factory.mktemp("head")
    write_head(folder, "eagle3")
    target = tiny_target("llama").to(device)
    prompts = random_prompts([5, 2])
    outputs = {}
    for name in ("reference", "triton"):
        model = SpeculativeModel.from_pretrained(target, folder, tree=TreeConfig(2, 3, 12), drafter=name)
        outputs[name] = model.generate(prompts, max_new_tokens=5)
    assert outputs["triton"].token_ids == [plain_greedy(target, prompt, 5) for prompt in prompts]
    assert outputs["triton"].stats.accepted_lengths == outputs["reference"].stats.accepted_lengths
    # One launch a step, the empty ones too.
    stats = outputs["triton"].stats
    assert (stats.tuned_hits, stats.tuned_misses) == (0, len(stats.steps))
    assert outputs["reference"].stats.tuned_misses == 0
    assert "the drafter's launch parameters are not tuned here" in figures(stats)
    assert "drafter" not in figures(outputs["reference"].stats)


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """No buffer of draft_vocab times nodes, at dimensions of Llama-3.1-8B; nothing is allocated on "meta"."""

    def workspace_bytes(draft_vocab: int) -> int:
        cfg = replace(LLAMA_8B, draft_vocab=draft_vocab, num_slots=8)
        tensors = allocate_workspace(cfg, choose_launch(cfg, KNOWN_CHIPS[90]), "meta").values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert workspace_bytes(128256) <= workspace_bytes(32000) < 100e6
