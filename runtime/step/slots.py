"""Tensors that tell where each slot of a decoder stands between two steps; graphs hold their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..drafter.drafter import BufferedDrafter
from ..settings import TreeConfig
from ..target.cache import KVCache, Target
from .kernels.choice_kernels import ChoiceState
from .kernels.prompt_chunks import MAX_EOS, PromptBox
from .kernels.slot_state import SlotState

_INPUTS = ("new_tokens", "num_new", "prefix", "active_slots", "active_inverse", "active_count")
"""Fields of the state that a drafter reads."""


@dataclass(frozen=True)
class Slots:
    """State of all slots, of the choice of their tokens, and of the prompt that enters one of them."""

    state: SlotState
    entering: SlotState
    """The same slots with lists and a record of their own: a prompt's last chunk is accepted alone, beside slots that
    are running."""
    choice: ChoiceState
    box: PromptBox
    features: Tensor | None
    """[slots, steps, feature_width] of the last step's tokens, as the next draft takes them; None decodes plainly."""

    @classmethod
    def of_drafter(cls, target: Target, cache: KVCache, drafter: BufferedDrafter | None) -> Slots:
        """Allocate for steps over a drafter's trees, which reads its inputs where they lie; None decodes plainly."""
        if drafter is None:
            return cls._of(target, cache, SlotState.allocate(cache.num_slots, MAX_EOS, target.device), None)
        shared = {name: getattr(drafter.bufs, name) for name in _INPUTS}
        width = drafter.tree.new_tokens_width
        state = SlotState.allocate(cache.num_slots, MAX_EOS, target.device, width, **shared)
        return cls._of(target, cache, state, drafter.features)

    @classmethod
    def of_chains(cls, target: Target, cache: KVCache, drafter: BufferedDrafter, chain: TreeConfig) -> Slots:
        """Allocate for steps over chains, with tensors apart from those that ``drafter`` reads."""
        state = SlotState.allocate(cache.num_slots, MAX_EOS, target.device, chain.new_tokens_width)
        features = drafter.features.new_zeros((*state.new_tokens.shape, drafter.features.shape[2]))
        return cls._of(target, cache, state, features)

    @classmethod
    def _of(cls, target: Target, cache: KVCache, state: SlotState, features: Tensor | None) -> Slots:
        slots, device = cache.num_slots, target.device
        lists = SlotState.allocate(slots, MAX_EOS, device, state.path.shape[1])
        entering = state._replace(
            active_slots=lists.active_slots,
            active_inverse=lists.active_inverse,
            active_count=lists.active_count,
            record=lists.record,
        )
        choice = ChoiceState.allocate(slots, cache.capacity, target.vocab_size, device)
        choice = choice._replace(num_generated=state.num_generated)
        return cls(state, entering, choice, PromptBox.allocate(cache.capacity, device), features)

    @property
    def hidden(self) -> Sequence[tuple[Tensor, int]]:
        """Tensors by which work sees slots, each with its value where there are none (`Graphs`)."""
        state = self.state
        lists = [(state.active_slots, -1), (state.active_inverse, -1)]
        others = (state.active_count, state.running, state.record, self.box.numbers, state.lengths)
        return [*lists, *((tensor, 0) for tensor in others)]

    @property
    def changed(self) -> list[Tensor]:
        """Tensors that a step writes, its rows of the caches apart."""
        return [*self.state, self.choice.seen, *([] if self.features is None else [self.features])]
