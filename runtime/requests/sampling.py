"""Random numbers of a request, fixed by seed and position, and transformers' warpers, for scores that are reported.

Every request has one stream of uniform numbers, drawn from its own generator (seed, request index). The token at new
position i is chosen with number i of the stream (`step.kernels.choose_tokens`). So a request's sampled text depends on
neither the drafter, the tree, nor the rest of the batch: speculative and plain decoding give the same tokens for the
same seed, and the distribution is exactly the target's.
"""

from __future__ import annotations

import hashlib

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


def request_generator(seed: int, request_index: int) -> torch.Generator:
    """Return the generator of one request; different pairs give unrelated streams."""
    digest = hashlib.sha256(f"{seed}/{request_index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def uniform_stream(seed: int, request_index: int, length: int) -> Tensor:
    """Return the first ``length`` numbers of a request's stream: float64 [length] in [0, 1)."""
    return torch.rand(length, dtype=torch.float64, generator=request_generator(seed, request_index))


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
