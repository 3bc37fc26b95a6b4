"""One prompt in generation: what was asked, what came out, and when it is finished."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ..settings import MAX_NEW_TOKENS, SamplingConfig
from .sampling import Processors, noise_keys
from .stats import GenerationStats, most_frequent_first

if TYPE_CHECKING:
    from ..drafter.weights import HeadWeights

FinishReason = Literal["eos", "stop", "criteria", "length", "context", "time"]


class Streamer(Protocol):
    """What transformers calls a streamer: it gets the prompt, then new tokens, then the end."""

    def put(self, value: Tensor) -> None:
        """Take token ids, int64 [1, seq] for the prompt and [new] afterwards, on the CPU."""

    def end(self) -> None:
        """End of stream."""


@dataclass(frozen=True)
class Request:
    """A prompt and its limits.

    ``stream``: seed and place, which fix the random numbers. ``context_limit``: tokens of prompt and answer together,
    None for no limit. ``stop``: strings; ``decode`` turns token ids into text, needed for them. ``process`` takes the
    tokens before a position, int64 [1, seq], and its logits, float32 [1, target_vocab], and returns the logits to
    choose from (`sampling`). ``criteria`` are asked after every token, with prompt and answer (int64 [1, seq] on
    ``device``) and None; one that returns True ends the answer. ``deadline`` is a time of `time.monotonic`, looked at
    after every step.
    """

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    context_limit: int | None = None
    stop: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    process: Processors | None = None
    criteria: Sequence[Callable[[Tensor, Any], Any]] = ()
    deadline: float | None = None
    device: torch.device | str = "cpu"
    stream: tuple[int, int] = (0, 0)

    @property
    def max_tokens(self) -> int:
        """Longest the sequence can become, prompt included."""
        longest = len(self.prompt_ids) + self.max_new_tokens
        return longest if self.context_limit is None else min(longest, self.context_limit)


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt.

    ``finish_reason``: "eos" an end-of-sequence token, "stop" a stop string, "criteria" a stopping criterion, "length"
    ``max_new_tokens``, "context" the model's context is full, "time" ``max_time``. The token that ended it (EOS, or the
    one completing a stop string) is part of ``token_ids``, as in transformers; ``text`` ends before a stop string.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass
class RunningRequest:
    """A request in progress."""

    request: Request
    keys: Tensor | None
    """int64 [at least max_new_tokens]: of the noise that chooses each new token; None when greedy."""
    streamer: Streamer | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    num_cut_tokens: int = 0
    head: HeadWeights | None = None
    """What drafts, so that what it cannot propose is counted; None where drafting was not asked for."""
    num_reused: int = 0
    """Tokens of the prompt that a slot held already."""

    def __post_init__(self) -> None:
        if self.request.max_new_tokens == 0:
            self.finish_reason = "length"

    def emit(self, tokens: Sequence[int]) -> bool:
        """Append tokens until one ends the request, and drop the rest. Returns whether the request has ended."""
        before = len(self.token_ids)
        for token in tokens:
            self.token_ids.append(token)
            self.finish_reason = self._reason_to_finish(token)
            if self.finish_reason is not None:
                break
        deadline = self.request.deadline
        if self.finish_reason is None and deadline is not None and time.monotonic() >= deadline:
            self.finish_reason = "time"
        if self.streamer is not None:
            self.streamer.put(torch.tensor(self.token_ids[before:]))
        return self.finish_reason is not None

    def output(self) -> RequestOutput:
        """Return the finished result; its statistics are without times."""
        assert self.finish_reason is not None
        stats = GenerationStats(
            dict(sorted(self.accepted_lengths.items())), len(self.token_ids), self.num_cut_tokens, self._missed_ids(),
            self.num_reused, finish_reasons={self.finish_reason: 1},
        )  # fmt: skip
        return RequestOutput(
            list(self.request.prompt_ids), list(self.token_ids), self._text(), self.finish_reason, stats
        )

    def _missed_ids(self) -> dict[int, int]:
        """Count the new tokens that the head could not draft, by target id."""
        if self.head is None:
            return {}
        held, follow = self.head.held_ids, self.head.follow
        missed = Counter(token for token in self.token_ids if not held[token])
        if follow is not None:
            tail = follow.tail_of(self.request.prompt_ids)
            missed = Counter({token: count for token, count in missed.items() if not follow.holds(tail, token)})
        return most_frequent_first(missed)

    def _reason_to_finish(self, token: int) -> FinishReason | None:
        if token in self.request.eos_ids:
            return "eos"
        if self.request.stop and self._stop_in_tail():
            return "stop"
        if self.request.criteria and self._is_ended_by_criteria():
            return "criteria"
        if len(self.token_ids) == self.request.max_new_tokens:
            return "length"
        if len(self.request.prompt_ids) + len(self.token_ids) == self.request.context_limit:
            return "context"
        return None

    def _is_ended_by_criteria(self) -> bool:
        ids = torch.tensor([[*self.request.prompt_ids, *self.token_ids]], device=self.request.device)
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.request.criteria)

    def _stop_in_tail(self) -> bool:
        assert self.request.decode is not None
        # A token stands for at least one byte, so a stop string lies within as many tokens as it has bytes. A few more
        # are decoded because some tokenizers drop a space at the beginning.
        reach = max(len(text.encode()) for text in self.request.stop) + 4
        tail = self.request.decode(self.token_ids[-reach:])
        return any(text in tail for text in self.request.stop)

    def _text(self) -> str | None:
        if self.request.decode is None:
            return None
        text = self.request.decode([t for t in self.token_ids if t not in self.request.eos_ids])
        if self.finish_reason == "stop":
            cuts = [text.find(stop) for stop in self.request.stop]
            text = text[: min((cut for cut in cuts if cut >= 0), default=len(text))]
        return text


def start(
    requests: Sequence[Request], sampling: SamplingConfig, streamer: Streamer | None, head: HeadWeights | None
) -> list[RunningRequest]:
    """Begin requests; ``streamer`` gets the new tokens, ``head`` is as in `RunningRequest`."""
    states = []
    for request in requests:
        # Keys for the room in the context, and for one path more: a pass may accept tokens beyond the answer's end.
        room = request.max_tokens - len(request.prompt_ids) + MAX_NEW_TOKENS
        keys = None if sampling.is_greedy else noise_keys(*request.stream, room)
        states.append(RunningRequest(request, keys, streamer, head=head))
    return states


def collect(
    states: Sequence[RunningRequest], timings: dict[str, Any], **counts: Any
) -> tuple[list[RequestOutput], GenerationStats]:
    """Return the outputs of finished requests and the statistics of all; where there is one, it has them all."""
    outputs = [state.output() for state in states]
    stats = replace(GenerationStats.sum(output.stats for output in outputs), **timings, **counts)
    return [replace(outputs[0], stats=stats)] if len(outputs) == 1 else outputs, stats
