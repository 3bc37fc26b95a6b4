"""Partial verification: steps run ahead over a part of the cache, and passes over all of it confirm what they accept.

A drafter of chains for a `Decoder`. Its draft is a few steps of another decoder, whose target attends to the blocks
that matter most (`target.short_cache`), as in SpecPV (arXiv 2512.02337)::

    take a part of the cache        blocks by the queries of the last full pass
    num_steps times                 draft a tree, verify it over the part, accept, commit to the part
    verify the chain of all that    over the whole cache; keep its longest right beginning

The whole cache, lengths, random numbers, penalties and records know of the full pass alone, so nothing has to be rolled
back, and the output is that without the option. "lossy" takes the chain as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter
from ..drafter.weights import HeadWeights
from ..ops import named_range
from ..settings import PartialVerification
from ..target.cache import KVCache, Target
from ..target.short_cache import ROWS, ShortCache
from ..tree import Trees
from .decoder import Decoder
from .graphs import GraphPool
from .host_choice import HostChoice
from .kept_rows import HeldRow
from .kernels.acceptance import ENDED_BY_FAULT, SlotState
from .kernels.choice_kernels import ChoiceRules
from .pending import take_pairs


class RunAhead:
    """Runs ahead with a drafter for up to ``num_slots`` sequences, and gives what was accepted as chains."""

    def __init__(
        self, target: Target, cache: KVCache, drafter: BufferedDrafter, option: PartialVerification, waits: bool,
        pool: GraphPool | None,
    ) -> None:  # fmt: skip
        slots, device, self.tree, self.option = cache.num_slots, target.device, option.chain, option
        self.drafter, self.waits = drafter, waits or drafter.waits
        nodes = drafter.tree.total_tokens
        # Whatever is ahead, one step more may be accepted, and a tree verified after it.
        room = option.num_steps * drafter.tree.path_width + nodes + 1
        self.part = ShortCache(target, cache, option.num_blocks, room, self.tree.total_tokens)
        self.ahead = self._decoder(target, self.part.cache, drafter, slots, waits, pool, self.part.offsets)
        width = self.tree.new_tokens_width

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # The extra place absorbs overflow.
        self._chain, self._count = ints(slots, self.tree.total_tokens), ints(slots)
        chain = torch.arange(self.tree.total_tokens, device=device).expand(slots, -1).contiguous()
        self.bufs = replace(
            drafter.bufs, new_tokens=ints(slots, width), num_new=ints(slots), prefix=ints(slots),
            active_slots=ints(slots), active_inverse=ints(slots), active_count=ints(1),
            draft_tokens=torch.zeros_like(chain), parents=chain - 1, tree_position_ids=chain,
        )  # fmt: skip
        """Own inputs and outputs of a decoder; the rest is the drafter's."""
        self.features = torch.zeros((slots, width, drafter.features.shape[2]), dtype=drafter.features.dtype,
                                    device=device)  # fmt: skip
        """As `BufferedDrafter.features`."""
        self.counts = ints(2, dtype=torch.int64)
        """int64 [2]: partial passes of all slots, and tokens of chains that full passes did not confirm; since it was
        zeroed."""

    def _decoder(self, *args: Any) -> Decoder:
        """Build the decoder that runs ahead."""
        return Decoder(*args)

    @property
    def head(self) -> HeadWeights:
        """The draft head's weights."""
        return self.drafter.head

    @property
    def error(self) -> Tensor:
        """See `BufferedDrafter.error`."""
        return self.drafter.error

    def clear_error_(self) -> None:
        """See `BufferedDrafter.clear_error_`."""
        self.drafter.clear_error_()

    def prefill(self, features: Tensor, next_tokens: Tensor, positions: Tensor, rows: Tensor, slots: Tensor) -> None:
        """See `BufferedDrafter.prefill`."""
        self.drafter.prefill(features, next_tokens, positions, rows, slots)

    def run(self, places: int, rules: ChoiceRules, state: SlotState, choice: Any) -> None:
        """Run ahead of ``state`` for ``places`` sequences, and write their chains."""
        ahead = self.ahead
        self.part.take(state.lengths)
        take_pairs(self.drafter, self.bufs, self.features)
        own = ahead.state
        own.lengths.copy_(self.part.lengths)
        for name in ("active_slots", "active_inverse", "active_count", "running", "num_generated", "max_generated",
                     "eos_ids"):  # fmt: skip
            getattr(own, name).copy_(getattr(state, name))
        ahead.choice = choice._replace(num_generated=own.num_generated, seen=ahead.choice.seen)
        ahead.choice.seen.copy_(choice.seen)
        self._count.zero_()
        self._chain.zero_()
        for _ in range(self.option.num_steps):
            for phase in ahead.phases(places, rules, ahead.tree):
                with named_range(f"ahead {phase.name}"):
                    phase.run()
            self._note()
        tokens = self.bufs.draft_tokens
        tokens[:, :1] = self.bufs.new_tokens.gather(1, (self.bufs.num_new[:, None].long() - 1).clamp(min=0))
        tokens[:, 1:] = self._chain[:, :-1]

    def _note(self) -> None:
        """Put what the last partial pass accepted behind the chain."""
        own, most = self.ahead.state, self.tree.total_tokens - 1
        # A token that is none is left to the full pass, which chooses from the same logits.
        accepted = own.record[:-1, 0] - (own.record[:-1, 2] == ENDED_BY_FAULT).int()
        step = torch.arange(own.new_tokens.shape[1], device=accepted.device)
        at = self._count[:, None] + step
        at = torch.where(step < accepted[:, None], at.clamp(max=most), most)
        self._chain.scatter_(1, at.long(), own.new_tokens)
        self._count.add_(accepted).clamp_(max=most)
        self.counts[0] += (accepted > 0).sum()

    def count_lost(self, state: SlotState) -> None:
        """Count what the full pass that was walked just now did not confirm."""
        accepted = state.record[:-1, 0]
        self.counts[1] += torch.where(accepted > 0, self._count - accepted + 1, 0).clamp(min=0).sum()

    def confirm(self, most: Tensor) -> None:
        """Truncate the chain to ``most`` int32 [1] tokens."""
        self._count.clamp_(max=most)

    def take_as_is(self, choices: Tensor) -> None:
        """Let the full pass choose what is ahead: int32 [places, nodes]."""
        slots = self.bufs.active_slots[: len(choices)].clamp(min=0).long()
        step = torch.arange(choices.shape[1] - 1, device=choices.device)
        given = step < self._count[slots][:, None]
        choices[:, :-1] = torch.where(given, self._chain[slots, :-1], choices[:, :-1])


