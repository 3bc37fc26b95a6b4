"""Partial verification: steps run ahead over a part of the cache, and passes over all of it confirm their tokens.

A step's draft is a few steps of another decoder, whose target attends to the blocks that matter most
(`target.short_cache`), as in SpecPV (arXiv 2512.02337)::

    take a part of the cache        blocks by the queries of the last full pass
    num_steps times                 draft a tree, verify it over the part, accept, commit to the part
    verify the chain of all that    over the whole cache; keep its longest right beginning

The whole cache, lengths, random numbers, penalties and records know of the full pass alone, so nothing has to be rolled
back, and the output is that without the option. "lossy" takes the chain as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter
from ..ops import named_range
from ..settings import PartialVerification
from ..target.cache import KVCache, Target
from ..target.short_cache import ROWS, ShortCache
from ..tree import Trees
from .choice import HostChoice
from .decoder import Decoder, GraphPool, TreeShape
from .kernels.acceptance import ENDED_BY_FAULT, SlotState
from .kernels.choice_kernels import ChoiceRules


class PartialDecoder(Decoder):
    """A `Decoder` that verifies chains which `ahead`, built by ``new_ahead``, accepted over a part of the cache."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        drafter: BufferedDrafter,
        option: PartialVerification,
        waits: bool = False,
        pool: GraphPool | None = None,
        *,
        new_ahead: Callable[..., Decoder] = Decoder,
    ) -> None:
        super().__init__(target, cache, drafter, waits, pool, chain=option.chain)
        self.option = option
        self.draft_waits = waits or drafter.waits
        tree, nodes = drafter.tree, self.shape.nodes
        # Whatever is ahead, one step more may be accepted, and a tree verified after it.
        room = option.num_steps * tree.path_width + tree.total_tokens + 1
        self.part = ShortCache(target, cache, option.num_blocks, room, nodes)
        self.ahead = new_ahead(target, self.part.cache, drafter, waits, pool, self.part.offsets)
        self.ahead.checks = None

        # Its own, as `ahead` writes those of the drafter.
        self.features = drafter.features.new_zeros((*self.state.new_tokens.shape, drafter.features.shape[2]))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        # Of each slot, the tokens ahead and their number; the extra place absorbs overflow.
        self._chain, self.count = zeros(self.num_slots, nodes), zeros(self.num_slots)
        self._tallies = zeros(2, dtype=torch.int64)
        """Partial passes of all slots, and tokens of chains that full passes did not confirm, since `clear_`."""
        layers, width = len(target.layer_shapes), target.layer_shapes[0].heads * target.layer_shapes[0].key_dim
        # Of all nodes, as it is not known which of them are accepted; of a prompt its last ones.
        self._queries = zeros(self.num_slots * nodes, layers, width, dtype=target.dtype)
        self._prompt_queries = zeros(ROWS, layers, width, dtype=target.dtype)
        self.shape.bufs.queries = self._queries

    def clear_(self) -> None:
        """See `Decoder.clear_`."""
        super().clear_()
        self._tallies.zero_()

    def counts(self) -> dict[str, int]:
        """See `Decoder.counts`."""
        passes, lost = self._tallies.tolist()
        return {"num_partial_passes": passes, "num_rolled_back_tokens": lost}

    def enter(
        self,
        num_tokens: int,
        rules: ChoiceRules,
        host: HostChoice | None = None,
        held: Callable[[], Tensor] | None = None,
    ) -> None:
        """See `Decoder.enter`."""
        super().enter(num_tokens, rules, host, held)
        self.part.bound_slot(self.box.numbers[:1])

    def new_chunk(self, nodes: int) -> Any:
        """See `Decoder.new_chunk`."""
        chunk = super().new_chunk(nodes)
        chunk.bufs.queries = self._prompt_queries
        return chunk

    def draft(self, shape: TreeShape, places: int, rules: ChoiceRules) -> None:
        """Run ahead for ``places`` sequences, and write their chains."""
        state, own, ahead = self.state, self.ahead.state, self.ahead
        self.part.take(state.lengths)
        self._take_pairs()
        own.lengths.copy_(self.part.lengths)
        for name in (
            "active_slots",
            "active_inverse",
            "active_count",
            "running",
            "num_generated",
            "max_generated",
            "eos_ids",
        ):
            getattr(own, name).copy_(getattr(state, name))
        ahead.choice = self.choice._replace(num_generated=own.num_generated, seen=ahead.choice.seen)
        ahead.choice.seen.copy_(self.choice.seen)
        self.count.zero_()
        self._chain.zero_()
        for _ in range(self.option.num_steps):
            for phase in ahead.phases(places, rules, ahead.tree):
                with named_range(f"ahead {phase.name}"):
                    phase.run()
            self._extend_chain()
        tokens = shape.trees.draft_tokens
        tokens[:, :1] = state.new_tokens.gather(1, (state.num_new[:, None].long() - 1).clamp(min=0))
        tokens[:, 1:] = self._chain[:, :-1]

    def _extend_chain(self) -> None:
        """Append the tokens of the last partial pass to the chain."""
        own, most = self.ahead.state, self.shape.nodes - 1
        # Logits that are no distribution are left to the full pass.
        accepted = own.record[:-1, 0] - (own.record[:-1, 2] == ENDED_BY_FAULT).int()
        step = torch.arange(own.new_tokens.shape[1], device=accepted.device)
        at = self.count[:, None] + step
        at = torch.where(step < accepted[:, None], at.clamp(max=most), most)
        self._chain.scatter_(1, at.long(), own.new_tokens)
        self.count.add_(accepted).clamp_(max=most)
        self._tallies[0] += (accepted > 0).sum()

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:
        """See `Decoder.choose`; "lossy" takes what is ahead."""
        is_chain = choices.shape[1] > 1 and self.option.mode == "lossy"
        super().choose(logits, trees, rules, None if is_chain else host, choices)
        if is_chain:
            self.take_as_is(choices)

    def take_as_is(self, choices: Tensor) -> None:
        """Overwrite choices int32 [places, nodes] with the chain."""
        slots = self.state.active_slots[: len(choices)].clamp(min=0).long()
        step = torch.arange(choices.shape[1] - 1, device=choices.device)
        given = step < self.count[slots][:, None]
        choices[:, :-1] = torch.where(given, self._chain[slots, :-1], choices[:, :-1])

    def remember(self, state: SlotState, rules: ChoiceRules) -> None:
        """See `Decoder.remember`; also keep the accepted queries, and count tokens that were not confirmed."""
        super().remember(state, rules)
        accepted = state.record[:-1, 0]
        if state is self.entering:
            queries = self._prompt_queries.expand(self.num_slots, -1, -1, -1)
        else:
            self._tallies[1] += torch.where(accepted > 0, self.count - accepted + 1, 0).clamp(min=0).sum()
            back = torch.arange(ROWS, device=state.num_new.device)
            node = (state.num_new[:, None] - 1 - back).clamp(min=0)
            place = state.active_inverse.clamp(min=0)[:, None].long()
            queries = self._queries[place * self.shape.nodes + node]
        # Only a prompt's last chunk has a record.
        self.part.keep_queries(queries, accepted > 0)
