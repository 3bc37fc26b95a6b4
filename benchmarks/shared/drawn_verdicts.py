"""Verdicts drawn instead of computed: for random weights, whose drafts no target would accept.

A step does all its usual work: the tree is drafted and verified, the target chooses its tokens. Only then,
inside the same graph, one more kernel overwrites some of the choices, so that the walk accepts a path of a drawn length
that the drafted tree has (`DrawnDecoder`). What is accepted is counted as usual, too.

Lengths are drawn ahead (`draw_lengths`), with a given mean, and taken in turn, each slot beginning elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.step.choice import HostChoice
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.tree import Trees
from torch import Tensor

NUM_LENGTHS = 240
"""Lengths drawn ahead; a run of a multiple of as many steps meets the mean to within half a 240th of a token."""
NUM_PARTS = 4
"""Parts of these that each have nearly the mean, for runs of fewer steps."""


def draw_lengths(mean: float, longest: int, seed: int = 0) -> list[int]:
    """Draw `NUM_LENGTHS` accepted lengths of 1 to ``longest`` tokens in a seeded order.

    Their shares are those of a geometric law cut off at ``longest``, as if every next token were accepted with one
    probability. Raises `UsageError` for a mean that no such law has.
    """
    if not 1 <= mean <= longest:
        raise UsageError(f"A mean accepted length of {mean} is not between 1 and the longest, {longest}.")
    lengths = torch.arange(1, longest + 1, dtype=torch.float64)
    middles = (torch.arange(NUM_LENGTHS, dtype=torch.float64) + 0.5) / NUM_LENGTHS

    def at_middles(tilt: float) -> Tensor:
        below = torch.softmax((lengths - 1) * tilt, 0).cumsum(0)[:-1]
        return 1 + torch.searchsorted(below, middles)

    # The sum grows with the tilt, a token at a time.
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        is_below = int(at_middles(middle).sum()) < round(mean * NUM_LENGTHS)
        low, high = (middle, high) if is_below else (low, middle)
    # Dealt out to and fro, so that every part has nearly the mean.
    dealt = [*range(NUM_PARTS), *reversed(range(NUM_PARTS))]
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for part in range(NUM_PARTS):
        own = [length for place, length in enumerate(at_middles(high).tolist()) if dealt[place % len(dealt)] == part]
        drawn += [own[place] for place in torch.randperm(len(own), generator=generator).tolist()]
    return drawn


_SLOT_STRIDE = 37
"""Slots begin that far apart in the table of lengths."""


@triton.jit
def _draw_paths_kernel(
    choice_ptr, trees, length_ptr, turn_ptr, NODES: tl.constexpr, BLOCK: tl.constexpr, LENGTHS: tl.constexpr,
    STRIDE: tl.constexpr, DEEPEST: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if place >= tl.load(trees.active_count):
        return
    slot = tl.load(trees.active_slots + place)
    turn = tl.load(turn_ptr + slot)
    tl.store(turn_ptr + slot, turn + 1)
    wanted = tl.load(length_ptr + (turn + slot * STRIDE) % LENGTHS)
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    tree = slot.to(tl.int64) * NODES + node
    token = tl.load(trees.draft_tokens + tree, mask=inside, other=-1).to(tl.int32)
    parent = tl.load(trees.parents + tree, mask=inside, other=-2).to(tl.int32)
    depth = tl.load(trees.positions + tree, mask=inside, other=BLOCK).to(tl.int32)
    choice = tl.load(choice_ptr + place * NODES + node, mask=inside, other=-1)
    # Deepest first, then the lowest node.
    rank = tl.where(depth < wanted, depth * BLOCK + (BLOCK - 1 - node), -1)
    at = BLOCK - 1 - tl.max(rank) % BLOCK
    own = tl.sum(tl.where(node == at, choice, 0))
    is_child = parent == at
    taken = tl.sum((is_child[:, None] & (token[:, None] == node[None, :])).to(tl.int32), 0)
    free = tl.min(tl.where(taken == 0, node, BLOCK))
    is_drafted = tl.sum((is_child & (token == own)).to(tl.int32)) > 0
    choice = tl.where(node == at, tl.where(is_drafted, free, own), choice)
    for _ in tl.static_range(DEEPEST):
        above = tl.sum(tl.where(node == at, parent, 0))
        drafted = tl.sum(tl.where(node == at, token, 0))
        choice = tl.where(node == above, drafted, choice)
        at = tl.where(above >= 0, above, at)
    tl.store(choice_ptr + place * NODES + node, choice, mask=inside)


def draw_paths(choices: Tensor, trees: Trees, lengths: Tensor, turns: Tensor) -> None:
    """Have the walk follow a path of the next drawn length in the tree of every active slot.

    ``choices`` int32 [places, nodes]: the target's, overwritten along the path; ``lengths`` int32 [count]; ``turns``
    int32 [slots]: lengths that a slot has taken. The path ends at the first of the nodes as deep as the drawn length
    allows: the drafted tokens and the target's own choice there, which stays unless it is a drafted child; then it
    becomes the smallest id that is none. Trees of at most 16 levels; a program a place.
    """
    places, nodes = choices.shape
    _draw_paths_kernel[(places,)](
        choices, trees, lengths, turns, NODES=nodes, BLOCK=max(16, triton.next_power_of_2(nodes)),
        LENGTHS=len(lengths), STRIDE=_SLOT_STRIDE, DEEPEST=15, num_warps=4,
    )  # fmt: skip


class DrawnDecoder(Decoder):
    """A drafting decoder whose steps accept ``lengths``, in turn, instead of what its target would."""

    def __init__(self, lengths: Sequence[int], *args: Any) -> None:
        super().__init__(*args)
        device = self.target.device
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.turns = torch.zeros(self.num_slots, dtype=torch.int32, device=device)
        """Lengths that each slot has taken."""

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:
        """Choose as usual, then draw."""
        super().choose(logits, trees, rules, host, choices)
        draw_paths(choices, trees, self.lengths, self.turns)
