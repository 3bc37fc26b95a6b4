"""Verdicts drawn by node, for shapes of trees side by side: the child of rank r at level l is accepted with one chance.

As in `drawn_verdicts`, a step does all its usual work, and then some of the target's choices are overwritten. The rank
that would be accepted at each level is drawn ahead; a tree that does not hold that child ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.step.choice import HostChoice
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.tree import Trees
from torch import Tensor

LATER = 0.2
"""Chance of each later rank, as a share of the one before it."""
NUM_DRAWN, LEVELS = 4096, 16
_NONE = 1 << 20
_SLOT_STRIDE = 257


def draw_ranks(chance: Callable[[int], float], seed: int = 0) -> Tensor:
    """Draw int32 [NUM_DRAWN, LEVELS]: the accepted child's rank, where rank r has ``chance(level) * LATER ** r``."""
    levels = torch.tensor([chance(level) for level in range(LEVELS)], dtype=torch.float64)
    bounds = (levels[:, None] * LATER ** torch.arange(16)).cumsum(1)
    drawn = torch.rand((NUM_DRAWN, LEVELS), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ranks = (drawn[..., None] >= bounds).sum(-1)
    return torch.where(ranks < 16, ranks, _NONE).to(torch.int32)


@triton.jit
def _draw_nodes_kernel(
    choice_ptr, trees, rank_ptr, turn_ptr, NODES: tl.constexpr, BLOCK: tl.constexpr, DRAWN: tl.constexpr,
    LEVELS: tl.constexpr, DEPTH: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if place >= tl.load(trees.active_count):
        return
    slot = tl.load(trees.active_slots + place)
    turn = tl.load(turn_ptr + slot)
    tl.store(turn_ptr + slot, turn + 1)
    ranks = rank_ptr + (turn + slot * STRIDE) % DRAWN * LEVELS
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    tree = slot.to(tl.int64) * NODES + node
    token = tl.load(trees.draft_tokens + tree, mask=inside, other=-1).to(tl.int32)
    parent = tl.load(trees.parents + tree, mask=inside, other=-2).to(tl.int32)
    choice = tl.load(choice_ptr + place * NODES + node, mask=inside, other=-1)
    at = 0
    for level in tl.static_range(DEPTH):
        is_child = (parent == at) & (at >= 0)
        before = tl.sum((is_child[None, :] & (node[None, :] < node[:, None])).to(tl.int32), 1)
        child = tl.min(tl.where(is_child & (before == tl.load(ranks + level)), node, BLOCK))
        # Where nothing is accepted, the smallest id that is no child.
        taken = tl.sum((is_child[:, None] & (token[:, None] == node[None, :])).to(tl.int32), 0)
        other = tl.min(tl.where(taken == 0, node, BLOCK))
        drafted = tl.sum(tl.where(node == child, token, 0))
        choice = tl.where((node == at) & (at >= 0), tl.where(child < BLOCK, drafted, other), choice)
        at = tl.where(child < BLOCK, child, -1)
    tl.store(choice_ptr + place * NODES + node, choice, mask=inside)


def draw_nodes(choices: Tensor, trees: Trees, ranks: Tensor, turns: Tensor, depth: int) -> None:
    """Overwrite the choices int32 [places, nodes] along the path that ``ranks`` accept in every active slot's tree.

    ``ranks``: as `draw_ranks`; ``turns`` int32 [slots]: rows of it that a slot has taken; ``depth``: levels of the
    tree. A program a place.
    """
    places, nodes = choices.shape
    _draw_nodes_kernel[(places,)](
        choices, trees, ranks, turns, NODES=nodes, BLOCK=max(16, triton.next_power_of_2(nodes)), DRAWN=len(ranks),
        LEVELS=LEVELS, DEPTH=depth, STRIDE=_SLOT_STRIDE, num_warps=4,
    )  # fmt: skip


class NodeDrawnDecoder(Decoder):
    """A decoder whose trees are accepted as ``ranks`` say, row by row, instead of as its target would."""

    def __init__(self, ranks: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks = ranks.to(self.target.device)
        self.turns = torch.zeros(self.num_slots, dtype=torch.int32, device=self.target.device)
        """Rows that each slot has taken."""

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:
        """Choose as usual, then draw, but for plain steps and prompts."""
        super().choose(logits, trees, rules, host, choices)
        if choices.shape[1] > 1:
            draw_nodes(choices, trees, self.ranks, self.turns, min(LEVELS, choices.shape[1]))
