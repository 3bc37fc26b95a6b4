"""Results of a call of `SpeculativeModel.generate`, and where two answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import ModelOutput

from ..errors import EagleSlimError
from .request import RequestOutput
from .stats import GenerationStats


@dataclass(frozen=True)
class GenerationOutput:
    """Answers of one call: ``results`` in the order of the prompts, ``stats`` of all, ``sequences`` (`join_sequences`).

    It can be used as what transformers returns: see `RowsOutput`, and with ``return_dict_in_generate`` `DictOutput`.
    """

    sequences: Tensor = field(repr=False, compare=False)
    results: tuple[RequestOutput, ...]
    stats: GenerationStats
    seed: int | tuple[int, ...] | None = None
    """The seed that repeats the call's draws, or one for each prompt; None where nothing was drawn."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [result.token_ids for result in self.results]

    @property
    def text(self) -> list[str | None]:
        """New text of each prompt; None without a tokenizer."""
        return [result.text for result in self.results]


@dataclass(frozen=True)
class RowsOutput(GenerationOutput, list[Tensor]):
    """A `GenerationOutput` that is the list of its rows, and has what is usually asked of the tensor ``sequences``."""

    def __post_init__(self) -> None:
        self.extend(self.sequences)

    def __getitem__(self, key: Any) -> Any:
        return self.sequences[key]

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.sequences.shape

    def reshape(self, *shape: int) -> Tensor:
        """Return the tensor in another shape."""
        return self.sequences.reshape(*shape)

    def to(self, *place: Any, **options: Any) -> Tensor:
        """Return the tensor on another device or in another type."""
        return self.sequences.to(*place, **options)

    def cpu(self) -> Tensor:
        """Return the tensor on the CPU."""
        return self.sequences.cpu()

    def tolist(self) -> list[list[int]]:
        """Return the ids as lists."""
        return [row.tolist() for row in self]


@dataclass(frozen=True)
class DictOutput(GenerationOutput, ModelOutput):  # type: ignore[misc]  # transformers carries no types
    """A `GenerationOutput` that is a `ModelOutput` of ``sequences``."""

    def __post_init__(self) -> None:
        self["sequences"] = self.sequences


def join_sequences(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int, device: torch.device
) -> Tensor:
    """Join prompts, padded on the left, and answers, on the right: int64 [prompts, longest prompt + longest answer]."""
    joined = []
    for rows, side in ((prompts, "left"), (answers, "right")):
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        joined.append(pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side))
    return torch.cat(joined, 1).to(device)


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the place of the first token that differs, or that only one has; None where they are equal."""
    if list(tokens) == list(expected):
        return None
    pairs = enumerate(zip(tokens, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected)))


def difference(answer: str, tokens: Sequence[int], expected: Sequence[int], place: int, proof: str) -> EagleSlimError:
    """Return the error for a token that differs where none can; ``proof``: `GenerationStats.exactness`."""
    ends = [str(ids[place]) if place < len(ids) else "its end" for ids in (tokens, expected)]
    problem = f"{answer} differs from plain decoding at token {place}: {ends[0]} instead of {ends[1]}"
    advice = "please report it, with the prompt, the options, the GPU and the version of Triton"
    return EagleSlimError(f"{problem}. It cannot, as {proof}: {advice}.")
