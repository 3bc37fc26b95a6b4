"""Pairs that wait for the drafter: those of tokens that came without a draft enter its cache as a prompt's do."""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter
from .kernels.acceptance import SlotState


def take_pairs(drafter: BufferedDrafter, waiting: SlotState, features: Tensor) -> None:
    """Put the waiting pairs of the active slots but the last of each, which a draft begins with, into the cache.

    ``waiting``: a state whose ``prefix``, ``num_new`` and ``new_tokens`` belong to ``features`` [slots, width,
    feature_width]. They become the inputs of ``drafter``, which may be the same tensors. Waits for nothing.
    """
    slots, width = waiting.new_tokens.shape
    step = torch.arange(width, dtype=torch.int32, device=waiting.prefix.device)
    rows = waiting.prefix[:, None] + step
    # Nothing of a slot that does not run, so that this may be practised while others do.
    last = torch.where(waiting.active_inverse >= 0, waiting.num_new - 1, 0).clamp(min=0)
    is_before = step < last[:, None]
    drafter.prefill(
        features.flatten(0, 1), waiting.new_tokens.clamp(min=0).flatten(), torch.where(is_before, rows, 0).flatten(),
        torch.where(is_before, rows, -1).flatten(), torch.arange(slots, dtype=torch.int32, device=step.device),
    )  # fmt: skip
    at = last[:, None].long()
    newest = waiting.new_tokens.gather(1, at)
    feature = features.gather(1, at[..., None].expand(-1, 1, features.shape[2]))
    drafter.bufs.prefix.copy_(waiting.prefix + last)
    drafter.bufs.new_tokens[:, :1] = newest
    drafter.features[:, :1] = feature
    drafter.bufs.num_new.copy_(waiting.num_new - last)
