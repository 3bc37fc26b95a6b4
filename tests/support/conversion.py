"""A conversion in one call: options as keywords."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from eagle_slim.convert import Conversion, ConvertOptions, VocabRequest, convert_head
from eagle_slim.vocab_tools.counting import count_tokens
from safetensors.torch import load_file

from .heads import write_freq

BY_ID = VocabRequest(order="ids")


def by_map(folder: Path, ids: Iterable[int]) -> VocabRequest:
    return VocabRequest(token_map=write_freq(folder / "freq.pt", ids))


def convert_all(head=None, *, count=count_tokens, say=lambda message: None, **options):
    """`convert_head` with the fields of `ConvertOptions` as keywords."""
    return convert_head(head, ConvertOptions(**options), count=count, say=say)


def convert(head: str | Path | None = None, **options: Any) -> Conversion:
    (done,) = convert_all(head, **options)
    return done


def written(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
