"""Calls of clients as the event loop knows them, to which alone they belong, and their answers in OpenAI's form."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..api.request import FinishReason, Request
from ..step.plan import CallRules

_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass(eq=False)
class Answer:
    """One answer of a call: its request, and what the event loop has been told of it."""

    request: Request
    rules: CallRules
    call: Call = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    told_at: float = 0.0
    num_told: int = 0
    """Tokens that the engine's thread has sent."""
    num_written: int = 0
    """Tokens that a stream has been sent."""
    has_end: bool = False
    """Whether it has the last of them."""
    _num_letters: int = 0
    _held: str = ""
    _first: int = 0
    _last: int = 0
    """Beginning and end of the tokens whose text comes before the next."""

    def new_text(self) -> str:
        """Return the text beyond what this gave before, as far as no later token or stop string changes it."""
        request, ids = self.request, self.token_ids
        if self.finish_reason is not None or request.decode is None:
            return (request.text() or "")[self._num_letters :]
        before, now = request.decode(ids[self._first : self._last]), request.decode(ids[self._first :])
        # Half a letter.
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._first, self._last = self._last, len(ids)
        text = self._held + now[len(before) :]
        beginnings = (size for stop in request.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        kept = len(text) - max(beginnings, default=0)
        self._held, self._num_letters = text[kept:], self._num_letters + kept
        return text[:kept]


@dataclass(eq=False)
class Call:
    """A call as a client asks it; ``kind``: "chat" or "text"."""

    kind: str
    model: str
    answers: list[Answer]
    """``count`` answers to the first prompt, then those to the next."""
    count: int
    seed: int | None
    is_streamed: bool
    """Whether news wake it, or its end alone."""
    with_usage: bool
    with_ids: bool
    shared: dict[str, Any] = field(default_factory=dict)
    """Fields of the model that all answers have."""
    began: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None
    """Ends it where the client hangs up."""

    def __post_init__(self) -> None:
        for answer in self.answers:
            answer.call = self
        kind = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.shared |= {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.model}
        if self.seed is not None:
            self.shared["seed"] = self.seed
        self._prompt = {}
        if self.with_ids and len(self.answers) == self.count:
            self._prompt = {"prompt_token_ids": self.answers[0].request.prompt_ids}

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    def usage(self) -> dict[str, Any]:
        """Count tokens as OpenAI does: the prompt of several answers once."""
        requests = [answer.request for answer in self.answers]
        firsts = requests[:: self.count]
        prompt, new = sum(len(each.prompt_ids) for each in firsts), sum(len(each.token_ids) for each in requests)
        accepted = sum(request.num_accepted for request in requests)
        drafted = sum(request.num_drafted for request in requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_reused for request in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def describe(self, seconds: float) -> str:
        """Return a line for the log, without its text."""
        usage, reasons = self.usage(), sorted({answer.finish_reason or "" for answer in self.answers})
        first = "no token" if self.first_token_s is None else f"first token after {1e3 * self.first_token_s:.0f} ms"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return (
            f"{self.shared['id']}: {usage['prompt_tokens']} prompt tokens ({cached} reused), "
            f"{usage['completion_tokens']} new; {first}, {seconds:.2f} s; ended by {', '.join(reasons)}"
        )

    def whole(self) -> bytes:
        """Write the whole answer; all must have ended."""
        choices = [
            self._choice(index, answer, answer.token_ids, "message") for index, answer in enumerate(self.answers)
        ]
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        answer = {"object": kind, **self.shared, **self._prompt, "choices": choices, "usage": self.usage()}
        return orjson.dumps(answer)

    def news(self) -> bytes:
        """Write server-sent events of what came since the last call, the last with what these bring."""
        chunks = list[dict[str, Any]]()
        for index, answer in enumerate(self.answers):
            ids, is_done = answer.token_ids[answer.num_written :], answer.finish_reason is not None
            if ids or is_done > answer.has_end:
                choice = self._choice(index, answer, ids, "delta")
                chunks.append({"choices": [choice], **self._prompt, **({"usage": None} if self.with_usage else {})})
                self._prompt = {}
                answer.num_written, answer.has_end = len(answer.token_ids), is_done
        if self.is_done and self.with_usage:
            chunks.append({"choices": [], "usage": self.usage()})
        kind = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return b"".join(b"data: %b\n\n" % orjson.dumps({"object": kind, **self.shared, **each}) for each in chunks)

    def _choice(self, index: int, answer: Answer, ids: Sequence[int], name: str) -> dict[str, Any]:
        text, reason = answer.new_text(), _REASONS[answer.finish_reason]
        message = {"content": text} if answer.num_written else {"role": "assistant", "content": text}
        said: Mapping[str, Any] = {name: message} if self.kind == "chat" else {"text": text}
        more = {"token_ids": ids} if self.with_ids else {}
        return {"index": index, "finish_reason": reason, "logprobs": None, **said, **more}
