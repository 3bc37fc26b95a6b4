"""Verdicts drawn by node, and the figures of shapes side by side."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.tree import Trees, layout_tree

from benchmarks import shapes
from benchmarks.shared.drawn_nodes import LEVELS, NUM_DRAWN, draw_nodes, draw_ranks


def test_ranks_have_the_chances_asked_for() -> None:
    """At the first level 0.5, 0.1, 0.02 and so on; nothing at the others."""
    ranks = draw_ranks(lambda level: 0.5 if level == 0 else 0.0)
    assert ranks.shape == (NUM_DRAWN, LEVELS)
    shares = [(ranks[:, 0] == rank).double().mean().item() for rank in range(3)]
    assert shares == pytest.approx([0.5, 0.1, 0.02], abs=0.03)
    assert (ranks[:, 1:] >= 16).all()


@pytest.mark.parametrize(
    ("ranks", "path"),
    [
        ([0, 1], [1, 4]),  # A, then D; D has no children
        ([1, 0], [2, 5]),  # B, then E
        ([0, 0, 0], [1, 3, 6]),  # A, C, G
        ([0, 2], [1]),  # A has two children only
        ([2], []),
    ],
)
def test_a_walk_takes_the_children_of_the_drawn_ranks(device: str, ranks: list[int], path: list[int]) -> None:
    """root 9; A 1, B 2; C 3, D 4 under A; E 5 under B; G 6 under C."""
    tree = layout_tree(torch.tensor([[9, 1, 2, 3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 1, 1, 2, 3]]), path_width=4)
    none = 1 << 20
    table = torch.tensor([[*ranks, *[none] * (LEVELS - len(ranks))]], dtype=torch.int32, device=device)
    active, one = (torch.tensor([value], dtype=torch.int32, device=device) for value in (0, 1))
    trees = Trees(active, one, *(t.to(device) for t in (tree.draft_tokens, tree.parents, tree.tree_position_ids)))
    choices = torch.full((1, 7), 50, dtype=torch.int32, device=device)
    draw_nodes(choices, trees, table, torch.zeros_like(active), depth=3)
    found, at = [], 0
    while True:
        token = int(choices[0, at])
        children = [node for node in range(7) if tree.parents[0, node] == at and tree.draft_tokens[0, node] == token]
        if not children:
            break
        at = children[0]
        found.append(at)
    assert found == path


def test_a_row_is_judged_by_its_medians() -> None:
    row = shapes.judged("x", {"plain": [10, 11, 12], "1,1,3": [20, 19, 30], "chosen": [19.7, 19.8, 1]})
    assert (row["best"], row["over_plain"], row["over_best"]) == ("1,1,3", 19.7 / 11, 19.7 / 20)
    assert row["is_good"]
    assert not shapes.judged("x", {"plain": [10], "1,1,3": [20], "chosen": [19.3]})["is_good"]
