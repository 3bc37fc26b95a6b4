"""The barrier where it is trivial: one program. Over all multiprocessors: test_drafter_gpu.py."""

from __future__ import annotations

import torch
from eagle_slim.runtime.drafter.kernels.grid_barrier import ERROR, count_rounds, count_rounds_ref
from eagle_slim.runtime.drafter.launch import check_finished
from eagle_slim.runtime.errors import DrafterError
from kernels.replaying import draft
from support.drafting import random_head
from support.raising import raises


def test_one_program_passes_at_once(device: str) -> None:
    state = torch.zeros(4, dtype=torch.int32, device=device)
    assert torch.equal(count_rounds(state, 1, 3).cpu(), count_rounds_ref(1, 3))
    assert state.tolist() == [0, 0, 0, 0]


def test_a_timeout_is_reported_once(device: str) -> None:
    bufs = draft(random_head(device=device), (1, 2, 4), [3], [1]).bufs
    bufs.workspace["barrier"][ERROR] = 1
    with raises(DrafterError, buffer="barrier") as refused:
        check_finished(bufs)
    assert str(refused.value).startswith("The drafter's grid barrier timed out")
    check_finished(bufs)
