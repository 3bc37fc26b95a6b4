"""The four phases of a decoding step, as work that nothing waits in, unless the drafter, the target or a host does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..ops import Ops
from ..settings import TreeConfig
from ..target.kernels.tree_rows import tree_rows
from ..tree import Trees
from .checks import Checks
from .choice import HostChoice, TokenChoice
from .drafts import Drafts
from .graphs import Phase
from .kernels.acceptance import commit_features, commit_kv, list_active, walk
from .kernels.choice_kernels import ChoiceRules
from .slots import Slots

Revision: TypeAlias = Callable[[Trees, Tensor], None]
"""Overwrites choices int32 [batch, nodes] of drafted trees, once the target has chosen at every node."""


class StepPhases:
    """Makes the phases of steps.

    ``waits``: whether the target's forward waits for the host. ``offsets`` int32 [slots]: a new row's position minus
    its cache row; None where they are the same. ``checks``: rules of ``EAGLE_SLIM_CHECK``, checked after each phase.
    ``revise`` has the last word on the choices at drafted trees; then a host chooses none of them.
    """

    def __init__(
        self,
        slots: Slots,
        drafts: Drafts,
        choice: TokenChoice,
        *,
        waits: bool = False,
        offsets: Tensor | None = None,
        checks: Checks | None = None,
        revise: Revision | None = None,
    ) -> None:
        self._slots, self._drafts, self._choice = slots, drafts, choice
        self._waits, self._offsets, self._checks, self.revise = waits, offsets, checks, revise
        self._ops = Ops.for_device(slots.target.device)
        self._first_row = torch.zeros(1, dtype=torch.int32, device=slots.target.device)

    def of(
        self, batch: int, rules: ChoiceRules, tree: TreeConfig | None, host: HostChoice | None = None
    ) -> Sequence[Phase]:
        """Return the phases of a step of up to ``batch`` sequences: draft, verify, accept, commit.

        ``tree``: the shape of its trees; None decodes plainly. ``host`` chooses tokens in the place of the kernels.
        """
        ops, slots, drafts, checks = self._ops, self._slots, self._drafts, self._checks
        state, trees = slots.state, drafts.buffers(tree)
        nodes, rows = trees.nodes, trees.rows(batch)
        bufs, choices = trees.bufs.first(batch * nodes), trees.choices[:batch]
        error = None if trees.drafter is None else trees.drafter.error
        # Plain steps leave their pairs waiting until a step drafts again.
        leaves_pairs = tree is None and drafts.drafter is not None
        revise = None if tree is None else self.revise

        def draft() -> None:
            drafts.draft(trees, batch, rules)
            if checks is not None and trees.mask is not None:
                checks.check_draft(trees.trees, trees.mask, slots.target.vocab_size)

        def verify() -> None:
            ops(tree_rows)(trees.trees, rows)
            if self._offsets is not None:
                at = rows.attention.slots.clamp(min=0).long()
                rows.positions.view(batch, nodes).add_(self._offsets[at][:, None])
            slots.target.forward(rows, slots.cache, bufs)
            if checks is not None:
                checks.check_verify(rows, bufs, trees.trees)

        def accept() -> None:
            self._choice.choose(bufs.logits, trees.trees, rules, host if revise is None else None, choices)
            if revise is not None:
                revise(trees.trees, choices)
            ops(walk)(choices, trees.trees, trees.longest, state, error, leaves_pairs)
            if checks is not None:
                checks.check_accept(choices, trees.trees)

        def commit() -> None:
            for keys, values in slots.cache.stacks:
                ops(commit_kv)(state, keys, values)
            if slots.features is not None:
                ops(commit_features)(state, bufs.features, nodes, self._first_row, slots.features)
            self._choice.mark_accepted(state, rules)
            drafts.commit_step()
            ops(list_active)(state)

        return (
            Phase("draft", draft, drafts.waits and tree is not None),
            Phase("verify", verify, self._waits),
            Phase("accept", accept, host is not None),
            Phase("commit", commit),
        )
