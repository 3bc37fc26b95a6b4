"""Partial verification: passes over a part of the cache accept tokens, and passes over all of it confirm them.

The drafts of a step are chains: a few steps over the blocks that matter most (`target.short_cache`), as in SpecPV
(arXiv 2512.02337)::

    take a part of the cache        blocks by the queries of the last full pass
    num_steps times                 draft a tree, verify it over the part, accept, commit to the part
    verify the chain of all that    over the whole cache; keep its longest right beginning

The whole cache, lengths, random numbers, penalties and records know of the full pass alone, so nothing has to be rolled
back, and the output is that without the option. "lossy" takes the chain for granted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter
from ..ops import Ops, named_range
from ..settings import PartialVerification, TreeConfig
from ..target.cache import KVCache, Target
from ..target.short_cache import ROWS, ShortCache
from ..tree import Trees
from .choice import TokenChoice
from .decoder import Decoder
from .drafts import DrafterTrees, Drafts, TreeBuffers, take_pairs
from .graphs import GraphPool
from .kernels.choice_kernels import ChoiceRules
from .kernels.slot_state import ENDED_BY_FAULT
from .phases import Revision, StepPhases
from .slots import Slots


class PartialChains(Drafts):
    """Chains of tokens that steps over a part of the cache accepted. See `Drafts`.

    ``slots``: of the passes over the whole cache. ``revise``: as in `StepPhases`, of the steps over the part.
    """

    drafter: BufferedDrafter
    tree: TreeConfig
    prompt_queries: Tensor

    def __init__(
        self, slots: Slots, drafter: BufferedDrafter, option: PartialVerification, waits: bool, revise: Revision | None
    ) -> None:
        self.drafter, self.tree, self.waits = drafter, option.chain, waits or drafter.waits
        self._slots, self._num_steps = slots, option.num_steps
        target, num_slots, nodes = slots.target, slots.cache.num_slots, self.tree.total_tokens
        # Whatever a chain holds, one step more may be accepted, and a tree verified after it.
        room = option.num_steps * drafter.tree.path_width + drafter.tree.total_tokens + 1
        self.part = ShortCache(target, slots.cache, option.num_blocks, room, nodes)
        partial = Slots.allocate(target, self.part.cache, drafter)
        # Numbers, keys and barred ids are those of the call.
        choice = slots.choice._replace(num_generated=partial.state.num_generated, seen=partial.choice.seen)
        self._partial_state, self._partial_seen, self._partial_tree = partial.state, choice.seen, drafter.tree
        trees = DrafterTrees(partial, drafter)
        chooser = TokenChoice(Ops.for_device(target.device), choice, target.vocab_size, drafter.tree.total_tokens)
        self._phases = StepPhases(partial, trees, chooser, waits=waits, offsets=self.part.offsets, revise=revise)
        self.barriers = trees.barriers

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        # The extra place absorbs overflow.
        self._chain, self.lengths = zeros(num_slots, nodes), zeros(num_slots)
        """Of each slot, the tokens of its chain and their number."""
        tallies = zeros(2, dtype=torch.int64)
        self._num_passes, self._num_lost = tallies[0], tallies[1]
        self.tallies = {"num_partial_passes": self._num_passes, "num_rolled_back_tokens": self._num_lost}
        layers, width = len(target.layer_shapes), target.layer_shapes[0].heads * target.layer_shapes[0].key_dim
        # Of all nodes, as it is not known which of them are accepted; of a prompt its last ones.
        self._queries = zeros(num_slots * nodes, layers, width, dtype=target.dtype)
        self.prompt_queries = zeros(ROWS, layers, width, dtype=target.dtype)
        self._buffers = TreeBuffers(slots, None, nodes)
        self._buffers.bufs.queries = self._queries

    def buffers(self, tree: TreeConfig | None) -> TreeBuffers:
        """See `Drafts.buffers`; there is one shape."""
        assert tree == self.tree, tree
        return self._buffers

    def draft(self, trees: TreeBuffers, batch: int, rules: ChoiceRules) -> None:
        """Run steps over the part for ``batch`` sequences, and write their chains."""
        state, choice = self._slots.state, self._slots.choice
        self.part.take(state.lengths)
        take_pairs(self.drafter, self._slots)
        self._partial_state.lengths.copy_(self.part.lengths)
        self._partial_state.copy_progress_(state)
        self._partial_seen.copy_(choice.seen)
        self.lengths.zero_()
        self._chain.zero_()
        for _ in range(self._num_steps):
            for phase in self._phases.of(batch, rules, self._partial_tree):
                with named_range(f"partial {phase.name}"):
                    phase.run()
            self._extend_chains()
        trees.write_roots()
        trees.trees.draft_tokens[:, 1:] = self._chain[:, :-1]

    def _extend_chains(self) -> None:
        record, new_tokens = self._partial_state.record, self._partial_state.new_tokens
        last = self.tree.total_tokens - 1
        # Logits that are no distribution are left to the full pass.
        accepted = record[:-1, 0] - (record[:-1, 2] == ENDED_BY_FAULT).int()
        step = torch.arange(new_tokens.shape[1], device=accepted.device)
        at = self.lengths[:, None] + step
        at = torch.where(step < accepted[:, None], at.clamp(max=last), last)
        self._chain.scatter_(1, at.long(), new_tokens)
        self.lengths.add_(accepted).clamp_(max=last)
        self._num_passes += (accepted > 0).sum()

    def accept_chains(self, trees: Trees, choices: Tensor) -> None:
        """Overwrite choices int32 [batch, nodes] with the chains: the `Revision` of "lossy"."""
        slots = trees.active_slots[: len(choices)].clamp(min=0).long()
        step = torch.arange(choices.shape[1] - 1, device=choices.device)
        given = step < self.lengths[slots][:, None]
        choices[:, :-1] = torch.where(given, self._chain[slots, :-1], choices[:, :-1])

    def commit_step(self) -> None:
        """Keep the queries of accepted nodes, and count the tokens that were not confirmed."""
        state = self._slots.state
        accepted = state.record[:-1, 0]
        self._num_lost += torch.where(accepted > 0, self.lengths - accepted + 1, 0).clamp(min=0).sum()
        back = torch.arange(ROWS, device=state.num_new.device)
        node = (state.num_new[:, None] - 1 - back).clamp(min=0)
        place = state.active_inverse.clamp(min=0)[:, None].long()
        self.part.keep_queries(self._queries[place * self.tree.total_tokens + node], accepted > 0)

    def commit_chunk(self) -> None:
        """Keep the queries of a prompt's last rows."""
        queries = self.prompt_queries.expand(len(self._slots.state.lengths), -1, -1, -1)
        # Only a prompt's last chunk has a record.
        self.part.keep_queries(queries, self._slots.entering.record[:-1, 0] > 0)

    def enter(self, slot: Tensor) -> None:
        """Bound the keys of a new sequence's blocks."""
        self.part.bound_slot(slot)


def partial_decoder(
    target: Target,
    cache: KVCache,
    drafter: BufferedDrafter,
    option: PartialVerification,
    waits: bool = False,
    pool: GraphPool | None = None,
) -> Decoder:
    """Build a decoder whose full passes verify `PartialChains`."""
    slots = Slots.allocate(target, cache, drafter, option.chain)
    chains = PartialChains(slots, drafter, option, waits, None)
    return Decoder(slots, chains, waits, pool, chains.accept_chains if option.mode == "lossy" else None)
