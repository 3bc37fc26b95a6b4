"""Draft with the persistent kernel on poisoned memory, and replay the draft by the fp32 reference."""

from dataclasses import dataclass
from typing import Any

import torch
from eagle_slim.runtime import Buffers, DrafterConfig, TreeConfig, Weights, check_finished, launch_drafter
from eagle_slim.runtime.drafter.tuning.agreement import LOG_PROB_ATOL, Step, candidates_of, exact_head, replay, tree_of
from eagle_slim.runtime.tree import DraftTree
from support.drafting import nan_fill, problem

FIELDS = ("draft_tokens", "parents", "tree_mask", "tree_position_ids", "retrieve_indices", "num_leaves")


@dataclass(frozen=True)
class Drafted:
    """One draft: what went in, what came out, and what the replay says."""

    cfg: DrafterConfig
    features: torch.Tensor | tuple[torch.Tensor, ...]
    weights: Weights
    bufs: Buffers
    step: Step
    tree: DraftTree
    agreement: Any

    def reference_tree(self) -> DraftTree:
        self.bufs.keys.copy_(self.step.keys)
        self.bufs.values.copy_(self.step.values)
        launch_drafter(self.cfg, self.step.features, self.weights, self.bufs, "reference")
        return tree_of(self.bufs)


def draft(head, tree, prefixes, num_new, active=None, weight_dtype=None, separate_taps=False):
    cfg, joined, weights, bufs = problem(head, TreeConfig(*tree), prefixes, num_new, active, weight_dtype)
    taps = tuple(tap.contiguous() for tap in joined.chunk(3, -1)) if separate_taps else joined
    return run(cfg, taps, weights, bufs)


def run(cfg, features, weights, bufs):
    nan_fill(bufs)
    step = Step.of(features, bufs)
    launch_drafter(cfg, features, weights, bufs, "triton")
    check_finished(bufs)
    tree = tree_of(bufs)
    candidates = candidates_of(bufs)
    head = exact_head(weights.head, cfg)
    agreement = replay(
        head, bufs.tree, step, candidates, tree, bufs.keys, bufs.values, atol=LOG_PROB_ATOL[cfg.weight_dtype]
    )
    return Drafted(cfg, features, weights, bufs, step, tree, agreement)


def assert_agrees(drafted: Drafted) -> None:
    assert drafted.agreement.agrees, str(drafted.agreement)


def assert_equal_trees(mine: DraftTree, other: DraftTree) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(mine, name), getattr(other, name)), name


def assert_is_the_references(drafted: Drafted) -> None:
    """Of drafts in float32, whose trees are decided clearly."""
    assert_agrees(drafted)
    assert_equal_trees(drafted.tree, drafted.reference_tree())
