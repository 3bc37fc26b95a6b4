"""The barrier over all multiprocessors of a GPU; in the interpreter it is trivial: one program."""

import pytest
import torch
import triton
import triton.language as tl
from eagle_slim.runtime import DrafterError, check_finished
from eagle_slim.runtime.drafter.kernels.grid_barrier import ERROR, grid_barrier, leave_grid
from kernels.replaying import assert_equal_trees, draft, run
from support.drafting import random_head
from support.raising import raises
from torch import Tensor


@triton.jit
def _count_rounds_kernel(state_ptr, seen_ptr, out_ptr, num_rounds, NUM_CTAS: tl.constexpr):
    """Each round every program publishes the round number and, after the barrier, checks its neighbour's."""
    pid = tl.program_id(0)
    neighbour = (pid + 1) % NUM_CTAS
    good = 0
    for i in range(num_rounds):
        tl.store(seen_ptr + pid, i + 1)
        grid_barrier(state_ptr, 2 * i + 1, NUM_CTAS)
        good += (tl.load(seen_ptr + neighbour, volatile=True) == i + 1).to(tl.int32)
        grid_barrier(state_ptr, 2 * i + 2, NUM_CTAS)
    tl.store(out_ptr + pid, good)
    leave_grid(state_ptr, NUM_CTAS)


def count_rounds(state: Tensor, launched: int, expected: int, rounds: int) -> Tensor:
    """Run ``2 * rounds`` barriers and return, per program, the rounds that were seen right: int32 [expected].

    ``state``: int32 [4] zeros, whose ERROR word tells of a timeout afterwards.
    """
    seen = torch.zeros(expected, dtype=torch.int32, device=state.device)
    out = torch.full_like(seen, -1)
    cooperative = {"launch_cooperative_grid": True} if state.is_cuda else {}
    _count_rounds_kernel[(launched,)](state, seen, out, rounds, NUM_CTAS=expected, num_warps=8, **cooperative)
    return out


def test_all_programs_pass_together(device: str) -> None:
    programs = 1 if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    rounds = 3 if device == "cpu" else 500
    state = torch.zeros(4, dtype=torch.int32, device=device)
    for _ in range(3):
        assert count_rounds(state, programs, programs, rounds).tolist() == [rounds] * programs
        assert state.tolist() == [0, 0, 0, 0]


@pytest.mark.gpu
def test_barrier_cannot_hang() -> None:
    """A program that never comes: the others give up within seconds and raise the flag."""
    state = torch.zeros(4, dtype=torch.int32, device="cuda")
    count_rounds(state, 7, 8, 3)
    torch.cuda.synchronize()
    assert int(state[ERROR]) == 1


def test_a_timeout_is_reported_once_and_the_next_draft_is_whole(device: str) -> None:
    first = draft(random_head(device=device), (1, 2, 4), [3], [1])
    bufs = first.bufs
    bufs.workspace["barrier"][ERROR] = 1
    bufs.workspace["node_arrivals"][0] = 2  # counts that a timeout can leave behind
    with raises(DrafterError, option="barrier"):
        check_finished(bufs)
    check_finished(bufs)
    again = run(first.cfg, first.features, first.weights, bufs)
    assert_equal_trees(again.tree, first.tree)
