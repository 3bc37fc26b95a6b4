"""Choosing the target's next token: greedy, or sampled from the warped distribution with draws fixed by position.

Every request has one stream of uniform numbers, drawn from its own generator (seed, request index). The token at new
position i is chosen with number i of the stream, by inverting the cumulative distribution in id order. So a request's
sampled text depends on neither the drafter, the tree, nor the rest of the batch: speculative and plain decoding give
the same tokens for the same seed, and the distribution is exactly the target's.

The warpers are transformers' own, in its order: temperature, top-k, top-p, min-p, typical.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..config import SamplingConfig

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


def choose_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> Tensor:
    """Choose one token per row: float [rows, target_vocab] and float64 [rows] to int64 [rows].

    Greedy takes the lowest id among equals and ignores ``uniforms``.
    """
    if sampling.is_greedy:
        return logits.argmax(-1)
    cumulative = warp(logits, sampling).softmax(-1, dtype=torch.float64).cumsum(-1)
    # Scaled by the total, so that rounding cannot leave a draw beyond the last token.
    points = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def stream_window(streams: Sequence[Tensor], starts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Cut ``width`` numbers from each stream at its start, zeros beyond its end: float64 [requests, width]."""
    window = torch.zeros((len(streams), width), dtype=torch.float64)
    for row, (stream, start) in enumerate(zip(streams, starts, strict=True)):
        piece = stream[start : start + width]
        window[row, : len(piece)] = piece
    return window.to(device)
