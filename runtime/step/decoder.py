"""Decode a number of slots in steps, replayed from CUDA graphs.

One step is four phases (`phases`)::

    draft    the drafter: trees of the active slots, from last step's tokens and features
    verify   rows of all nodes, then the target's forward over them
    accept   the target's choice at every node, then the walk: path, tokens, lengths, ends
    commit   the path's keys, values and features to their rows; the list of slots that still run

Nothing in a phase waits for the host or allocates, unless the drafter or the target does, or tokens are chosen on the
host (`HostChoice`). A step in which nothing waits is replayed from one graph for each bucket of active slots; else its
phases run one after another, each from its own graph where it can be captured. On the CPU the same phases run with the
PyTorch twins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from eagle_slim.vocab_tools.compat import copy_together_

from ..compiling.pool import pool_for
from ..drafter.drafter import BufferedDrafter
from ..ops import Ops, counted_apart, is_set, ranges_wanted
from ..settings import TreeConfig
from ..target.cache import KVCache, Target
from ..target.fused import FusedTarget
from .checks import Checks
from .choice import HostChoice, TokenChoice
from .drafts import DrafterTrees, Drafts, take_pairs
from .graphs import GraphKey, GraphPool, Graphs, Phase, WarmUp, bucket_of, buckets_up_to, group_phases
from .kernels.acceptance import list_active
from .kernels.choice_kernels import ChoiceRules
from .phases import Revision, StepPhases
from .prefill import Prefill
from .shapes import shapes_for
from .slots import Slots

_TIMED = 2
"""Replays of a step whose time is taken: few, as each of a shape that does not pay is time lost."""


class Decoder:
    """Runs prompts and steps of all ``slots``, which verify ``drafts``.

    ``waits``: whether the target's forward cannot be held by a graph. ``pool``: memory that the graphs share with those
    of other decoders; None is a pool of its own. ``revise``: as in `StepPhases`.
    """

    def __init__(
        self,
        slots: Slots,
        drafts: Drafts,
        waits: bool = False,
        pool: GraphPool | None = None,
        revise: Revision | None = None,
    ) -> None:
        self.slots, self.drafts, self.waits = slots, drafts, waits
        self.state, self.tree = slots.state, drafts.tree
        self.target, self.cache, self.num_slots = slots.target, slots.cache, slots.cache.num_slots
        device = self.target.device
        self.ops = Ops.for_device(device)
        self.checks = Checks(device, slots.state, slots.entering) if is_set("EAGLE_SLIM_CHECK") else None
        """Rules of ``EAGLE_SLIM_CHECK``; None without it."""
        own_pool = GraphPool() if pool is None and device.type == "cuda" and not ranges_wanted() else pool
        # PyTorch's operations would read what kernels that are only recorded have not written: those of other forwards,
        # and of the checks.
        is_apart = own_pool is not None and isinstance(self.target, FusedTarget) and self.checks is None
        self.graphs = Graphs(own_pool, slots.hidden, pool_for(device) if is_apart else None)
        nodes = 1 if self.tree is None else self.tree.total_tokens
        choice = TokenChoice(self.ops, slots.choice, self.target.vocab_size, nodes)
        self.steps = StepPhases(slots, drafts, choice, waits=waits, checks=self.checks, revise=revise)
        self.prompts = Prefill(slots, drafts, choice, self.graphs, waits)
        self._pairs = [] if drafts.drafter is None else [Phase("pairs", partial(take_pairs, drafts.drafter, slots))]
        self._max_waiting = 1
        """Most tokens of a slot that its drafter has not taken."""
        self._compiled: set[tuple[TreeConfig | None, int, ChoiceRules]] = set()

    @classmethod
    def of_drafter(
        cls,
        target: Target,
        cache: KVCache,
        drafter: BufferedDrafter | None,
        waits: bool = False,
        pool: GraphPool | None = None,
        revise: Revision | None = None,
    ) -> Decoder:
        """Build a decoder whose steps verify a drafter's trees; None decodes plainly."""
        slots = Slots.allocate(target, cache, drafter)
        return cls(slots, DrafterTrees(slots, drafter), waits, pool, revise)

    def clear_(self) -> None:
        """Empty all slots."""
        self.state.clear_()
        self.slots.entering.active_count.zero_()
        self._max_waiting = 1
        for tensor in (*self.drafts.barriers, *self.drafts.tallies.values()):
            tensor.zero_()
        if self.checks is not None:
            self.checks.fault.zero_()

    def fill_(self, num_active: int, length: int) -> None:
        """Pretend that sequences of ``length`` tokens run in the first ``num_active`` slots, with no end in sight."""
        self.clear_()
        state = self.state
        state.lengths[:num_active] = length
        state.num_new[:num_active] = 1
        state.prefix[:num_active] = length - 1
        state.new_tokens[:num_active, 0] = 7
        state.max_generated.fill_(1 << 30)
        state.running[:num_active] = 1
        self.ops(list_active)(state)

    def step(
        self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None, host: HostChoice | None = None
    ) -> None:
        """Run one step; ``num_active``: at least as many slots as are running.

        ``tree``: the shape of its trees, at most that of `tree`; None decodes plainly. ``host`` chooses tokens on the
        host, in the place of the kernels.
        """
        batch = self._begin_step(num_active, rules, tree)
        whole = self.graphs.get(("step", tree, batch), rules) if host is None else None
        if whole is not None:
            whole()
        else:
            self.graphs.run(("step", tree, batch), rules, self.steps.of(batch, rules, tree, host))

    def timed_step(
        self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None, host: HostChoice | None = None
    ) -> Iterator[Phase]:
        """Yield the phases of one step, for the caller to run in order; arguments as in `step`."""
        batch = self._begin_step(num_active, rules, tree)
        for phase in self.steps.of(batch, rules, tree, host):
            yield Phase(phase.name, partial(self.graphs.run, (phase.name, tree, batch), rules, [phase]))

    def is_ready(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> bool:
        """Return whether a step can run without being captured first; arguments as in `step`."""
        is_whole = self.graphs.can_capture and not self.waits and not self.drafts.waits
        return not is_whole or self.graphs.get(("step", tree, self.batch_for(num_active)), rules) is not None

    def batch_for(self, num_active: int) -> int:
        """Count the sequences of a forward: a bucket where kernels are compiled for each number, else those running."""
        return min(bucket_of(num_active), self.num_slots) if self.ops.use_kernels else num_active

    def stop_slot(self, slot: int) -> None:
        """Take a slot out of all further steps."""
        self.state.running[slot : slot + 1].zero_()
        self.ops(list_active)(self.state)

    def counts(self) -> dict[str, int]:
        """Return fields of `GenerationStats` since `clear_`; waits for the device."""
        return {name: int(tally) for name, tally in self.drafts.tallies.items()}

    def time_step(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> float:
        """Time a step of the running sequences, ms, and put their state back: what is generated does not change.

        Its rows of the caches lie behind the committed ones, where the next step writes. Waits for the device.
        """
        batch = self.batch_for(num_active)
        self.graphs.num_pauses += 1
        # Pairs that are taken stay taken.
        self._make_room(rules, tree)
        changed = self.slots.changed
        before = [tensor.clone() for tensor in changed]
        run = partial(self.graphs.run, ("step", tree, batch), rules, self.steps.of(batch, rules, tree))
        spans = []
        with counted_apart():
            # Captured before it is timed.
            if not self.is_ready(num_active, rules, tree):
                run()
            for _ in range(_TIMED):
                # Few launches: a host that comes late would leave a gap within what is timed.
                copy_together_(changed, before)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                spans.append((begin, end))
        copy_together_(changed, before)
        torch.cuda.synchronize()
        # What else runs here makes single steps longer, never shorter.
        return float(min(begin.elapsed_time(end) for begin, end in spans))

    def warm_up(self, rules: ChoiceRules, num_active: int, trees: Sequence[TreeConfig | None]) -> WarmUp:
        """Compile and capture steps of ``trees``, and chunks, of up to ``num_active`` sequences.

        All slots must be empty.
        """
        if not self.graphs.can_capture:
            return WarmUp()
        groups: dict[GraphKey, Phase] = {}
        for batch in buckets_up_to(num_active):
            # A single shape is what was asked for.
            for tree in shapes_for(batch, trees) if len(trees) > 1 else trees:
                groups |= self._step_groups(batch, rules, tree)
        if len(trees) > 1:
            groups |= group_phases(("pairs",), self._pairs)
        groups |= self.prompts.groups(rules)
        return self.graphs.warm_up(groups, rules)

    def begin_compiling(
        self, num_active: int, rules: ChoiceRules, trees: Sequence[TreeConfig | None], num_tokens: Iterable[int]
    ) -> None:
        """Have what a call begins with compiled in other processes: steps of ``trees``, and prompts.

        ``num_tokens``: of the prompts. What ``trees`` names first is compiled first, with the prompts; of the rest, the
        largest trees, which take longest.
        """
        first, *rest = trees
        self.graphs.are_compiled(self.prompts.groups(rules, num_tokens), rules)
        self.is_compiled(num_active, rules, first)
        self.graphs.are_compiled(group_phases(("pairs",), self._pairs), rules)
        for tree in sorted(rest, key=lambda each: 0 if each is None else each.total_tokens, reverse=True):
            self.is_compiled(num_active, rules, tree)

    def is_compiled(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> bool:
        """Return whether a step's kernels are compiled; they will be, where this is asked. Arguments as in `step`."""
        key = tree, self.batch_for(num_active), rules
        if key not in self._compiled and self.graphs.are_compiled(self._step_groups(num_active, rules, tree), rules):
            self._compiled.add(key)
        return key in self._compiled

    def _begin_step(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> int:
        """Make room for a step, and count the tokens that will wait for the drafter after it; returns its batch."""
        self._make_room(rules, tree)
        self._max_waiting = self._max_waiting + 1 if tree is None else tree.path_width
        return self.batch_for(num_active)

    def _make_room(self, rules: ChoiceRules, tree: TreeConfig | None) -> None:
        """Have the drafter take the waiting pairs, where they are more than a draft takes or leave no room for another.

        Must precede a step of ``tree``.
        """
        room = self.state.new_tokens.shape[1] - 1 if tree is None else tree.new_tokens_width
        if self._pairs and self._max_waiting > room:
            self.graphs.run(("pairs",), rules, self._pairs)
            self._max_waiting = 1

    def _step_groups(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> Mapping[GraphKey, Phase]:
        batch = self.batch_for(num_active)
        return group_phases(("step", tree, batch), self.steps.of(batch, rules, tree))
