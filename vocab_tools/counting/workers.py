"""Who counts the blocks: this process or worker processes. Those on a Ray cluster are in ray_workers.py."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..corpus.blocks import Block
from ..corpus.open import OpenCorpus
from ..errors import EagleSlimError
from .block import BlockCounter, BlockCounts, CountPlan

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Task:
    """One block to count; see `BlockCounter.count` for the fields."""

    source: int
    block: Block
    bound: int
    limit: int | None = None


class Workers:
    """Anything that counts tasks and returns the results in their order; this process hands it every block."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        return None

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """Yield tasks and their results in the order of the tasks."""
        raise NotImplementedError

    def corpus(self, source: int, corpus: OpenCorpus, bound: Callable[[], int]) -> Iterator[tuple[Task, BlockCounts]]:
        """Yield the results of a corpus in order: one per block, or per run of merged blocks.

        A merged result has the position of its last block and the size of all of them. A corpus with limits needs
        single blocks. `bound` returns the bound of what was counted so far, see `BlockCounter.count`.
        """
        return self.map(Task(source, block, bound()) for block in corpus.blocks())


class ThisProcess(Workers):
    """Counts without any workers."""

    def __init__(self, plan: CountPlan) -> None:
        self._counter = BlockCounter(plan)

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """See `Workers`."""
        for task in tasks:
            yield task, self._counter.count(task.source, task.block, task.bound, task.limit)


class Processes(Workers):
    """Counts in worker processes, each with one tokenizer thread."""

    def __init__(self, plan: CountPlan, num_workers: int) -> None:
        from multiprocessing import get_context

        context = get_context("spawn")
        self._in_flight = 2 * num_workers + 1
        # Workers end when the other end of this pipe is closed, by this process or because it died.
        alive, self._alive = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            num_workers, mp_context=context, initializer=_start_worker, initargs=(plan, alive)
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Nobody wants the blocks that are being counted.
            self._alive.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._alive.close()

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """See `Workers`."""
        waiting: deque[tuple[Task, Future[BlockCounts]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self._pool.submit(_work, task)))
                if len(waiting) >= self._in_flight:
                    yield self._first(waiting)
            while waiting:
                yield self._first(waiting)
        finally:
            for _, future in waiting:
                future.cancel()

    def _first(self, waiting: deque[tuple[Task, Future[BlockCounts]]]) -> tuple[Task, BlockCounts]:
        task, future = waiting.popleft()
        try:
            return task, future.result()
        except BrokenProcessPool as error:
            raise EagleSlimError(
                "A worker process died, perhaps because memory ran out; fewer --workers need less memory."
            ) from error


def use_one_tokenizer_thread() -> None:
    """Let the tokenizer of this process encode in one thread; before it first encodes, when rayon reads this."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_counter: BlockCounter | None = None


def _start_worker(plan: CountPlan, alive: Connection) -> None:
    """Prepare a worker process: one tokenizer thread, no Ctrl-C of its own, and it ends when `alive` does."""
    import signal

    use_one_tokenizer_thread()
    # A terminal sends these to the whole group; the parent process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(alive,), daemon=True, name="parent-watch").start()
    global _counter
    _counter = BlockCounter(plan)


def _end_with(alive: Connection) -> None:
    alive.poll(None)
    os._exit(1)


def _work(task: Task) -> BlockCounts:
    assert _counter is not None
    return _counter.count(task.source, task.block, task.bound, task.limit)
