"""`ServeEngine`: a thread that owns the model and answers calls, and the bounded queue before it.

The event loop of HTTP submits and cancels calls, and is told their tokens; neither thread waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING

import torch

from ..api.request import FinishReason, Request
from ..step.plan import CallRules, Plan, Source
from .protocol import RefusedError, ServedAnswer, ServedCall

if TYPE_CHECKING:
    from ..model import SpeculativeModel
    from .metrics import Metrics

_LOG = logging.getLogger("eagle_slim.serve")
_LINGER_S = 0.05
"""Seconds in which the next call finds the generation loop as the last one left it."""
_WHOLE_PAUSE_S = 0.25
"""Seconds between two deliveries of an answer that is sent whole: metrics and its first token's time need some."""
_PAUSE_S = 4e-4
"""Seconds between two deliveries of a stream, for each stream that runs: threads share an interpreter, and a delivery
takes a part of this. First tokens and ends do not wait."""


class ServeEngine(Source):
    """A source of requests for the model that ``load`` returns: at most ``num_slots`` run and ``max_waiting`` wait.

    Its thread calls ``ready`` with a description once the model can answer, and ``ended`` once it no longer can,
    ``failure`` saying why.
    """

    metrics: Metrics
    """Set by ``load``."""

    def __init__(
        self,
        load: Callable[[], SpeculativeModel],
        ready: Callable[[str], None],
        ended: Callable[[], None],
        num_slots: int,
        max_waiting: int,
    ) -> None:
        self._load, self._ready, self._ended = load, ready, ended
        self.num_slots, self.max_waiting, self.prompt_lengths = num_slots, max_waiting, ()
        self.model: SpeculativeModel | None = None
        """None until it can answer."""
        self.plan: Plan | None = None
        self.failure: BaseException | None = None
        self.waiting: deque[ServedAnswer] = deque()
        self.running: dict[Request, ServedAnswer] = {}
        """Taken by the model; the engine's thread changes it."""
        self._numbers = count()
        self._seconds = 1.0
        """Of an answer, in the mean of the last ones."""
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, events: asyncio.AbstractEventLoop) -> None:
        """Load the model and answer, telling the event loop."""
        self._events = events
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End all calls, and wait for the thread so long."""
        with self._changed:
            self._is_closed = True
            for answer in [*self.waiting, *self.running.values()]:
                answer.request.is_cancelled = True
            self._changed.notify()
        # By it `cli.main` knows, without importing this, that the thread has not ended.
        self._thread.name = "closed engine"
        self._thread.join(timeout_s)

    def submit(self, call: ServedCall) -> None:
        """Queue the answers of a call. Raises `RefusedError` where too many wait."""
        with self._changed:
            num_waiting = len(self.waiting)
            if self._is_closed:
                raise RefusedError("The server ends.", 503)
            if len(call.answers) + num_waiting + len(self.running) > self.num_slots + self.max_waiting:
                after = {"Retry-After": str(max(1, round(self._seconds * num_waiting / self.num_slots)))}
                raise RefusedError(f"{num_waiting} answers wait already. Try again later.", 429, "overloaded", **after)
            for answer in call.answers:
                answer.request.index = next(self._numbers)
            self.waiting.extend(call.answers)
            self._changed.notify()

    def cancel(self, call: ServedCall) -> None:
        """End what has not ended of a call: at once what waits, what runs before the model's next step."""
        with self._changed:
            for answer in call.answers:
                answer.request.is_cancelled = True
            gone = [answer for answer in self.waiting if answer.call is call]
            self.waiting = deque(answer for answer in self.waiting if answer.call is not call)
        self._tell([(answer, [], "cancelled") for answer in gone])

    def has_waiting(self) -> bool:
        """See `Source`."""
        return bool(self.waiting) or self._wait(_LINGER_S)

    def take(self, number: int) -> list[tuple[Request, CallRules]]:
        """See `Source`."""
        with self._changed:
            taken = [self.waiting.popleft() for _ in range(min(number, len(self.waiting)))]
            self.running |= {answer.request: answer for answer in taken}
        return [(answer.request, answer.rules) for answer in taken]

    def publish(self, waits: bool = False) -> None:
        """See `Source`: tell the event loop of first tokens and ends, and of others while this thread waits."""
        now, answers = time.perf_counter(), [*self.running.values()]
        pauses_s = (_WHOLE_PAUSE_S, _PAUSE_S * sum(answer.call.is_streamed for answer in answers) if waits else 0.0)
        news = list[tuple[ServedAnswer, list[int], FinishReason | None]]()
        for answer in answers:
            request = answer.request
            early = answer.num_told and (not waits or now - answer.sent_at < pauses_s[answer.call.is_streamed])
            if request.finish_reason is not None:
                del self.running[request]
            elif early or answer.num_told == len(request.token_ids):
                continue
            tokens = request.token_ids[answer.num_told :]
            answer.num_told, answer.sent_at = len(request.token_ids), now
            news.append((answer, tokens, request.finish_reason))
        if news:
            self._events.call_soon_threadsafe(self._tell, news)

    def fail(self, request: Request, error: Exception) -> None:
        """See `Source`."""
        self.running[request].error = error

    def _tell(self, news: Iterable[tuple[ServedAnswer, list[int], FinishReason | None]]) -> None:
        now = time.perf_counter()
        for answer, tokens, reason in news:
            call, since = answer.call, now - answer.call.began
            self.metrics.see(answer, len(tokens), reason, now)
            answer.token_ids += tokens
            answer.finish_reason, answer.told_at = reason, now
            if tokens and call.first_token_s is None:
                call.first_token_s = since
            if reason is not None:
                self._seconds += 0.1 * (since - self._seconds)
            is_done = reason is not None and call.is_done
            if is_done:
                _LOG.info("%s", call)
            if call.is_streamed or is_done:
                call.changed.set()
            if reason == "fault":
                self.cancel(call)

    def _run(self) -> None:
        try:
            model = self._load()
            assert model.max_model_len is not None
            self.max_tokens = model.max_model_len
            self.plan = model.plan_service(self.num_slots)
            self.model = model
            slots = f"{self.num_slots} answers side by side of up to {self.max_tokens} tokens"
            self._ready(f"{slots}\n{model.describe(self.plan)}")
            while self._wait():
                try:
                    model.serve(self, self.plan)
                except Exception as error:
                    _LOG.exception("what ran has failed")
                    self._fail_all(error)
                    if model.device.type == "cuda":
                        # After some faults nothing runs on the device any more.
                        torch.cuda.synchronize()
        except BaseException as error:
            self.model, self.failure = None, error
            with self._changed:
                self._is_closed = True
                self.take(len(self.waiting))
            self._fail_all(RefusedError("The server has failed.", 503))
        self._ended()

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Wait for requests; returns whether there are any: none are left in a closed engine, and none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self._is_closed, timeout_s)
            return bool(self.waiting)

    def _fail_all(self, error: Exception) -> None:
        for request, answer in self.running.items():
            if request.finish_reason is None:
                answer.error, request.finish_reason = error, "fault"
        self.publish()
