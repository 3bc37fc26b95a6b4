"""The barrier over all multiprocessors of a GPU; in the interpreter it is trivial: one program."""

from __future__ import annotations

import torch
from eagle_slim.runtime.drafter.kernels.grid_barrier import ERROR
from eagle_slim.runtime.drafter.launch import check_finished
from eagle_slim.runtime.errors import DrafterError
from kernels.parts import count_rounds
from kernels.replaying import assert_equal_trees, draft, run
from support.drafting import random_head
from support.raising import raises


def test_all_programs_pass_together(device: str) -> None:
    programs = 1 if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    rounds = 3 if device == "cpu" else 500
    state = torch.zeros(4, dtype=torch.int32, device=device)
    for _ in range(3):
        assert count_rounds(state, programs, rounds).tolist() == [rounds] * programs
        assert state.tolist() == [0, 0, 0, 0]


def test_a_timeout_is_reported_once_and_the_next_draft_is_whole(device: str) -> None:
    first = draft(random_head(device=device), (1, 2, 4), [3], [1])
    bufs = first.bufs
    bufs.workspace["barrier"][ERROR] = 1
    bufs.workspace["node_arrivals"][0] = 2  # counts that a timeout can leave behind
    with raises(DrafterError) as refused:
        check_finished(bufs)
    assert str(refused.value).startswith("The drafter's grid barrier timed out")
    check_finished(bufs)
    again = run(first.cfg, first.features, first.weights, bufs)
    assert_equal_trees(again.tree, first.tree)
