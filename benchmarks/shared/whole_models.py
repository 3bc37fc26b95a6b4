"""Models of the size of real ones, with random weights, for calls of `generate`."""

from __future__ import annotations

from typing import Any

import torch
from eagle_slim.convert.heads.taps import default_taps
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compiling.pool import pool_for
from eagle_slim.runtime.drafter.drafter import choose_drafter
from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head
from eagle_slim.runtime.step.shapes import LARGE
from eagle_slim.runtime.target.wrapper import TargetModel

from .decoding import random_target


def model_of_8b(
    device: torch.device, tokenizer: Any | None = None, max_model_len: int | None = None
) -> SpeculativeModel:
    """Build a model of Llama-3.1-8B's dimensions with a head of 32,000 rows; other arguments as of the model."""
    compiler = pool_for(device)
    assert compiler is not None
    compiler.prepare()
    dims = MODELS["llama-3.1-8b"]
    model: Any = random_target("llama-3.1-8b", dims, torch.bfloat16, device, "bf16")
    target = TargetModel(model, default_taps(model.config.num_hidden_layers), "fused")
    head = random_head(dims, device).of_rows(slice(32000))
    return SpeculativeModel(target, choose_drafter("auto", head, LARGE), tokenizer, max_model_len, is_tree_sized=True)
