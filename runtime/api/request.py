"""One prompt in generation: what was asked, what came out, and when it is finished."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ..settings import MAX_NEW_TOKENS, SamplingConfig
from .sampling import Processors, noise_keys
from .stats import GenerationStats, MissedTokens, most_missed_first

if TYPE_CHECKING:
    from ..drafter.weights import HeadWeights

FinishReason = Literal["eos", "stop", "criteria", "length", "context", "time"]
OnTokens = Callable[[Sequence[int]], None]


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
    on_tokens: OnTokens | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    num_cut_tokens: int = 0
    missed: MissedTokens | None = None
    """Counter of new tokens outside the draft vocabulary; None where drafting was not asked for."""
    num_reused: int = 0
    """Tokens of the prompt that a slot held already."""

    def __post_init__(self) -> None:
        if self.request.max_new_tokens == 0:
            self.finish_reason = "length"

    def emit(self, tokens: Sequence[int]) -> bool:
        """Take tokens one by one until something finishes the request, which is returned; the rest is dropped."""
        before = len(self.token_ids)
        for token in tokens:
            self.token_ids.append(token)
            self.finish_reason = self._reason_to_finish(token)
            if self.finish_reason is not None:
                break
        deadline = self.request.deadline
        if self.finish_reason is None and deadline is not None and time.monotonic() >= deadline:
            self.finish_reason = "time"
        if self.missed is not None:
            self.missed.add(self.token_ids[before:])
        if self.on_tokens is not None:
            self.on_tokens(self.token_ids[before:])
        return self.finish_reason is not None

    def output(self, timings: dict[str, Any]) -> RequestOutput:
        """Return the finished result; ``timings`` are `GenerationStats` fields, {} where the time is shared."""
        assert self.finish_reason is not None
        return RequestOutput(
            list(self.request.prompt_ids),
            list(self.token_ids),
            self._text(),
            self.finish_reason,
            _stats_of([self], timings),
        )

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
        return any(_is_met(criterion, ids) for criterion in self.request.criteria)

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


def _is_met(criterion: Callable[[Tensor, Any], Any], ids: Tensor) -> bool:
    found = criterion(ids, None)
    if found is None:
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise UsageError(f"stopping_criteria: {name} returned None; expected True or False, or a tensor of them.")
    return bool(torch.as_tensor(found).all())


def start(
    requests: Sequence[Request],
    sampling: SamplingConfig,
    on_tokens: OnTokens | None = None,
    head: HeadWeights | None = None,
) -> list[RunningRequest]:
    """Begin requests; ``on_tokens`` is called with new tokens.

    ``head``: what drafts, so that what it cannot propose is counted; None where drafting was not asked for.
    """

    def keys_of(request: Request) -> Tensor | None:
        # No more keys than the context has room for, whatever was asked, and a path: a pass counts in full what it
        # accepts beyond the answer's end.
        room = request.max_tokens - len(request.prompt_ids) + MAX_NEW_TOKENS
        return None if sampling.is_greedy else noise_keys(*request.stream, room)

    return [
        RunningRequest(
            request,
            keys_of(request),
            on_tokens,
            missed=None if head is None else MissedTokens(head, request.prompt_ids),
        )
        for request in requests
    ]


def collect(
    states: Sequence[RunningRequest], timings: dict[str, Any], **counts: Any
) -> tuple[list[RequestOutput], GenerationStats]:
    """Return the outputs of finished requests and the statistics of all; time is theirs only if there is one."""
    outputs = [state.output(timings if len(states) == 1 else {}) for state in states]
    return outputs, _stats_of(states, timings | counts)


def _stats_of(states: Sequence[RunningRequest], more: dict[str, Any]) -> GenerationStats:
    lengths: Counter[int] = Counter()
    for state in states:
        lengths.update(state.accepted_lengths)
    return GenerationStats(
        accepted_lengths=dict(sorted(lengths.items())),
        finish_reasons=dict(sorted(Counter(str(state.finish_reason) for state in states).items())),
        num_new_tokens=sum(len(state.token_ids) for state in states),
        missed_ids=most_missed_first(state.missed.counts for state in states if state.missed is not None),
        num_reused_tokens=sum(state.num_reused for state in states),
        num_cut_tokens=sum(state.num_cut_tokens for state in states),
        **more,
    )
