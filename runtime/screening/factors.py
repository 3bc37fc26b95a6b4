"""The second moment of states, and the screen that keeps most of the LM head for states of that moment.

With C the mean of ``h h^T``, damped, the rank-r matrix A B that is nearest to W in the mean of ``|W h - A B h|^2`` is
``A = W P``, ``B = V^T C^(-1/2)``, ``P = C^(1/2) V``, where V [hidden, r] are the first eigenvectors of
``C^(1/2) W^T W C^(1/2)`` (Eckart and Young, of ``W C^(1/2)``). That matrix is [hidden, hidden] however many rows W has,
and the factors of a smaller rank are the first columns and rows of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 8192


class SecondMoment:
    """The mean of ``h h^T`` over states, float64 [hidden, hidden], summed up as they come."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        self.total = torch.zeros((hidden, hidden), dtype=torch.float64, device=device)
        self.count = 0

    def add_(self, states: Tensor) -> None:
        """Take in states [states, hidden]."""
        wide = states.double()
        self.total.addmm_(wide.t(), wide)
        self.count += len(states)

    def damped(self, damping: float) -> Tensor:
        """The mean, with ``damping`` of its mean diagonal added along the diagonal: no direction is given up wholly."""
        mean = self.total / self.count
        return mean + damping * mean.diagonal().mean() * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)


@torch.inference_mode()
def screen_factors(moment: Tensor, lm_head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return P float32 [hidden, rank] and B float32 [rank, hidden], best column first.

    ``moment`` float64 [hidden, hidden], positive definite; ``lm_head`` [rows, hidden].
    """
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.sqrt()) @ vectors.t()
    inverse = (vectors / values.sqrt()) @ vectors.t()
    gram = torch.zeros_like(moment)
    for rows in lm_head.split(_ROWS):
        gram += (rows.float().t() @ rows.float()).double()
    best = torch.linalg.eigh(root @ gram @ root).eigenvectors.flip(1)[:, :rank]
    # An eigenvector's sign is open; one convention makes the factors those of any solver.
    largest = best.gather(0, best.abs().argmax(0, keepdim=True))
    best = best * largest.sign()
    return (root @ best).float(), (best.t() @ inverse).float().contiguous()


@torch.inference_mode()
def screen_rows(lm_head: Tensor, project: Tensor, dtype: torch.dtype) -> Tensor:
    """``W P`` of ``dtype`` [rows, rank], by way of float32; ``lm_head`` [rows, hidden], ``project`` [hidden, rank]."""
    return torch.cat([(rows.float() @ project).to(dtype) for rows in lm_head.split(_ROWS)])
