"""Counting on a Ray cluster: the same blocks, the same partial counts, the same order, so the same bytes in the end.

Ray Data runs the work: a pool of actors, each with one tokenizer thread, takes units of a corpus and gives back partial
counts. It restarts an actor that died and repeats its unit; a unit has one result however often it was begun, so
nothing is lost and nothing is counted twice. Results come back in the order of the corpus, which limits and messages
about bad records need.

    files that can be cut without reading them    unit = blocks of about 64 MB; workers read the files themselves
    compressed files, datasets of the Hub         unit = one shard (file), opened and read by the worker
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..corpus.blocks import BadRecord, Block
from ..corpus.open import OpenCorpus
from ..errors import EagleSlimError, UsageError
from .block import MAX_REPORTS, BlockCounter, BlockCounts, CountPlan, PartialCounts, merge_partial
from .workers import Task, ThisProcess, Workers, use_one_tokenizer_thread

_UNIT_BLOCKS = 16


@dataclass(frozen=True)
class _Unit:
    """A piece of work: blocks that need only be read, or a shard from a position on."""

    blocks: tuple[Block, ...] = ()
    shard: int = 0
    start: int = 0


def require_ray() -> None:
    """Raise UsageError where Ray Data is not installed."""
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise UsageError("--run-on ray needs Ray Data. Try: pip install 'eagle-slim[ray]'") from error


class RayWorkers(Workers):
    """Counts corpora on the Ray cluster that RAY_ADDRESS names, or on one started here and stopped at the end.

    Args:
        plan: what a worker needs.
        workers: actors of one CPU each; None: one for each CPU the cluster has now.

    Raises:
        UsageError: Ray is not installed.
        EagleSlimError: the cluster cannot be reached.
    """

    def __init__(self, plan: CountPlan, workers: int | None) -> None:
        require_ray()
        self._plan = plan
        self._workers = workers
        self._started = False

    def __enter__(self) -> RayWorkers:
        import ray

        if not ray.is_initialized():
            try:
                # With an address, the cluster itself knows its CPUs.
                here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": self._workers, "include_dashboard": False}
                ray.init(logging_level="warning", log_to_driver=False, **here)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                address = os.environ.get("RAY_ADDRESS", "not set")
                raise EagleSlimError(
                    f"The Ray cluster cannot be reached (RAY_ADDRESS: {address}): {error}. Unset RAY_ADDRESS to count "
                    "on this machine."
                ) from error
            self._started = True
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        if self._started:
            ray.shutdown()
            self._started = False

    def map(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, BlockCounts]]:
        """Count single blocks in this process: the one block in which a limit falls."""
        return ThisProcess(self._plan).map(tasks)

    def corpus(self, source: int, corpus: OpenCorpus, bound: Callable[[], int]) -> Iterator[tuple[Task, BlockCounts]]:
        """Count a corpus: yields a result per block if it has limits, else one per unit."""
        import ray

        limited = corpus.source.max_documents is not None or corpus.source.max_tokens is not None
        units = list(_units(corpus, 1 if limited else _UNIT_BLOCKS))
        if not units:
            return
        workers = self._workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        dataset = ray.data.from_items([{"unit": unit} for unit in units], override_num_blocks=len(units)).map_batches(
            _UnitCounter,
            fn_constructor_args=(self._plan, source, corpus, bound(), not limited),
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(units))),
            num_cpus=1,
        )
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        # Data that a worker reads may be larger than a block; a result must not wait for others to fill one.
        dataset.context.target_max_block_size = 1
        for row in dataset.iter_rows():
            result = row["result"]
            if isinstance(result, EagleSlimError):
                raise result
            yield result


def _units(corpus: OpenCorpus, unit_blocks: int) -> Iterator[_Unit]:
    for shard, start in corpus.shards_after():
        if not corpus.is_cheap_to_cut(shard):
            yield _Unit(shard=shard, start=start)
            continue
        held: list[Block] = []
        for block in corpus.shard_blocks(shard, start):
            held.append(block)
            if len(held) == unit_blocks:
                yield _Unit(tuple(held))
                held = []
        if held:
            yield _Unit(tuple(held))


class _UnitCounter:
    """An actor: counts the blocks of units."""

    def __init__(self, plan: CountPlan, source: int, corpus: OpenCorpus, bound: int, merge: bool) -> None:
        use_one_tokenizer_thread()
        self._plan = plan
        self._source = source
        self._corpus = corpus
        self._bound = bound
        self._merge = merge
        self._counter = BlockCounter(plan)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
        for unit in batch["unit"]:
            try:
                for result in self._merged(unit) if self._merge else self._each(unit):
                    yield {"result": [result]}
            except EagleSlimError as error:
                # As a value: Ray would wrap an exception, and its text would no longer be ours.
                yield {"result": [error]}

    def _each(self, unit: _Unit) -> Iterator[tuple[Task, BlockCounts]]:
        for block in unit.blocks or self._corpus.shard_blocks(unit.shard, unit.start):
            yield Task(self._source, block, self._bound), self._counter.count(self._source, block, self._bound)

    def _merged(self, unit: _Unit) -> Iterator[tuple[Task, BlockCounts]]:
        partial = PartialCounts.zero(self._plan.encoder.vocab_size)
        bad: tuple[BadRecord, ...] = ()
        size = 0
        last: Block | None = None
        for block in unit.blocks or self._corpus.shard_blocks(unit.shard, unit.start):
            bound = min(self._bound, partial.candidates.bound)
            counted = self._counter.count(self._source, block, bound)
            partial = merge_partial(partial, counted.partial, self._plan.held_out)
            bad = (*bad, *counted.bad)[:MAX_REPORTS]
            size, last = size + block.size, block
            if bad and not self._plan.skip_bad:
                break
        if last is not None:
            # Only the position: nothing later needs the text.
            position = Block(last.shard, last.start, last.stop, size)
            yield Task(self._source, position, self._bound), BlockCounts(partial, np.zeros(0, np.int32), bad)
