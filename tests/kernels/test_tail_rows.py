"""Rows that join a slot's draft vocabulary: the kernels against their twins, and the whole draft over base and tail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.follow import FollowRows
from eagle_slim.runtime.drafter.kernels.tail_rows import gather_rows, gather_rows_ref
from eagle_slim.runtime.drafter.launch import Weights, allocate_buffers, launch_drafter, set_tail
from eagle_slim.runtime.drafter.launch_params import chip_of, choose_launch
from eagle_slim.runtime.drafter.workspace import allocate_tails
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig
from kernels.replaying import assert_agrees, assert_equal_trees, draft
from support.drafting import problem, random_head, with_follow
from support.raising import raises


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_are_gathered_where_they_are_not_yet(weight_dtype: torch.dtype, device: str) -> None:
    dtype = torch.float32 if weight_dtype == torch.float32 else torch.float16
    head = with_follow(random_head(dtype=dtype, device=device), 20)
    follow = head.follow
    cfg = DrafterConfig.of(head, TreeConfig(1, 3, 10), 2, 8, weight_dtype)
    params = choose_launch(cfg, chip_of(torch.device(device)))
    mine, wanted = (allocate_tails(cfg, params, device) for _ in range(2))
    for slot, tail in ((1, tuple(range(20))), (0, (4, 9)), (1, (2, 50, 51))):
        for tails, gather in ((mine, gather_rows), (wanted, gather_rows_ref)):
            tails.set_slot(slot, tail, follow)
            gather(follow, tails)
    assert torch.equal(mine.loaded, wanted.loaded)
    if weight_dtype == torch.float32:
        assert torch.equal(mine.rows, wanted.rows)
    else:
        # On a GPU PyTorch divides by 448 by multiplying: a scale may be off in its last bit, and a rounding with it.
        torch.testing.assert_close(mine.scales, wanted.scales, rtol=2e-7, atol=0)
        different = [tails.rows.view(torch.uint8) for tails in (mine, wanted)]
        assert (different[0] != different[1]).float().mean() < 1e-3
        dequantised = [tails.rows.float() for tails in (mine, wanted)]
        torch.testing.assert_close(*dequantised, rtol=0.13, atol=2**-9)
    # A row that lies there is not copied again.
    mine.rows.view(torch.uint8).fill_(0)
    gather_rows(follow, mine)
    assert not mine.rows.view(torch.uint8).any()


def test_fp8_tails(device: str) -> None:
    head = with_follow(random_head("eagle", dtype=torch.float16, device=device), 20)
    drafted = draft(head, (1, 3, 12), [6], [2], weight_dtype=torch.float8_e4m3fn, texts={0: list(range(300))})
    assert_agrees(drafted)
    assert drafted.agreement.rms_error > 1e-5


def test_ties_go_to_the_smaller_id_in_base_or_tail(device: str) -> None:
    """All logits are 0: the children of every node are the smallest ids of both, and nodes of a level tie."""
    head = with_follow(random_head(device=device, draft_vocab=40), 16)
    rows = torch.zeros_like(head.follow.rows)
    follow = FollowRows.of(16, head.draft_to_target, rows, head.follow.row_of_id)
    head = replace(head, lm_head=torch.zeros_like(head.lm_head), follow=follow)
    drafted = draft(head, (2, 4, 14), [5], [2], texts={0: list(range(60))})
    assert drafted.bufs.tails is not None
    tail = drafted.bufs.tails.ids[0, : int(drafted.bufs.tails.sizes[0])].tolist()
    smallest = sorted([*head.draft_to_target.tolist(), *tail])[:4]
    assert set(smallest) & set(tail)
    assert drafted.tree.draft_tokens[0, 1:5].tolist() == smallest
    assert_equal_trees(drafted.tree, drafted.reference_tree())


def test_wrong_tails_are_refused() -> None:
    head = with_follow(random_head(), 20)
    cfg, features, weights, bufs = problem(head, TreeConfig(1, 3, 10), [2, 2], [1, 1])
    with raises(UsageError):
        set_tail(cfg, weights, bufs, 2, [1])
    with raises(UsageError):
        set_tail(cfg, weights, bufs, 0, [1, 300])
    plain = Weights(replace(head, follow=None))
    with raises(UsageError):
        set_tail(cfg, plain, bufs, 0, [1])
    with raises(UsageError):
        launch_drafter(cfg, features, weights, allocate_buffers(replace(cfg, tail_rows=0), weights), "reference")
    with raises(UsageError):
        replace(cfg, tail_rows=20)
