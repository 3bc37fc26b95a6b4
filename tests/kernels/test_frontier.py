"""The next level's nodes and their ancestor chains, against plain sorting and the tree's own definition."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.kernels.frontier import MAX_DEPTH, frontier_ref
from eagle_slim.runtime.tree import select_frontier
from kernels.example_tree import CHAINS, FRONTIERS, LETTERS, LEVELS, TOP_K
from kernels.parts import frontier_on_device


def test_worked_example(device: str) -> None:
    """Level by level: A and B are expanded, then C and E, then G and I; each with its ancestors' tree slots."""
    chains = torch.full((16, MAX_DEPTH), -1, dtype=torch.int32, device=device)
    for level, names in enumerate(FRONTIERS):
        chosen, longer = frontier_on_device(LEVELS[level].to(device), chains, level, TOP_K)
        assert "".join(LETTERS[candidate] for candidate in chosen.candidate.tolist()) == names
        found = [[slot for slot in chain if slot >= 0] for chain in longer.tolist()]
        assert found == [CHAINS[name] for name in names]
        chains[:TOP_K] = longer
    assert (chosen.parent.tolist(), chosen.child.tolist()) == ([0, 1], [0, 0])
    assert chosen.score.tolist() == [-2.0, -2.75]


@pytest.mark.parametrize(("top_k", "level"), [(1, 0), (1, 4), (3, 1), (10, 0), (10, 5), (16, 2), (16, 10)])
@pytest.mark.parametrize("grid", [0.0, 1.0])
def test_equals_the_definition(top_k: int, level: int, grid: float, device: str) -> None:
    scores = -5 * torch.rand(top_k if level == 0 else top_k**2)
    scores = scores.round() if grid else scores
    chains = torch.randint(0, 99, (16, MAX_DEPTH), dtype=torch.int32)
    wanted, wanted_chains = frontier_ref(scores, chains, level, top_k)
    found, found_chains = frontier_on_device(scores.to(device), chains.to(device), level, top_k)
    assert torch.equal(found_chains.cpu(), wanted_chains)
    for name, field in zip(found._fields, found, strict=True):
        assert torch.equal(field.cpu(), getattr(wanted, name)), name
    by_tree = select_frontier(scores[None], top_k)
    assert torch.equal(by_tree[0][0], wanted.score)
    assert torch.equal(by_tree[1][0].int(), wanted.parent * top_k + wanted.child)
