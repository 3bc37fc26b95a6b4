"""The tree built on the device is the one that `tree.build_tree` defines."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.tree import Candidates, build_tree, level_offset, select_frontier
from kernels.parts import build_tree_on_device
from kernels.replaying import FIELDS


def on_device(roots: torch.Tensor, candidates: Candidates, tree: TreeConfig, device: str) -> dict[str, torch.Tensor]:
    outputs = build_tree_on_device(
        roots.int().to(device), candidates.tokens.int().to(device), candidates.scores.to(device),
        candidates.parents.int().to(device), tree.total_tokens, tree.path_width,
    )  # fmt: skip
    return dict(zip(FIELDS, (output.cpu() for output in outputs), strict=True))


def random_candidates(batch: int, tree: TreeConfig, grid: float) -> Candidates:
    """Candidates as a draft makes them; scores on a grid, so that ties abound (0: none)."""
    top_k = tree.top_k

    def log_probs(*shape: int) -> torch.Tensor:
        drawn = -3 * torch.rand(*shape)
        return (drawn / grid).round() * grid if grid else drawn

    scores, parents = [log_probs(batch, top_k)], [torch.full((batch, top_k), -1)]
    frontier_scores, frontier = scores[0], torch.arange(top_k).expand(batch, top_k)
    for level in range(1, tree.depth + 1):
        children = (frontier_scores[..., None] + log_probs(batch, top_k, top_k)).flatten(1)
        scores.append(children)
        parents.append((frontier + level_offset(level - 1, top_k)).repeat_interleave(top_k, 1))
        frontier_scores, frontier = select_frontier(children, top_k)
    joined = torch.cat(scores, 1)
    return Candidates(torch.randint(0, 50000, joined.shape), joined, torch.cat(parents, 1))


@pytest.mark.parametrize(
    ("tree", "grid"),
    [
        ((1, 1, 2), 0.0),
        ((5, 1, 7), 0.0),
        ((3, 4, 20), 0.5),
        ((3, 4, 53), 0.5),
        ((5, 10, 60), 0.0),
        ((5, 10, 60), 1.0),
        ((2, 16, 128), 0.25),
        ((10, 16, 100), 0.5),
    ],
)
def test_equals_the_definition(tree: tuple[int, int, int], grid: float, device: str) -> None:
    config = TreeConfig(*tree)
    candidates = random_candidates(2, config, grid)
    roots = torch.tensor([3, 4])
    wanted = build_tree(roots, candidates, config)
    built = on_device(roots, candidates, config, device)
    for name in FIELDS:
        assert torch.equal(built[name], getattr(wanted, name)), name
