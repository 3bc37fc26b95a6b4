"""Random numbers of a request, fixed by seed and position, and the scores that are reported of its tokens.

Every request has one stream of keys, drawn from its own generator (seed, and place in the call, or among the answers to
its prompt where that has a seed of its own). The token at new position i is chosen by the noise that key i gives each
id (`step.kernels.token_noise`). So a request's sampled text depends on neither the drafter, the tree, nor the rest of
the batch: speculative and plain decoding give the same tokens for the same seed, and the distribution is the target's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..settings import SamplingConfig

# The largest logit has all the probability long before this; colder, its quotient would overflow float32.
_COLDEST = 1e-30


def noise_keys(seed: int, request_index: int, length: int) -> Tensor:
    """Return the first ``length`` keys of a request's stream: int64 [length], none negative.

    Different pairs of seed and index give unrelated streams.
    """
    digest = hashlib.sha256(f"{seed}/{request_index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(length, dtype=torch.int64).random_(generator=generator)


def warp(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Apply temperature and the cuts to float [rows, target_vocab]; excluded tokens get -inf. Returns float32."""
    scores = logits.float()
    ids = torch.empty((scores.shape[0], 0), dtype=torch.int64, device=scores.device)
    if sampling.temperature != 1.0:
        scores = TemperatureLogitsWarper(max(float(sampling.temperature), _COLDEST))(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(int(sampling.top_k))(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    if sampling.typical_p < 1.0:
        scores = TypicalLogitsWarper(sampling.typical_p)(ids, scores)
    assert isinstance(scores, Tensor)
    return scores


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
