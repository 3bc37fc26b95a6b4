"""transformers' own warpers, which the choice of tokens must agree with."""

from __future__ import annotations

import torch
from eagle_slim.runtime.settings import SamplingConfig
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def warp(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Apply temperature and the cuts to float [rows, target_vocab]; excluded tokens get -inf. Returns float32."""
    scores = logits.float()
    ids = torch.empty((scores.shape[0], 0), dtype=torch.int64, device=scores.device)
    if sampling.temperature != 1.0:
        scores = TemperatureLogitsWarper(max(float(sampling.temperature), 1e-30))(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(int(sampling.top_k))(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores
