"""What tuning stands on: times of variants that take turns, and kernels compiled ahead."""

from __future__ import annotations

from functools import partial

import torch
from eagle_slim.runtime.drafter.dimensions import MAX_NEW_TOKENS, DrafterConfig
from eagle_slim.runtime.drafter.launch_params import INTERPRETER, choose_launch
from eagle_slim.runtime.drafter.tuning import precompile, problem, timing
from eagle_slim.runtime.settings import TreeConfig

TINY = problem.Dims(32, 32, 2, 1, 16, 100)


def test_variants_are_timed_in_turn() -> None:
    order: list[str] = []
    times = timing.interleave({name: partial(order.append, name) for name in "ab"}, torch.device("cpu"), 3)
    assert "".join(order) == "ab" * 5
    assert [len(times[name]) for name in "ab"] == [3, 3]


def test_compiling_ahead_needs_more_than_one_kernel() -> None:
    assert precompile.compile_all([], 90, 1.0) == []
    cfg = problem.draft_config(TINY, 50, TreeConfig(1, 2, 5), 1, 20)
    assert precompile.compile_all([precompile.Job(TINY, cfg, choose_launch(cfg, INTERPRETER))], 90, 1.0) == [False]


def test_the_configuration_compiled_ahead_is_that_of_a_drafter() -> None:
    tree = TreeConfig(1, 2, 4)
    head = problem.random_head(TINY, torch.device("cpu")).of_rows(slice(40))
    assert problem.draft_config(TINY, 40, tree, 1, 64) == DrafterConfig.of(head, tree, 1, 64 + MAX_NEW_TOKENS)
