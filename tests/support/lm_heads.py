"""What an LM head holds."""

import torch
from eagle_slim.convert.lm_head.lm_head import LmHead


def values(lm_head: LmHead) -> torch.Tensor:
    """The whole matrix [rows, hidden], read now."""
    return lm_head.checkpoint.tensor(lm_head.name)
