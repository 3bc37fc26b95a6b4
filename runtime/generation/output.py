"""What a call of `SpeculativeModel.generate` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .requests import RequestOutput
from .stats import GenerationStats


@dataclass(frozen=True)
class GenerationOutput:
    """Answers of one call: ``results`` in the order of the prompts, ``stats`` of all of them together."""

    results: tuple[RequestOutput, ...]
    stats: GenerationStats
    pad_token_id: int = 0

    @property
    def sequences(self) -> Tensor:
        """Prompt and new tokens, padded on the right: int64 [prompts, longest], as transformers returns them."""
        rows = [torch.tensor(result.prompt_ids + result.token_ids) for result in self.results]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [result.token_ids for result in self.results]

    @property
    def text(self) -> list[str | None]:
        """New text of each prompt; None without a tokenizer."""
        return [result.text for result in self.results]
