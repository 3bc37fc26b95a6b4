"""Accepting a path: walk from the root while the target's own choice is among the drafted children.

The draft is deterministic, so no drafter probability enters: at each visited node the target chooses its next token
(greedy, or sampled), that token is emitted, and the walk goes on if the tree has it as a child. What is emitted is
exactly what the target alone would have chosen; a longer accepted path only means fewer passes.

Example, the tree of `tree` (root; A, B; C, D under A; E under B; G under C), the target choosing A, then C, then Z::

    step            0     1     2
    node            0     1     3      (root, A, C: their KV rows are kept)
    emitted token   A     C     Z      (accepted length 3: two drafted tokens and the target's own)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree import DraftTree


@dataclass(frozen=True)
class AcceptedPath:
    """What one verification gives for each sequence; the width is that of the longest possible path, depth + 2.

    ``nodes`` int64 [batch, width]: visited nodes, root first, then -1. ``tokens`` int64 [batch, width]: emitted tokens,
    then -1. ``lengths`` int64 [batch]: how many, at least 1.
    """

    nodes: Tensor
    tokens: Tensor
    lengths: Tensor


def accept_path(tree: DraftTree, logits: Tensor, choose: Callable[[Tensor, int], Tensor]) -> AcceptedPath:
    """Walk every tree of a batch.

    ``logits`` float [batch, nodes, target_vocab]: the target's, after each node. ``choose(rows, step)`` picks a token
    for each of [batch, target_vocab] rows: int64 [batch]. No waiting for the device.
    """
    batch, _, vocab = logits.shape
    width = tree.retrieve_indices.shape[2]
    at = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    alive = torch.ones(batch, dtype=torch.bool, device=logits.device)
    nodes, tokens = [], []
    for step in range(width):
        token = choose(logits.gather(1, at[:, None, None].expand(-1, 1, vocab))[:, 0], step)
        nodes.append(torch.where(alive, at, -1))
        tokens.append(torch.where(alive, token, -1))
        is_child = (tree.parents == at[:, None]) & (tree.draft_tokens == token[:, None])
        alive = alive & is_child.any(-1)
        at = torch.where(alive, is_child.int().argmax(-1), at)
    path = torch.stack(nodes, 1)
    return AcceptedPath(path, torch.stack(tokens, 1), (path >= 0).sum(-1))
