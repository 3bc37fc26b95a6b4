"""Draft trees: the worked example of the module, exact selection, and the layout against a plain Python oracle."""

import math

import pytest
import torch
from eagle_slim.runtime import TreeConfig, UsageError
from eagle_slim.runtime.tree import DraftTree, build_tree, join_levels, layout_tree, rank_children, ranked_topk
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raising import raises_with

ROOT, A, B, C, D, E, F, G, H, I_, J = range(100, 111)
LEVEL_TOKENS = [torch.tensor([level]) for level in ([A, B], [C, D, E, F], [G, H, I_, J])]
LEVEL_SCORES = [torch.tensor([row]) for row in ([-0.5, -1.5], [-1.5, -2.0, -1.75, -5.5], [-2.0, -4.5, -2.75, -3.75])]
LEVEL_FRONTIERS = [torch.tensor([[0, 1]]), torch.tensor([[0, 2]])]
EXAMPLE = TreeConfig(depth=2, top_k=2, total_tokens=7)


def example_tree(config: TreeConfig = EXAMPLE) -> DraftTree:
    candidates = join_levels(LEVEL_TOKENS, LEVEL_SCORES, LEVEL_FRONTIERS, top_k=2)
    return build_tree(torch.tensor([ROOT]), candidates, config)


def test_worked_example_candidates_and_frontier() -> None:
    scores, index = ranked_topk(LEVEL_SCORES[1], 2)
    assert index.tolist() == [[0, 2]]
    assert scores.tolist() == [[-1.5, -1.75]]
    candidates = join_levels(LEVEL_TOKENS, LEVEL_SCORES, LEVEL_FRONTIERS, top_k=2)
    assert candidates.parents.tolist() == [[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]]


def test_worked_example_tree() -> None:
    tree = example_tree()
    assert tree.draft_tokens.tolist() == [[ROOT, A, B, C, D, E, G]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 3]]
    assert tree.tree_position_ids.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert tree.num_leaves.tolist() == [3]
    assert tree.retrieve_indices[0, :3].tolist() == [[0, 1, 4, -1], [0, 2, 5, -1], [0, 1, 3, 6]]
    assert tree.retrieve_indices[0, 3:].eq(-1).all()
    assert tree.tree_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ]


def test_to_upstream_has_upstreams_shapes_and_orders() -> None:
    tokens, paths, mask, positions = example_tree().to_upstream()
    assert tokens.tolist() == [[ROOT, A, B, C, D, E, G]]
    assert paths.tolist() == [[0, 1, 4, -1], [0, 2, 5, -1], [0, 1, 3, 6]]
    assert (mask.shape, mask.dtype, mask.sum()) == ((1, 1, 7, 7), torch.float32, 18)
    assert positions.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert example_tree().to_upstream(sampling=True)[1].tolist() == [[0, 1, 3, 6], [0, 1, 4, -1], [0, 2, 5, -1]]


def test_closed_under_parents_where_a_child_has_probability_one() -> None:
    # Every score is equal, so only the index rule keeps parents before their children.
    scores = [torch.zeros(1, 3), torch.zeros(1, 9), torch.zeros(1, 9)]
    frontiers = [torch.arange(3)[None], ranked_topk(scores[1], 3)[1]]
    tokens = list(torch.arange(21)[None].split([3, 9, 9], 1))
    tree = build_tree(torch.tensor([50]), join_levels(tokens, scores, frontiers, 3), TreeConfig(2, 3, 9))
    assert tree.draft_tokens.tolist() == [[50, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2, 2]]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, float("-inf"), 1e-40, 3e38]), min_size=1, max_size=40),
    st.data(),
)
def test_ranked_topk_breaks_ties_by_index(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    top, index = ranked_topk(torch.tensor([values]), k)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert index.tolist() == [expected]
    assert top.tolist() == [[torch.tensor(values[i]).item() for i in expected]]


@pytest.mark.parametrize("width", [10, 63, 1000, 4097])
def test_rank_children_is_log_softmax_over_the_draft_vocabulary(width: int) -> None:
    logits = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(width)) * 4
    log_probs, rows = rank_children(logits, 10)
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(log_probs.double(), expected.gather(-1, rows), rtol=1e-6, atol=1e-6)
    assert log_probs.diff(dim=-1).le(0).all()
    torch.testing.assert_close(expected.gather(-1, rows), expected.topk(10).values)


def test_children_of_a_node_without_a_number_come_last() -> None:
    log_probs, _ = rank_children(torch.tensor([[1.0, float("nan"), 2.0], [5.0, 5.0, 5.0]]), 2)
    assert log_probs[0].tolist() == [float("-inf")] * 2
    assert log_probs[1].tolist() == pytest.approx([-math.log(3)] * 2)


def test_layout_of_a_batch_treats_sequences_apart() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    parents = torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 0]])
    tree = layout_tree(tokens, parents, path_width=4)
    assert tree.retrieve_indices[0].tolist() == [[0, 1, 2, 3], [-1] * 4, [-1] * 4, [-1] * 4]
    assert tree.retrieve_indices[1].tolist() == [[0, 1, -1, -1], [0, 2, -1, -1], [0, 3, -1, -1], [-1] * 4]
    assert tree.num_leaves.tolist() == [1, 3]
    assert tree.tree_position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((2, 2, 12), ("total_tokens", "11", "12")),
        ((-1, 2, 3), ("depth", "-1")),
        ((2, 0, 3), ("top_k", "0")),
        ((2, 2, 1), ("total_tokens", "1")),
    ],
)
def test_impossible_trees_are_refused(tree: tuple[int, int, int], words: tuple[str, ...]) -> None:
    with raises_with(UsageError, *words):
        TreeConfig(*tree)
