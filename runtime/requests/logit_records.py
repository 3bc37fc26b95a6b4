"""Logits and scores of the tokens that were kept, for callers who ask for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..settings import SamplingConfig
from .sampling import warp


@dataclass
class LogitRecord:
    """Listens at both ends of a request's logits processors, wherever a token is chosen.

    Positions of drafts that are not kept are overwritten when the position is chosen again, so what is there at the end
    belongs to the tokens of the answer.
    """

    sampling: SamplingConfig
    _logits: dict[int, Tensor] = field(default_factory=dict)
    _scores: dict[int, Tensor] = field(default_factory=dict)

    def before(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Keep the target's logits, float32 [1, vocab], after the tokens int64 [1, seq]; return them as they are."""
        self._logits[input_ids.shape[1]] = logits[0].clone()
        return logits

    def after(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Keep what the processors made of them."""
        self._scores[input_ids.shape[1]] = logits[0].clone()
        return logits

    def logits(self, prompt_length: int, num_tokens: int) -> Tensor:
        """Return the target's logits for each new token: float32 [num_tokens, vocab]."""
        return _stack(self._logits, prompt_length, num_tokens)

    def scores(self, prompt_length: int, num_tokens: int) -> Tensor:
        """Return the scores that each new token was chosen by, processed and warped: float32 [num_tokens, vocab]."""
        scores = _stack(self._scores, prompt_length, num_tokens)
        return scores if self.sampling.is_greedy or not num_tokens else warp(scores, self.sampling)


def _stack(rows: dict[int, Tensor], first: int, count: int) -> Tensor:
    found = [rows[place] for place in range(first, first + count)]
    return torch.stack(found) if found else torch.empty((0, 0))
