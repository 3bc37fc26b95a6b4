"""A prompt's keys and values, which the drafter over buffers computes without attention, against the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.drafter.buffered import BufferedDrafter
from eagle_slim.runtime.drafter.reference import ReferenceDrafter
from eagle_slim.runtime.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
from support.drafting import random_head, with_options

TREE = TreeConfig(1, 2, 5)
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({}, {}),
    "biases": ({"qkv_bias": True}, {"o_bias": True, "mlp_bias": True}),
    "all taps normed": ({}, {"tap_norms": 1, "norm_before_residual": True, "norm_output": True}),
    "each tap normed": ({}, {"tap_norms": 3, "sliding_window": 2}),
    "eagle": ({"kind": "eagle"}, {}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_prompts_keys_are_the_references(kind: str) -> None:
    sizes, options = HEADS[kind]
    head = with_options(random_head(**sizes), **options)
    prompt = torch.randint(300, (9,), generator=torch.Generator().manual_seed(2))
    features = torch.randn(9, head.feature_width, generator=torch.Generator().manual_seed(3))
    drafter = BufferedDrafter(head, TREE, num_slots=1, capacity=32, backend="reference")
    box = PromptBox.allocate(32, "cpu")
    box.numbers[1] = 9
    box.tokens[:9] = prompt
    chunk = ChunkRows.allocate(16, torch.zeros(1, dtype=torch.int32))
    chunk_rows_ref(box, chunk)
    padded = torch.zeros(16, head.feature_width)
    padded[:9] = features
    drafter.prefill(padded, chunk)
    reference = ReferenceDrafter(head, TREE)
    reference.allocate(1, 32)
    reference.prefill(0, features[:-1], prompt[1:])
    assert reference._cache is not None
    for name in ("keys", "values"):
        mine, theirs = getattr(drafter.bufs, name)[0, :, :8], getattr(reference._cache, name)[0, :, :8]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
