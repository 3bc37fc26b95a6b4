"""Sampling of tokens: transformers' own warpers, and the race in float64 that every implementation is held to."""

import numpy as np
import torch
from eagle_slim.runtime.settings import SamplingConfig
from torch import Tensor
from transformers.generation import logits_process as warpers


def splitmix(key: int, ids: Tensor) -> np.ndarray:
    """Outputs number id + 1 of SplitMix64 seeded with a key: uint64, one for each id."""
    with np.errstate(over="ignore"):
        place = ids.numpy().astype(np.uint64) + np.uint64(1)
        bits = np.uint64(key % (1 << 64)) + place * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def exponentials(key: int, ids: Tensor) -> Tensor:
    """Exponential variables of ids: float64."""
    bits = (splitmix(key, ids) >> np.uint64(11)).astype(np.float64)
    return torch.from_numpy(-np.log1p(-np.maximum(bits, 1) / 2**53))


def first_in_race(scores: Tensor, key: int) -> int:
    """The id whose exponential variable over its probability is smallest; ``scores`` float [vocab], -inf left out."""
    ids = (scores > -torch.inf).nonzero()[:, 0]
    left = scores[ids].double().cpu()
    arrivals = exponentials(key, ids.cpu()).log() + (left.max() - left)
    return int(ids[int(arrivals.argmin())])


def warp(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Apply temperature and the cuts to float [rows, target_vocab]; excluded tokens get -inf. Returns float32."""
    scores = logits.float()
    ids = torch.empty((scores.shape[0], 0), dtype=torch.int64, device=scores.device)
    if sampling.temperature != 1.0:
        scores = warpers.TemperatureLogitsWarper(max(float(sampling.temperature), 1e-30))(ids, scores)
    if sampling.top_k:
        scores = warpers.TopKLogitsWarper(int(sampling.top_k))(ids, scores)
    if sampling.top_p < 1.0:
        scores = warpers.TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p > 0:
        scores = warpers.MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores
