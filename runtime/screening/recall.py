"""What a screen keeps: the share of the exact top 10's probability that its candidates hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
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
    factors = {rank: (screen.rows[:, :rank].contiguous(), screen.down[:rank].to(states.dtype)) for rank in ranks}
    kept = dict.fromkeys(factors, 0.0)
    for part in states.split(_STATES):
        logits = F.linear(part, lm_head).float()
        best, rows = logits.topk(min(TOP, logits.shape[1]))
        share = best.softmax(-1)
        for rank, (own, down) in factors.items():
            scores = F.linear(F.linear(part, down), own).float()
            kept[rank] += float((share * are_candidates(scores, rows, screen.groups, screen.per_group)).sum())
    return {rank: min(1.0, total / len(states)) for rank, total in kept.items()}


def are_candidates(scores: Tensor, rows: Tensor, groups: int, per_group: int) -> Tensor:
    """Whether `best_of_groups` chooses these rows: bool [states, n], in a tenth of its time.

    ``scores`` float32 [states, all rows], ``rows`` int64 [states, n]. A row is chosen if fewer than ``per_group`` of
    its group come before it.
    """
    depth = -(-scores.shape[1] // groups)
    padded = F.pad(scores, (0, depth * groups - scores.shape[1]), value=float("-inf")).unflatten(1, (depth, groups))
    group = (rows % groups)[:, None].expand(-1, depth, -1)
    others, mine = padded.gather(2, group), scores.gather(1, rows)[:, None]  # [states, depth, n], [states, 1, n]
    is_earlier = torch.arange(depth, device=rows.device)[:, None] < (rows // groups)[:, None]
    chosen: Tensor = ((others > mine) | ((others == mine) & is_earlier)).sum(1) < per_group
    return chosen
