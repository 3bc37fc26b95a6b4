"""A prompt's keys and values, which are computed without attention, against those of a draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_slim.runtime.drafter.drafter import Drafter
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
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
def test_a_prompts_keys_are_those_of_a_draft(kind: str) -> None:
    """Pairs that a draft takes in and pairs of a prompt have the same keys and values."""
    sizes, options = HEADS[kind]
    head = with_options(random_head(**sizes), **options)
    prompt = torch.randint(300, (9,), generator=torch.Generator().manual_seed(2))
    features = torch.randn(9, head.feature_width, generator=torch.Generator().manual_seed(3))
    mine, theirs = (Drafter(head, TREE).on_slots(1, 32) for _ in range(2))
    box = PromptBox.allocate(32, "cpu")
    box.numbers[1] = 9
    box.tokens[:9] = prompt
    chunk = ChunkRows.allocate(16, torch.zeros(1, dtype=torch.int32))
    chunk_rows_ref(box, chunk)
    padded = torch.zeros(16, head.feature_width)
    padded[:9] = features
    forward = chunk.forward
    mine.prefill(padded, chunk.next_tokens, forward.positions, chunk.pair_rows, forward.attention.slots)
    theirs.features[0, :8] = features[:-1]
    theirs.bufs.set_step([0], [prompt[1:].tolist()], [0])
    theirs.draft()
    for name in ("keys", "values"):
        found, expected = (getattr(each.bufs, name)[0, :, :8] for each in (mine, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
