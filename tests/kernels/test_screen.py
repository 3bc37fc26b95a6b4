"""Drafting behind a screen, in one launch, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle_slim.runtime.drafter.drafter import Drafter
from eagle_slim.runtime.drafter.kernel_launch import chip_of
from eagle_slim.runtime.drafter.launch import allocate_buffers, launch_drafter
from eagle_slim.runtime.drafter.tuning.agreement import tree_of
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig
from kernels.cases import Case
from kernels.cases import draft as draft_case
from kernels.replaying import assert_agrees, assert_equal_trees, draft
from kernels.test_drafter import odd_tiles
from support.drafting import random_head, with_follow, with_screen
from support.raising import raises

SLOW = pytest.mark.slow
CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, int, int], list[int], list[int]]] = {
    # name: (head options, (rank, groups, per_group), tree, prefixes, new tokens)
    "eagle3": ({}, (16, 8, 2), (2, 4, 20), [5], [3]),
    "several sequences": ({}, (32, 16, 1), (1, 3, 10), [4, 30, 1], [16, 2, 1]),
    "eagle": ({"kind": "eagle"}, (16, 5, 3), (2, 4, 20), [7], [2]),
    "groups of few rows": ({"draft_vocab": 37}, (16, 16, 4), (2, 4, 20), [7], [2]),
    "groups without rows": ({"draft_vocab": 9}, (16, 16, 2), (2, 3, 10), [7], [2]),
    "sixteen of a group": ({}, (48, 7, 16), (2, 3, 10), [7], [2]),
    "a head norm and a chain": ({"hidden": 48, "draft_vocab": 61}, (16, 3, 1), (4, 1, 6), [5], [2]),
}


@pytest.mark.parametrize("name", [n if n == "eagle3" else pytest.param(n, marks=SLOW) for n in CASES])
def test_equals_the_reference_in_fp32(name: str, device: str) -> None:
    options, screen, tree, prefixes, num_new = CASES[name]
    drafted = draft(with_screen(random_head(**options, device=device), *screen), tree, prefixes, num_new)
    assert_agrees(drafted)
    assert_equal_trees(drafted.tree, drafted.reference_tree())


def test_follows_a_prompt(device: str) -> None:
    """All rows that joined a sequence are scored beside its candidates."""
    head = with_screen(with_follow(random_head(device=device), 20), 16, 8, 2)
    texts = {0: list(range(300)), 1: [*range(90, 120)]}
    drafted = draft(head, (1, 4, 15), [5, 9], [3, 1], texts=texts)
    assert_agrees(drafted)
    assert_equal_trees(drafted.tree, drafted.reference_tree())
    held = set(head.draft_to_target.tolist())
    assert set(drafted.tree.draft_tokens[:, 1:].flatten().tolist()) - held


@pytest.mark.parametrize(
    "case",
    [
        Case(1, (1, 3, 12), [9], [5], screen=(32, 4, 2), fp8=True),
        pytest.param(Case(1, (1, 3, 12), [9, 4], [2, 5], screen=(32, 4, 2), fp8=True), marks=SLOW),
        pytest.param(Case(1, (1, 3, 12), [9, 4], [2, 5], screen=(32, 1, 9), change=odd_tiles), marks=SLOW),
    ],
    ids=["fp8", "fp8, two sequences", "several tiles of a group"],
)
def test_types_and_tiles(case: Case, device: str) -> None:
    result = draft_case(case, chip_of(torch.device(device)), torch.float16 if case.fp8 else torch.float32)
    assert result["agrees"], result["is"]
    assert result["different"] == result["left"] == []


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle", marks=SLOW)])
def test_with_every_row_a_candidate_it_is_the_draft_without_one(kind: str, device: str) -> None:
    head = random_head(kind, draft_vocab=40, device=device)
    plain = draft(head, (1, 4, 15), [5], [3])
    screened = draft(with_screen(head, head.hidden, 20, 2), (1, 4, 15), [5], [3])
    assert_equal_trees(screened.tree, plain.tree)


def test_packings_are_shared_behind_one_screen_only(device: str) -> None:
    head = random_head(device=device)
    screened, tree = with_screen(head, 16, 8, 2), TreeConfig(1, 2, 5)
    drafter = Drafter(screened, tree, "triton")
    assert drafter.like(screened, TreeConfig(2, 3, 9)).packing is drafter.packing
    for other in (head, with_screen(head, 16, 8, 2), screened.of_rows(slice(100))):
        assert drafter.like(other, tree).packing is not drafter.packing
    with raises(UsageError, field="screen_rank", found=24):
        Drafter(with_screen(head, 24, 8, 2), tree, "triton")


def test_a_screen_is_packed_for_all_its_rows(device: str) -> None:
    head = with_screen(random_head(device=device), 16, 8, 2)
    drafted = draft(head, (1, 2, 5), [5], [3])
    fewer = replace(drafted.cfg, draft_vocab=100)
    bufs = allocate_buffers(fewer, drafted.weights)
    with raises(UsageError, field="draft_vocab", found=100, expected=120):
        launch_drafter(fewer, drafted.features, drafted.weights, bufs)
    assert tree_of(bufs).draft_tokens.max() < 0
