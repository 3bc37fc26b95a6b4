"""Results of a call of `SpeculativeModel.generate`, and where two answers differ."""

from __future__ import annotations

from collections import OrderedDict
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
    """Answers of one call: ``results`` in the order of the prompts, ``stats`` of all of them together.

    ``sequences``: prompts and answers, int64 [prompts, longest prompt + longest answer] (`join_sequences`).
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
class RowsOutput(GenerationOutput, tuple[Tensor, ...]):
    """A `GenerationOutput` that is used like the tensor ``sequences``.

    It is the tuple of its rows, which a tokenizer's ``batch_decode`` takes, and has the tensor's indices and methods.
    """

    def __new__(cls, sequences: Tensor, *_: Any, **__: Any) -> RowsOutput:
        """Make the tuple; arguments are the fields."""
        return tuple.__new__(cls, sequences)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.sequences[key]

    def __getattr__(self, name: str) -> Any:
        # Protocols such as copying are the tuple's own.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.sequences, name)


@dataclass(frozen=True)
class DictOutput(GenerationOutput, ModelOutput):  # type: ignore[misc]  # transformers carries no types
    """A `GenerationOutput` that is a `ModelOutput` of ``sequences``."""

    def __post_init__(self) -> None:
        OrderedDict.__setitem__(self, "sequences", self.sequences)


def join_sequences(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int, device: torch.device
) -> Tensor:
    """Join prompts and new tokens: int64 [prompts, longest prompt + longest answer], as transformers returns them.

    Prompts stand as they were given, padded on the left where their lengths differ; answers are padded on the right. So
    ``sequences[:, input_ids.shape[1]:]`` are the answers.
    """
    joined = []
    for rows, side in ((prompts, "left"), (answers, "right")):
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        joined.append(pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side))
    return torch.cat(joined, 1).to(device)


def first_difference(found: Sequence[int], own: Sequence[int]) -> int | None:
    """Return the place of the first token that differs, or that only one has; None where they are equal."""
    if list(found) == list(own):
        return None
    return next((i for i, (a, b) in enumerate(zip(found, own, strict=False)) if a != b), min(len(found), len(own)))


def difference(answer: str, found: Sequence[int], own: Sequence[int], place: int, proof: str) -> EagleSlimError:
    """Return the error for a token that differs where none can; ``proof``: `GenerationStats.exactness`."""
    ends = [str(tokens[place]) if place < len(tokens) else "its end" for tokens in (found, own)]
    return EagleSlimError(
        f"{answer} differs from plain decoding at token {place}: {ends[0]} instead of {ends[1]}. It cannot, "
        f"as {proof}: please report it, with the prompt, the options, the GPU and the version of Triton."
    )
