"""`ServeEngine`: a thread that owns the model and answers calls, and the bounded queue before it.

The event loop of HTTP submits and cancels calls, and is told their tokens by one callback for each step of the model;
neither thread waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import torch

from ..api.request import FinishReason, Request
from ..step.plan import CallRules, Plan
from .calls import RefusedError, ServedAnswer, ServedCall
from .metrics import Metrics

if TYPE_CHECKING:
    from ..model import SpeculativeModel

_LOG = logging.getLogger("eagle_slim.serve")


class ServeEngine:
    """A `Source` of requests for the model that ``load`` returns; what the methods of that do is said there.

    At most ``max_slots`` run and ``max_waiting`` more wait.
    """

    prompt_lengths: Sequence[int] = ()

    def __init__(
        self, load: Callable[[], SpeculativeModel], max_slots: int, max_waiting: int, metrics: Metrics
    ) -> None:
        self._load, self._metrics = load, metrics
        self.num_slots, self.max_waiting, self.max_tokens = max_slots, max_waiting, 0
        self.model: SpeculativeModel | None = None
        """None until it can answer."""
        self.plan: Plan | None = None
        self.failure: BaseException | None = None
        self._waiting: deque[tuple[ServedAnswer, CallRules]] = deque()
        self._running: dict[Request, ServedAnswer] = {}
        """Taken by the model; the engine's thread changes it."""
        self._numbers = count()
        self._seconds = 1.0
        """Of an answer, in the mean of the last ones."""
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, events: asyncio.AbstractEventLoop, ready: Callable[[], None], ended: Callable[[], None]) -> None:
        """Load the model and answer, telling the event loop ``events``.

        It calls ``ready`` once the model can answer, and ``ended`` once it no longer can, ``failure`` saying why.
        """
        self._events, self._ready, self._ended = events, ready, ended
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End all calls, and wait for the thread so long."""
        with self._changed:
            self._is_closed = True
            for answer in [*(answer for answer, _ in self._waiting), *self._running.values()]:
                answer.request.is_cancelled = True
            self._changed.notify()
        self._thread.join(timeout_s)

    @property
    def num_waiting(self) -> int:
        """Count the answers that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Count the answers that run."""
        return len(self._running)

    def submit(self, call: ServedCall, rules: Sequence[CallRules]) -> None:
        """Queue the answers of a call. Raises `RefusedError` where too many wait."""
        with self._changed:
            room = self.num_slots + self.max_waiting - len(self._waiting) - len(self._running)
            if self._is_closed:
                raise RefusedError("The server ends.", 503)
            if len(call.answers) > room:
                after = {"Retry-After": str(max(1, round(self._seconds * len(self._waiting) / self.num_slots)))}
                waiting = f"{len(self._waiting)} answers wait already. Try again later."
                raise RefusedError(waiting, 429, "overloaded", **after)
            for answer in call.answers:
                answer.request.index = next(self._numbers)
            self._waiting.extend(zip(call.answers, rules, strict=True))
            self._changed.notify()

    def cancel(self, call: ServedCall) -> None:
        """End what has not ended of a call: at once what waits, what runs before the model's next step."""
        with self._changed:
            for answer in call.answers:
                answer.request.is_cancelled = True
            gone = [answer for answer, _ in self._waiting if answer.call is call]
            self._waiting = deque(each for each in self._waiting if each[0].call is not call)
        self._tell([(answer, [], "cancelled") for answer in gone])

    def has_waiting(self) -> bool:
        """See `Source`."""
        return bool(self._waiting)

    def take(self, count: int) -> list[tuple[Request, CallRules]]:
        """See `Source`."""
        with self._changed:
            taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            self._running |= {answer.request: answer for answer, _ in taken}
        return [(answer.request, rules) for answer, rules in taken]

    def publish(self) -> None:
        """See `Source`: tell the event loop of new tokens and ends."""
        news = []
        for request, answer in [*self._running.items()]:
            new, reason = request.token_ids[answer.num_told :], request.finish_reason
            if new or reason is not None:
                news.append((answer, new, reason))
                answer.num_told += len(new)
            if reason is not None:
                del self._running[request]
        if news:
            self._events.call_soon_threadsafe(self._tell, news)

    def fail(self, request: Request, error: Exception) -> None:
        """See `Source`."""
        self._running[request].error = error

    def _tell(self, news: Sequence[tuple[ServedAnswer, list[int], FinishReason | None]]) -> None:
        now = time.perf_counter()
        for answer, tokens, reason in news:
            call = answer.call
            self._metrics.see(answer, len(tokens), reason, now)
            if tokens and call.first_token_s is None:
                call.first_token_s = now - call.began
            answer.token_ids += tokens
            answer.finish_reason, answer.told_at = reason, now
            if reason is not None:
                self._seconds += 0.1 * (now - call.began - self._seconds)
            if call.is_streamed or call.is_done:
                call.changed.set()

    def _run(self) -> None:
        try:
            model = self._load()
            assert model.max_model_len is not None
            self.max_tokens = model.max_model_len
            self.plan = model.plan_service(self.num_slots)
            self.model = model
            self._events.call_soon_threadsafe(self._ready)
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
                self._running |= {answer.request: answer for answer, _ in self._waiting}
                self._waiting.clear()
            self._fail_all(RefusedError("The server has failed.", 503))
        self._events.call_soon_threadsafe(self._ended)

    def _wait(self) -> bool:
        """Wait for requests; returns whether there are any, and false once all have ended in a closed engine."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return bool(self._waiting)

    def _fail_all(self, error: Exception) -> None:
        for request, answer in self._running.items():
            if request.finish_reason is None:
                answer.error, request.finish_reason = error, "fault"
        self.publish()
