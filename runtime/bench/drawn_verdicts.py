"""Verdicts drawn instead of computed: benchmarks of random weights, whose drafts no target would accept.

Everything of a step is done as ever: the tree is drafted and verified, the target chooses its tokens. Only then,
inside the same graph, one more kernel overwrites some of the choices, so that the walk accepts a path of a drawn length
that the drafted tree has. What is accepted is counted as ever, too.

Lengths are drawn ahead (`draw_lengths`), with a given mean, and taken in turn, each slot beginning elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UsageError
from ..generation.decoder import DeviceDecoder
from .draw_paths import draw_paths, draw_paths_ref

NUM_LENGTHS = 240
"""Lengths drawn ahead; who runs a multiple of as many steps meets the mean to within half a 240th of a token."""
NUM_PARTS = 4
"""Parts of these that each have nearly the mean, for who runs fewer."""


def draw_lengths(mean: float, longest: int, seed: int = 0) -> list[int]:
    """Draw `NUM_LENGTHS` accepted lengths of 1 to ``longest`` tokens in a seeded order.

    Their shares are those of a geometric law cut off at ``longest``, as if every next token were accepted with one
    probability. Raises `UsageError` for a mean that no such law has.
    """
    if not 1 <= mean <= longest:
        raise UsageError(
            f"A mean accepted length of {mean} is not between 1 and the longest, {longest}.",
            option="accepted", found=mean, expected=longest,
        )  # fmt: skip
    lengths = torch.arange(1, longest + 1, dtype=torch.float64)
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        is_below = float(torch.softmax((lengths - 1) * middle, 0) @ lengths) < mean
        low, high = (middle, high) if is_below else (low, middle)
    exact = torch.softmax((lengths - 1) * low, 0) * NUM_LENGTHS
    counts = exact.floor()
    counts[torch.argsort(exact - counts, descending=True, stable=True)[: NUM_LENGTHS - int(counts.sum())]] += 1
    missing = round(mean * NUM_LENGTHS) - int(counts @ lengths)
    step = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        # Rounding has moved the sum by a token or two: the commonest length that can gives or takes one.
        movable = counts[:-1] if step > 0 else counts[1:]
        place = int(movable.argmax()) + (step < 0)
        counts[place] -= 1
        counts[place + step] += 1
    ordered = lengths.repeat_interleave(counts.long()).long().tolist()
    # Dealt out to and fro, so that every part has nearly the mean.
    dealt = [*range(NUM_PARTS), *reversed(range(NUM_PARTS))]
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for part in range(NUM_PARTS):
        own = [length for place, length in enumerate(ordered) if dealt[place % len(dealt)] == part]
        drawn += [own[place] for place in torch.randperm(len(own), generator=generator).tolist()]
    return drawn


class DrawnVerdicts:
    """Lengths that a decoder's steps accept instead of what its target would; before anything of it is captured.

    They may be exchanged at any time (`set_`): graphs read them from the device.
    """

    def __init__(self, decoder: DeviceDecoder) -> None:
        if decoder.drafter is None:
            raise UsageError("Plain decoding accepts no drafted tokens; draw verdicts of a drafting decoder.")
        device = decoder.target.device
        self.longest = decoder.width
        self.lengths = torch.ones(NUM_LENGTHS, dtype=torch.int32, device=device)
        self.turns = torch.zeros(decoder.num_slots, dtype=torch.int32, device=device)
        self._positions = decoder.drafter.bufs.tree_position_ids
        self._state = decoder.state
        self._walk = decoder.ops.walk
        self._draw: Callable[..., None] = draw_paths if device.type == "cuda" else draw_paths_ref
        decoder.ops = replace(decoder.ops, walk=self._draw_and_walk)

    def set_(self, lengths: list[int], turn: int = 0) -> None:
        """Take these from now on, as if every slot had taken ``turn`` of them before."""
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.turns.fill_(turn)

    def _draw_and_walk(self, choices: Tensor, draft_tokens: Tensor, parents: Tensor, *rest: object) -> None:
        # A prompt's last chunk walks over its root alone.
        if parents.shape[1] == self._positions.shape[1]:
            self._draw(
                choices, draft_tokens, parents, self._positions, self._state.active_slots, self._state.active_count,
                self.lengths, self.turns,
            )  # fmt: skip
        self._walk(choices, draft_tokens, parents, *rest)
