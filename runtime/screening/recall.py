"""What a screen keeps: the share of the exact top 10's probability that its candidates hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..drafter.screen import Screen

TOP = 10
"""Children of a node in the default tree."""
_STATES = 64


@torch.inference_mode()
def recall(screen: Screen, states: Tensor, lm_head: Tensor, ranks: Iterable[int]) -> dict[int, float]:
    """Mean over states of the share of their best rows' probability that is among the candidates, for each rank.

    ``states`` [states, hidden] and ``lm_head`` [rows, hidden] of one type; ``ranks``: at most the screen's. The best
    rows are the 10 that are most probable by all rows' logits, or all where there are fewer.
    """
    smaller = {rank: _cut(screen, rank) for rank in ranks}
    kept = dict.fromkeys(smaller, 0.0)
    for part in states.split(_STATES):
        logits = torch.nn.functional.linear(part, lm_head).float()
        best, rows = logits.topk(min(TOP, logits.shape[1]))
        share = best.softmax(-1)
        for rank, cut in smaller.items():
            # Row -1, of groups that have no more, gets a place of its own in front.
            found = torch.zeros((len(part), len(lm_head) + 1), dtype=torch.bool, device=part.device)
            found.scatter_(1, cut.candidates(part) + 1, True)
            kept[rank] += float((share * found.gather(1, rows + 1)).sum())
    return {rank: min(1.0, total / len(states)) for rank, total in kept.items()}


def _cut(screen: Screen, rank: int) -> Screen:
    """The screen of a smaller rank."""
    rows, project = (tensor[:, :rank].contiguous() for tensor in (screen.rows, screen.project))
    return Screen(rows, screen.down[:rank].contiguous(), project, screen.groups, screen.per_group)
