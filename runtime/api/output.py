"""Results of a call of `SpeculativeModel.generate`, and where two answers differ."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
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

    It can be used as what transformers returns: see `RowsOutput`, and with ``return_dict_in_generate`` `DictOutput`.
    """

    results: tuple[RequestOutput, ...]
    stats: GenerationStats
    pad_token_id: int = 0
    seed: int | tuple[int, ...] | None = None
    """The seed that repeats the call's draws, or one for each prompt; None where nothing was drawn."""
    rows: tuple[tuple[int, ...], ...] | None = None
    """The prompts as they were given, padding included; None: as in ``results``."""
    device: torch.device | str = "cpu"
    """Device of ``sequences``: that of the prompts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def sequences(self) -> Tensor:
        """Prompt and new tokens: int64 [prompts, longest prompt + longest answer], as transformers returns them.

        Prompts stand as they were given, padded on the left where their lengths differ; answers are padded on the
        right. So ``sequences[:, input_ids.shape[1]:]`` are the answers.
        """
        return _join(self.results, self.pad_token_id, self.rows, self.device)

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [result.token_ids for result in self.results]

    @property
    def text(self) -> list[str | None]:
        """New text of each prompt; None without a tokenizer."""
        return [result.text for result in self.results]

    @property
    def shape(self) -> torch.Size:
        """Shape of ``sequences``."""
        return self.sequences.shape


@dataclass(frozen=True)
class RowsOutput(GenerationOutput, tuple[Tensor, ...]):
    """A `GenerationOutput` that is used like the tensor ``sequences``.

    It is the tuple of its rows, which a tokenizer's ``batch_decode`` takes, and has the tensor's indices and methods.
    """

    def __new__(
        cls,
        results: tuple[RequestOutput, ...],
        stats: GenerationStats,
        pad_token_id: int = 0,
        seed: int | tuple[int, ...] | None = None,
        rows: tuple[tuple[int, ...], ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> RowsOutput:
        """Make the tuple; arguments are the fields."""
        return tuple.__new__(cls, _join(results, pad_token_id, rows, device))

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.sequences[key]

    def __getattr__(self, name: str) -> Any:
        # Protocols such as copying are the tuple's own.
        if name.startswith("_") or name == "sequences":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.sequences, name)


@dataclass(frozen=True)
class DictOutput(GenerationOutput, ModelOutput):  # type: ignore[misc]  # transformers carries no types
    """A `GenerationOutput` that is a `ModelOutput` of ``sequences``."""

    def __post_init__(self) -> None:
        OrderedDict.__setitem__(self, "sequences", self.sequences)


def first_difference(found: Sequence[int], own: Sequence[int]) -> int | None:
    """Place of the first token that differs, or that only one of both has; None where they are equal."""
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


def _join(
    results: tuple[RequestOutput, ...],
    pad_token_id: int,
    rows: tuple[tuple[int, ...], ...] | None,
    device: torch.device | str,
) -> Tensor:
    given = [torch.tensor(row, dtype=torch.int64) for row in rows or [result.prompt_ids for result in results]]
    prompts = pad_sequence(given, batch_first=True, padding_value=pad_token_id, padding_side="left")
    new = [torch.tensor(result.token_ids, dtype=torch.int64) for result in results]
    answers = pad_sequence(new, batch_first=True, padding_value=pad_token_id)
    return torch.cat([prompts, answers], 1).to(device)
