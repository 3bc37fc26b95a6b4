"""How much shorter accepted lengths get with fewer LM-head rows: what FR-Spec publishes, and SmolLM2 measured here.

FR-Spec (arXiv:2502.14856) ranks on SlimPajama for EAGLE-2 heads of Llama-3-8B, Llama-3.2-1B (depth 3, 30 nodes) and
Qwen2-7B. SmolLM2's are the greedy answers in ``results/2026-11-22-h200-generate.json``.
"""

from __future__ import annotations

import numpy as np
from eagle_slim.runtime.errors import UsageError

FR_SPEC = {
    "llama-3.1-8b": {8192: 3.13, 16384: 3.40, 32768: 3.63, 65536: 3.80, 128256: 3.89},
    "llama-3.2-1b": {8192: 2.486, 16384: 2.601, 32768: 2.690, 65536: 2.773, 128256: 2.809},
    "qwen3-8b": {8192: 3.10, 16384: 3.35, 32768: 3.57, 65536: 3.69, 151936: 3.74},
}
"""Mean accepted length by rows, the most of which are the whole vocabulary; by the nearest of `problem.MODELS`."""
SMOLLM2 = {8192: 3.0355, 16000: 3.0297, 32000: 3.0610, 49152: 3.0598}
"""The same of the built-in head. For other models it is taken by number of rows, whatever their vocabulary."""


def factor(lengths: dict[int, float], rows: int) -> float:
    """Accepted length over ``rows`` as a share of the full vocabulary's; between two sizes linear in log2(rows).

    From the most rows on it is 1. Raises `UsageError` below the smallest size.
    """
    sizes = sorted(lengths)
    if rows < sizes[0]:
        message = f"Accepted lengths are known from {sizes[0]} rows on, not of {rows}."
        raise UsageError(message)
    length = np.interp(np.log2(rows), np.log2(sizes), [lengths[size] for size in sizes])
    return float(length) / lengths[sizes[-1]]
