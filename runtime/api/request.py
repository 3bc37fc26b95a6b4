"""One prompt of a call: its limits, its answer so far, and when that ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..drafter.weights import HeadWeights
from ..errors import misfit
from .sampling import Processors
from .stats import GenerationStats

FinishReason = Literal["eos", "stop", "criteria", "length", "context", "time"]


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt.

    ``finish_reason``: "eos" an end-of-sequence token, "stop" a stop string, "criteria" a stopping criterion, "length"
    ``max_new_tokens``, "context" the model's context is full, "time" ``max_time``. The token that ended it (EOS, or the
    one completing a stop string) is part of ``token_ids``, as in transformers; ``text`` ends before a stop string.
    ``stats`` are without what is the call's: times, path, exactness.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(eq=False)
class Request:
    """A prompt with its limits, and its answer so far."""

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    context_limit: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they need ``decode``."""
    decode: Callable[[Sequence[int]], str] | None = None
    process: Processors | None = None
    criteria: Sequence[Callable[[Tensor, Any], Any]] = ()
    """Called after every token with prompt and answer (int64 [1, seq] on ``device``) and None; True ends the answer."""
    deadline: float | None = None
    """A time of `time.monotonic`, looked at after every step."""
    device: torch.device | str = "cpu"
    keys: Tensor | None = None
    """int64 [max_new_tokens or more]: of the noise for each new token; None when greedy."""
    streamer: BaseStreamer | None = None
    """Gets the prompt, int64 [1, seq], then new tokens [new], on the CPU."""
    head: HeadWeights | None = None
    """The draft head, to count tokens that it cannot propose; None where drafting was not asked for."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    num_cut_tokens: int = 0
    num_reused: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens == 0:
            self.finish_reason = "length"

    @property
    def max_tokens(self) -> int:
        """Longest the sequence can become, prompt included."""
        longest = len(self.prompt_ids) + self.max_new_tokens
        return longest if self.context_limit is None else min(longest, self.context_limit)

    def emit(self, tokens: Sequence[int]) -> bool:
        """Append tokens until one ends the request, and drop the rest. Returns whether the request has ended."""
        before = len(self.token_ids)
        for token in tokens:
            self.token_ids.append(token)
            self.finish_reason = self._reason_to_finish(token)
            if self.finish_reason is not None:
                break
        if self.finish_reason is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.finish_reason = "time"
        if self.streamer is not None:
            self.streamer.put(torch.tensor(self.token_ids[before:]))
        return self.finish_reason is not None

    def output(self) -> RequestOutput:
        """Return the finished result."""
        assert self.finish_reason is not None
        lengths, num_new, ended = dict(sorted(self.accepted_lengths.items())), len(self.token_ids), self.finish_reason
        missed = dict(Counter(token for token in self.token_ids if self.head and not self.head.in_vocab[token]))
        cut, reused = self.num_cut_tokens, self.num_reused
        stats = GenerationStats(lengths, num_new, cut, missed, reused, finish_reasons={ended: 1})
        return RequestOutput(list(self.prompt_ids), list(self.token_ids), self._text(), self.finish_reason, stats)

    def _reason_to_finish(self, token: int) -> FinishReason | None:
        if token in self.eos_ids:
            return "eos"
        if self.stop and self._stop_in_tail():
            return "stop"
        if self.criteria and self._is_ended_by_criteria():
            return "criteria"
        if len(self.token_ids) == self.max_new_tokens:
            return "length"
        return "context" if len(self.prompt_ids) + len(self.token_ids) == self.context_limit else None

    def _is_ended_by_criteria(self) -> bool:
        ids = torch.tensor([[*self.prompt_ids, *self.token_ids]], device=self.device)
        for criterion in self.criteria:
            answer, flags = criterion(ids, None), torch.tensor([])
            with suppress(RuntimeError, TypeError, ValueError):
                flags = torch.as_tensor(answer)
            if flags.numel() == 0:
                raise misfit("What a stopping criterion returns", "True or False, or a tensor of them", answer)
            if flags.all():
                return True
        return False

    def _stop_in_tail(self) -> bool:
        assert self.decode is not None
        # A token stands for at least one byte, so a stop string lies within as many tokens as it has bytes. A few more
        # are decoded because some tokenizers drop a space at the beginning.
        reach = max(len(text.encode()) for text in self.stop) + 4
        for first in range(reach, reach + 4):
            tail = self.decode(self.token_ids[-first:])
            # Where a tail begins inside a letter, a run of tokens for single bytes is not decoded at all.
            if not tail.startswith("\ufffd"):
                break
        return any(text in tail for text in self.stop)

    def _text(self) -> str | None:
        if self.decode is None:
            return None
        text = self.decode([token for token in self.token_ids if token not in self.eos_ids])
        if self.finish_reason == "stop":
            cuts = [text.find(stop) for stop in self.stop]
            text = text[: min((cut for cut in cuts if cut >= 0), default=len(text))]
        return text


def collect(
    requests: Sequence[Request], timings: dict[str, Any], **counts: Any
) -> tuple[list[RequestOutput], GenerationStats]:
    """Return the outputs of finished requests, and the statistics of all, to which times and counts are added."""
    outputs = [request.output() for request in requests]
    return outputs, replace(GenerationStats.sum(output.stats for output in outputs), **timings, **counts)