class PartialDecoder(Decoder):
    """A `Decoder` whose drafter runs ahead."""

    kind = RunAhead

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        drafter: BufferedDrafter,
        option: PartialVerification,
        waits: bool = False,
        pool: GraphPool | None = None,
    ) -> None:
        self.run_ahead = self.kind(target, cache, drafter, option, waits, pool)
        super().__init__(target, cache, self.run_ahead, cache.num_slots, waits, pool)
        self.run_ahead.ahead.checks = None
        layers, width = len(target.layer_shapes), target.layer_shapes[0].heads * target.layer_shapes[0].key_dim

        def queries(rows: int) -> Tensor:
            return torch.zeros((rows, layers, width), dtype=target.dtype, device=target.device)

        # Of all nodes, as it is not known which of them are accepted; of a prompt its last ones.
        self._work[self.tree].bufs.queries, self._prompt_queries = queries(self.num_slots * self.nodes), queries(ROWS)

    def clear_(self) -> None:
        """See `Decoder.clear_`."""
        super().clear_()
        self.run_ahead.counts.zero_()

    def counts(self) -> dict[str, int]:
        """See `Decoder.counts`."""
        passes, lost = self.run_ahead.counts.tolist()
        return {"num_partial_passes": passes, "num_rolled_back_tokens": lost}

    def enter(
        self, num_tokens: int, rules: ChoiceRules, host: HostChoice | None = None, held: HeldRow | None = None
    ) -> None:
        """See `Decoder.enter`."""
        super().enter(num_tokens, rules, host, held)
        self.run_ahead.part.bound_slot(self.box.numbers[:1])

    def _draft(self, work: Any, places: int, rules: ChoiceRules) -> None:
        self.run_ahead.run(places, rules, self.state, self.choice)

    def _new_chunk(self, nodes: int) -> Any:
        chunk = super()._new_chunk(nodes)
        chunk.bufs.queries = self._prompt_queries
        return chunk

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:  # fmt: skip
        """See `Decoder.choose`; "lossy" takes what is ahead."""
        is_chain = choices.shape[1] > 1 and self.run_ahead.option.mode == "lossy"
        super().choose(logits, trees, rules, None if is_chain else host, choices)
        if is_chain:
            self.run_ahead.take_as_is(choices)

    def _remember(self, state: SlotState, rules: ChoiceRules) -> None:
        super()._remember(state, rules)
        if state is self.entering:
            queries = self._prompt_queries.expand(self.num_slots, -1, -1, -1)
        else:
            self.run_ahead.count_lost(state)
            back = torch.arange(ROWS, device=state.num_new.device)
            node = (state.num_new[:, None] - 1 - back).clamp(min=0)
            place = state.active_inverse.clamp(min=0)[:, None].long()
            kept = self._work[self.tree].bufs.queries
            assert kept is not None
            queries = kept[place * self.nodes + node]
        # Only a prompt's last chunk has a record.
        self.run_ahead.part.keep_queries(queries, state.record[:-1, 0] > 0)
