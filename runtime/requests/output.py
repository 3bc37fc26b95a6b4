"""What a call of `SpeculativeModel.generate` returns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import ModelOutput

from .requests import RequestOutput
from .stats import GenerationStats


@dataclass(frozen=True)
class GenerationOutput:
    """Answers of one call: ``results`` in the order of the prompts, ``stats`` of all of them together.

    It can be used as what transformers returns: see `RowsOutput`, and with ``return_dict_in_generate`` `DictOutput`.
    """

    results: tuple[RequestOutput, ...]
    stats: GenerationStats
    pad_token_id: int = 0
    seed: int | None = None
    """What repeats the call's draws; None where nothing was drawn, and where prompts had ``seeds``."""
    seeds: tuple[int, ...] | None = None
    """Likewise, of each prompt."""
    rows: tuple[tuple[int, ...], ...] | None = None
    """The prompts as they were given, padding included; None: as in ``results``."""
    device: torch.device | str = "cpu"
    """Of ``sequences``: where the prompts were given."""
    has_scores: bool = False
    has_logits: bool = False

    sequences: Tensor = field(init=False, repr=False)
    """Prompt and new tokens: int64 [prompts, longest prompt + longest answer], as transformers returns them.

    Prompts stand as they were given, padded on the left where their lengths differ; answers are padded on the right. So
    ``sequences[:, input_ids.shape[1]:]`` are the answers.
    """
    scores: tuple[Tensor, ...] | None = field(init=False, repr=False)
    """Processed scores by position, each float32 [prompts, target_vocab]; 0 after the end of an answer.

    None unless ``output_scores`` was asked for.
    """
    logits: tuple[Tensor, ...] | None = field(init=False, repr=False)
    """The target's own logits, in the form of ``scores``; None unless ``output_logits`` was asked for."""

    def __post_init__(self) -> None:
        given = {"scores": self.has_scores, "logits": self.has_logits}
        found = {name: self._by_position(name) if asked else None for name, asked in given.items()}
        sequences = _join(self.results, self.pad_token_id, self.rows, self.device)
        for name, value in {"sequences": sequences, **found}.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

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

    def _by_position(self, name: str) -> tuple[Tensor, ...]:
        found = [getattr(result, name) for result in self.results if len(result.token_ids)]
        if not found:
            return ()
        longest = max(len(rows) for rows in found)
        whole = found[0].new_zeros((len(self.results), longest, found[0].shape[1]))
        for place, result in enumerate(self.results):
            if result.token_ids:
                whole[place, : len(result.token_ids)] = getattr(result, name)
        return tuple(whole.unbind(1))


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
        seed: int | None = None,
        seeds: tuple[int, ...] | None = None,
        rows: tuple[tuple[int, ...], ...] | None = None,
        device: torch.device | str = "cpu",
        *_: Any,
        **__: Any,
    ) -> RowsOutput:
        """Make the tuple; arguments are the fields."""
        return tuple.__new__(cls, _join(results, pad_token_id, rows, device))

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.sequences[key]

    def __getattr__(self, name: str) -> Any:
        # Protocols such as copying are the tuple's own.
        if name.startswith("_") or "sequences" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        return getattr(self.sequences, name)


@dataclass(frozen=True)
class DictOutput(GenerationOutput, ModelOutput):  # type: ignore[misc]  # transformers carries no types
    """A `GenerationOutput` that is a `ModelOutput` of ``sequences`` and of what else was asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequences", "scores", "logits"):
            if (value := getattr(self, name)) is not None:
                OrderedDict.__setitem__(self, name, value)


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


def with_logprobs(output: GenerationOutput, count: int) -> GenerationOutput:
    """Return the output with the log-probabilities of the ``count`` most probable ids and of the chosen one."""
    return replace(output, results=tuple(_with_logprobs(result, count) for result in output.results))


def _with_logprobs(result: RequestOutput, count: int) -> RequestOutput:
    assert result.logits is not None
    found: list[dict[int, float]] = []
    for token, row in zip(result.token_ids, result.logits.log_softmax(-1), strict=True):
        best, ids = row.topk(min(count, len(row)))
        found.append({token: float(row[token])} | dict(zip(ids.tolist(), best.tolist(), strict=True)))
    return replace(result, logprobs=found)
