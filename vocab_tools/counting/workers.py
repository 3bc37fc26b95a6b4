"""Who counts the blocks: this process, or worker processes; the third, for a Ray cluster, is in `counting_ray`.

An engine is anything that maps tasks to block counts in the order of the tasks.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from ..corpus.corpus import Block, OpenCorpus
from ..errors import EagleSlimError
from .block import BlockCounter, BlockCounts, CountPlan


@dataclass(frozen=True)
class Task:
    """One block to count; see `BlockCounter.count` for the fields."""

    source: int
    block: Block
    bound: int
    limit: int | None = None


class CountEngine(Protocol):
    """What `count_tokens` asks of an engine."""

    def __enter__(self) -> CountEngine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """Yield tasks and their results in the order of the tasks."""

    def corpus(
        self, source: int, corpus: OpenCorpus, after: tuple[int, int] | None, bound: Callable[[], int]
    ) -> Iterator[tuple[Task, BlockCounts]]:
        """Yield the results of a corpus behind `after` in its order: of each block, or of blocks that were merged.

        A merged result bears the place of its last block and the size of all. A corpus with limits needs single blocks.
        `bound` gives the bound of what was counted until then.
        """


class BlockByBlock:
    """An engine to which this process hands every block."""

    def corpus(
        self, source: int, corpus: OpenCorpus, after: tuple[int, int] | None, bound: Callable[[], int]
    ) -> Iterator[tuple[Task, BlockCounts]]:
        """See `CountEngine`."""
        return self.map(Task(source, block, bound()) for block in corpus.blocks(after))

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """See `CountEngine`."""
        raise NotImplementedError


class InProcess(BlockByBlock):
    """Counts in this process."""

    def __init__(self, plan: CountPlan) -> None:
        self._counter = BlockCounter(plan)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """See `CountEngine`."""
        for task in tasks:
            yield task, self._counter.count(task.source, task.block, task.bound, task.limit)


class Processes(BlockByBlock):
    """Counts in worker processes, each with one tokenizer thread."""

    def __init__(self, plan: CountPlan, workers: int) -> None:
        from multiprocessing import get_context

        self._in_flight = 2 * workers + 1
        self._pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(plan,)
        )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """See `CountEngine`."""
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
                "a worker process died, perhaps for lack of memory. The same command goes on from the last checkpoint; "
                "fewer --workers need less memory."
            ) from error


_counter: BlockCounter | None = None


def _start_worker(plan: CountPlan) -> None:
    """Make a worker process ready: one tokenizer thread, no Ctrl-C of its own, and no life after its parent."""
    import signal
    from multiprocessing import parent_process

    # Read by rayon when it first makes its threads, which is after this.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True, name="parent-watch").start()
    global _counter
    _counter = BlockCounter(plan)


def _end_with(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(1)


def _work(task: Task) -> BlockCounts:
    assert _counter is not None
    return _counter.count(task.source, task.block, task.bound, task.limit)
