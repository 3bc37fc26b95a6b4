"""Verdicts drawn instead of computed: for random weights, whose drafts no target would accept.

A step does all its usual work: the tree is drafted and verified, the target chooses its tokens. Only then,
inside the same graph, one more kernel overwrites some of the choices, so that the walk accepts a drawn path of the
drafted tree (`DrawnVerdicts`). What is accepted is counted as usual, too.

Drawn ahead, and taken in turn, each slot beginning elsewhere: lengths of paths, with a given mean (`draw_lengths`); or,
for shapes of trees side by side, the rank of the accepted child at each level (`draw_ranks`). What a tree is not deep
enough for is added to the slot's next length, so that the mean is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.step.partial import PartialChains
from eagle_slim.runtime.tree import Trees
from torch import Tensor

NUM_LENGTHS = 240
"""Lengths drawn ahead; runs of a multiple of as many steps together meet the mean to within half a 240th of a token."""
LATER = 0.2
"""Chance of each later rank, as a share of the one before it."""
NUM_RANKS, LEVELS = 4096, 16
_NONE = 1 << 20
"""Rank of no child."""
_SLOT_STRIDE = 37
"""Slots begin that far apart in what is drawn."""


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
    order = torch.randperm(NUM_LENGTHS, generator=torch.Generator().manual_seed(seed))
    drawn: list[int] = at_middles(high)[order].tolist()
    return drawn


def draw_ranks(chance: Callable[[int], float], seed: int = 0) -> Tensor:
    """Draw int32 [NUM_RANKS, LEVELS]: the accepted child's rank, where rank r has ``chance(level) * LATER ** r``."""
    levels = torch.tensor([chance(level) for level in range(LEVELS)], dtype=torch.float64)
    bounds = (levels[:, None] * LATER ** torch.arange(16)).cumsum(1)
    drawn = torch.rand((NUM_RANKS, LEVELS), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ranks = (drawn[..., None] >= bounds).sum(-1)
    return torch.where(ranks < 16, ranks, _NONE).to(torch.int32)


@triton.jit
def _draw_paths_kernel(
    choice_ptr,
    trees,
    drawn_ptr,
    turn_ptr,
    owed_ptr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWN: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    DEEPEST: tl.constexpr,
):
    place = tl.program_id(0)
    if place >= tl.load(trees.active_count):
        return
    slot = tl.load(trees.active_slots + place)
    turn = tl.load(turn_ptr + slot)
    tl.store(turn_ptr + slot, turn + 1)
    drawn = drawn_ptr + (turn + slot * STRIDE) % DRAWN * WIDTH
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    tree = slot.to(tl.int64) * NODES + node
    token = tl.load(trees.draft_tokens + tree, mask=inside, other=-1).to(tl.int32)
    parent = tl.load(trees.parents + tree, mask=inside, other=-2).to(tl.int32)
    choice = tl.load(choice_ptr + place * NODES + node, mask=inside, other=-1)
    # The end of the path.
    at = 0
    if WIDTH == 1:
        # Deepest first, then the lowest node.
        depth = tl.load(trees.positions + tree, mask=inside, other=BLOCK).to(tl.int32)
        length = tl.load(drawn) + tl.load(owed_ptr + slot)
        deepest = tl.max(tl.where(depth < length, depth * BLOCK + (BLOCK - 1 - node), -1))
        at = BLOCK - 1 - deepest % BLOCK
        tl.store(owed_ptr + slot, length - 1 - deepest // BLOCK)
    else:
        is_sibling = (parent[:, None] == parent[None, :]) & (node[None, :] < node[:, None])
        rank = tl.sum(is_sibling.to(tl.int32), 1)
        # Once there is no child, BLOCK, which is nobody's parent.
        child = 0
        for level in tl.static_range(DEEPEST):
            child = tl.min(tl.where((parent == child) & (rank == tl.load(drawn + level)), node, BLOCK))
            at = tl.where(child < BLOCK, child, at)
    accepted = tl.sum(tl.where(node == at, choice, 0))
    is_child = parent == at
    taken = tl.sum((is_child[:, None] & (token[:, None] == node[None, :])).to(tl.int32), 0)
    free = tl.min(tl.where(taken == 0, node, BLOCK))
    is_drafted = tl.sum((is_child & (token == accepted)).to(tl.int32)) > 0
    choice = tl.where(node == at, tl.where(is_drafted, free, accepted), choice)
    for _ in tl.static_range(DEEPEST):
        above = tl.sum(tl.where(node == at, parent, 0))
        drafted = tl.sum(tl.where(node == at, token, 0))
        choice = tl.where(node == above, drafted, choice)
        at = tl.where(above >= 0, above, at)
    tl.store(choice_ptr + place * NODES + node, choice, mask=inside)


def draw_paths(choices: Tensor, trees: Trees, drawn: Tensor, turns: Tensor, owed: Tensor) -> None:
    """Overwrite choices so that the walk accepts the next drawn path in the tree of every active slot.

    ``choices`` int32 [places, nodes]: the target's, overwritten along the path; ``drawn`` int32: lengths [count], or
    ranks [count, LEVELS]; ``turns`` int32 [slots]: rows of it that a slot has taken; ``owed`` int32 [slots]: tokens
    that lengths of before had beyond their trees. A length ends at the first of the nodes as deep as it allows; ranks
    end where a node has no such child. The target's own choice at the end stays, unless it is a drafted child; then it
    becomes the smallest id that is none. Trees of at most 16 levels; a program a place.
    """
    places, nodes = choices.shape
    _draw_paths_kernel[(places,)](
        choices,
        trees,
        drawn,
        turns,
        owed,
        NODES=nodes,
        BLOCK=max(16, triton.next_power_of_2(nodes)),
        DRAWN=len(drawn),
        WIDTH=drawn[0].numel(),
        STRIDE=_SLOT_STRIDE,
        DEEPEST=min(LEVELS, nodes) - 1,
        num_warps=4,
    )


class DrawnVerdicts:
    """Accepts ``drawn`` lengths or ranks of drafted trees, in turn, instead of the target's choices (`Revision`)."""

    def __init__(self, drawn: Sequence[int] | Tensor, num_slots: int, device: torch.device) -> None:
        self.drawn = torch.as_tensor(drawn, dtype=torch.int32, device=device)
        self.turns, self.owed = torch.zeros((2, num_slots), dtype=torch.int32, device=device)
        """Rows that each slot has taken, and tokens that it still owes."""

    def __call__(self, trees: Trees, choices: Tensor) -> None:
        """Overwrite the choices at all drafted trees."""
        draw_paths(choices, trees, self.drawn, self.turns, self.owed)


class DrawnSurvivals:
    """Confirms as many tokens of a full pass's ``chains`` as ``survivals``, in turn (`Revision`)."""

    def __init__(self, survivals: Sequence[int], chains: PartialChains) -> None:
        self.chains = chains
        self.survivals = torch.tensor(survivals, dtype=torch.int32, device=chains.lengths.device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=chains.lengths.device)

    def __call__(self, trees: Trees, choices: Tensor) -> None:
        """Shorten the chains to what survives, and overwrite the choices with them."""
        self.chains.lengths.clamp_(max=self.survivals[self.turn % len(self.survivals)])
        self.chains.accept_chains(trees, choices)
        self.turn += 1


def survivals(chance: float, longest: int, count: int) -> list[int]:
    """List numbers of tokens that are confirmed before the first that is not, ``longest`` at most.

    Their shares are those of a geometric law, in a seeded order; any ``count`` of them in turn have the same mean.
    """
    if chance >= 1:
        return [longest] * count
    middles = ((torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 0.5) / count).tolist()
    return [min(longest, int(math.log(middle) / math.log(chance))) for middle in middles]
