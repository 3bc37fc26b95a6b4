"""The attention bias of a tree: worked by hand, then the kernel against its definition."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.safeailab.kernels.tree_bias import tree_bias, tree_bias_ref
from support.raising import raises


def test_worked_by_hand(device: str) -> None:
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=device)
    keys = torch.tensor([True, False, True, True, True], device=device)
    no = torch.finfo(torch.float32).min
    wanted = [[0, no, 0, no, no], [0, no, 0, 0, no], [0, no, 0, no, 0]]
    for bias in (tree_bias_ref, tree_bias):
        assert bias(tree, keys, torch.float32).tolist() == wanted


@pytest.mark.parametrize(("nodes", "length", "dtype"), [(1, 0, torch.float32), (7, 1030, torch.float16)])
def test_kernel_is_its_definition(device: str, nodes: int, length: int, dtype: torch.dtype) -> None:
    tree = (torch.rand(nodes, nodes, device=device) < 0.5).float()
    keys = (torch.rand(length + nodes, device=device) < 0.7).long()
    assert torch.equal(tree_bias(tree, keys, dtype), tree_bias_ref(tree, keys, dtype))


def test_other_shapes_are_refused(device: str) -> None:
    tree = torch.ones(3, 3, device=device)
    for mask, keys in (
        (tree[:2], torch.ones(5, device=device)),
        (tree, torch.ones(2, device=device)),
        (tree.t(), tree),
    ):
        with raises(UsageError, tensor="tree_mask"):
            tree_bias(mask, keys, torch.float32)
