"""What tuning stands on: times of variants that take turns, kernels compiled ahead, the rows that stand for all."""

from __future__ import annotations

import torch
from eagle_slim.runtime.drafter.dimensions import MAX_NEW_TOKENS, DrafterConfig
from eagle_slim.runtime.drafter.launch_params import INTERPRETER, choose_launch
from eagle_slim.runtime.drafter.tuning import precompile, problem, timing
from eagle_slim.runtime.settings import TreeConfig

TINY = problem.Dims(32, 32, 2, 1, 16, 100)


def test_times_are_medians_of_interleaved_calls() -> None:
    order: list[str] = []
    times = timing.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, torch.device("cpu"), 8, frozenset({"b"})
    )
    assert "".join(order) == "a" + "a" + "ab" + "aaa" + "ab" + "aaa"
    assert (times["a"].samples, times["b"].samples) == (8, 2)
    summary = timing.Times.of([float(x) for x in range(21)])
    assert (summary.median_us, summary.low_us, summary.high_us) == (10, 2, 18)


def test_compiling_ahead_needs_more_than_one_kernel() -> None:
    assert precompile.compile_all([], 90, 1.0) == []
    cfg = problem.draft_config(TINY, 50, TreeConfig(1, 2, 5), 1, 20)
    assert precompile.compile_all([precompile.Job(TINY, cfg, choose_launch(cfg, INTERPRETER))], 90, 1.0) == [False]


def test_the_kernel_compiled_ahead_is_that_of_a_drafter() -> None:
    cpu, tree = torch.device("cpu"), TreeConfig(1, 2, 4)
    head = problem.random_head(TINY, cpu).of_rows(slice(40))
    job = precompile.tuned_job(TINY, problem.draft_config(TINY, 40, tree, 1, 64), cpu)
    assert job.cfg == DrafterConfig.of(head, tree, 1, 64 + MAX_NEW_TOKENS)
