"""Jobs: the calls of clients as the event loop knows them, to which alone they belong, apart from the requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..api.request import FinishReason, Request
from .errors import RefusedError


@dataclass(eq=False)
class Answer:
    """One answer of a job, as far as the event loop has been told."""

    request: Request
    job: Job
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    told_at: float = 0.0


class Job:
    """A client's call; ``is_streamed``: whether news wake it, or its end alone."""

    def __init__(self, requests: Sequence[Request], is_streamed: bool) -> None:
        self.answers = [Answer(request, self) for request in requests]
        self.is_streamed = is_streamed
        self.began = time.perf_counter()
        self.first_token_s: float | None = None
        self.changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def error(self) -> Exception | None:
        """What ended an answer before it was whole."""
        ended = {answer.finish_reason: answer.error for answer in self.answers}
        if "cancelled" in ended:
            return RefusedError("The server ends.", 503)
        return ended.get("fault")
