"""Counting on a Ray cluster: the same blocks and the same order, so the same bytes in the end.

Ray Data runs the work: a pool of actors, each with one tokenizer thread, takes units of a source and gives back what
they hold. It restarts an actor that died and repeats its unit; a unit has one result however often it was begun, so
nothing is lost and nothing is counted twice. Results come back in the order of the source, which limits and messages
about bad records need.

    files that can be cut without reading them    unit = blocks of about 64 MB; workers read the files themselves
    packed files, arrays, Parquet, the Hub        unit = one shard (file), opened and read by the worker
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from .errors import EagleSlimError, UsageError
from .records import Block
from .sources import OpenSource
from .workers import BlockCounter, Counted, CountPlan, Tally, Workers, use_one_tokenizer_thread

_UNIT_BLOCKS = 16


@dataclass(frozen=True)
class _Unit:
    """A piece of work: blocks that need only be read, or a shard."""

    blocks: tuple[Block, ...] = ()
    shard: int = 0


def require_ray() -> None:
    """Raise UsageError where Ray Data is not installed."""
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise UsageError("--run-on ray needs Ray Data. Try: pip install 'eagle-slim[ray]'") from error


class RayWorkers(Workers):
    """Counts sources on the Ray cluster that RAY_ADDRESS names, or on one started here and stopped at the end.

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

    def count(self, source: int, opened: OpenSource) -> Generator[Counted, None, None]:
        """Yield a block and a result for each block of a source with limits, for others one for each unit."""
        import ray

        merge = not opened.source.is_limited
        units = list(_units(opened, _UNIT_BLOCKS if merge else 1))
        if not units:
            return
        workers = self._workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        dataset = ray.data.from_items([{"unit": unit} for unit in units], override_num_blocks=len(units)).map_batches(
            _UnitCounter,
            fn_constructor_args=(self._plan, source, opened, merge),
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


def _units(opened: OpenSource, unit_blocks: int) -> Iterator[_Unit]:
    for shard in opened.order:
        if not opened.is_cheap_to_cut(shard):
            yield _Unit(shard=shard)
            continue
        blocks = opened.shard_blocks(shard)
        while held := tuple(islice(blocks, unit_blocks)):
            yield _Unit(held)


class _UnitCounter:
    """An actor: counts the blocks of units."""

    def __init__(self, plan: CountPlan, source: int, opened: OpenSource, merge: bool) -> None:
        use_one_tokenizer_thread()
        self._plan = plan
        self._source = source
        self._opened = opened
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

    def _each(self, unit: _Unit) -> Iterator[Counted]:
        for block in unit.blocks or self._opened.shard_blocks(unit.shard):
            yield block, self._counter.count(self._source, block)

    def _merged(self, unit: _Unit) -> Iterator[Counted]:
        """Add the results up to the next bad record, whose place is that of its block."""
        total: Tally | None = None
        size = 0
        for block, result in self._each(unit):
            size += block.size
            if total is None:
                total = result
            else:
                total.add(result)
            if total.bad:
                yield replace(block, size=size, data=None), total
                total, size = None, 0
        if total is not None:
            yield replace(block, size=size, data=None), total
