"""What an LM head holds."""

import torch
from eagle_slim.convert.rows.lm_head import LmHead
from eagle_slim.convert.rows.target import open_target_lm_head
from eagle_slim.convert.sources.source import target_files


def values(lm_head: LmHead) -> torch.Tensor:
    """The whole matrix [rows, hidden], read now."""
    return lm_head.checkpoint.tensor(lm_head.name)


def open_lm_head(name: str, revision: str | None = None, offline: bool = False) -> LmHead:
    """The LM head of a target of the Hub."""
    return open_target_lm_head(target_files(name, revision, offline), offline)
