"""Counting on a Ray cluster: the same blocks and the same order, so the same bytes in the end.

A task counts one unit: about 64 MB of a plain file, a file of another kind, a shard of the Hub, or of a source with a
limit one block that is read here. Ray repeats a task whose process or node was lost; a unit has one result however
often it was begun, so nothing is lost and nothing is counted twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from .errors import EagleSlimError, UsageError
from .records import Block
from .sources import OpenSource
from .workers import BlockCounter, Count, Counted, CountPlan, in_order, use_one_tokenizer_thread

_UNIT_BLOCKS = 16

Unit = tuple[Block, ...] | int
"""A piece of work: blocks that need only be read, or the number of a shard."""


@contextmanager
def ray_tasks(plan: CountPlan, workers: int | None) -> Iterator[Count]:
    """Count on the Ray cluster that RAY_ADDRESS names, or on one started here and stopped at the end.

    `workers` tasks of one CPU each run at a time; None: as many as the cluster has CPUs for now. Raises UsageError
    where Ray is not installed, and EagleSlimError where the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--run-on ray needs Ray. Try: pip install 'ray>=2.50'") from error
    is_running = ray.is_initialized()
    if not is_running:
        address = os.environ.get("RAY_ADDRESS")
        # With an address, the cluster itself knows its CPUs.
        here = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            ray.init(logging_level="warning", log_to_driver=False, **here)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            problem = f"The Ray cluster cannot be reached (RAY_ADDRESS: {address or 'not set'}): {error}"
            raise EagleSlimError(f"{problem}. Unset RAY_ADDRESS to count on this machine.") from error
    # In a tuple a reference stays one, so that only a process without a counter fetches the plan.
    shared_plan = (ray.put(plan),)
    task = ray.remote(num_cpus=1, max_retries=-1)(_count_unit)
    # Results come in order: twice as many tasks as CPUs keep all of them at work.
    num_tasks = workers or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def count(source: int, opened: OpenSource) -> Iterator[Counted]:
        shared = ray.put(opened)
        units = in_order(_units(opened), lambda unit: task.remote(shared_plan, source, shared, unit), num_tasks)
        for _, result in units:
            try:
                yield from ray.get(result)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error

    try:
        yield count
    finally:
        if not is_running:
            ray.shutdown()


def _units(opened: OpenSource) -> Iterator[Unit]:
    if opened.source.max_documents is not None or opened.source.max_tokens is not None:
        yield from ((block,) for block in opened.blocks())
        return
    for shard in range(opened.num_shards):
        if not opened.is_plain(shard):
            yield shard
            continue
        blocks = opened.shard_blocks(shard)
        while unit := tuple(islice(blocks, _UNIT_BLOCKS)):
            yield unit


_counter: tuple[Any, BlockCounter] | None = None
"""Of this process: the plan's reference, and the counter made for it."""


def _count_unit(plan: tuple[Any], source: int, opened: OpenSource, unit: Unit) -> list[Counted]:
    """Count a unit: one tally for all its blocks, but a new one behind a block with a bad record, to tell its place."""
    import ray

    global _counter
    if _counter is None or _counter[0] != plan[0]:
        use_one_tokenizer_thread()
        _counter = plan[0], BlockCounter(ray.get(plan[0]))
    counted: list[Counted] = []
    for block in opened.shard_blocks(unit) if isinstance(unit, int) else unit:
        tally = _counter[1].count(source, block)
        if counted and not counted[-1][1].bad:
            before, total = counted.pop()
            total.add(tally)
            block, tally = replace(block, size=before.size + block.size), total
        # Where a limit falls in a block, it is counted again.
        counted.append((replace(block, data=None) if isinstance(unit, int) else block, tally))
    return counted
