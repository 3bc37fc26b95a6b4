"""A target over a cache, and the state of all its slots between two steps; graphs hold its addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..drafter.buffers import INPUTS
from ..drafter.drafter import BufferedDrafter
from ..settings import MAX_NEW_TOKENS, TreeConfig
from ..target.cache import KVCache, Target
from .kernels.choice_kernels import ChoiceState
from .kernels.prompt_chunks import MAX_EOS, PromptBox
from .kernels.slot_state import SlotState


@dataclass(frozen=True)
class Slots:
    """A target, its cache, and what its slots, the choice of their tokens, and an entering prompt are at."""

    target: Target
    cache: KVCache
    state: SlotState
    entering: SlotState
    """The same slots with lists and a record of their own: a prompt's last chunk is accepted alone, beside slots that
    are running."""
    choice: ChoiceState
    box: PromptBox
    features: Tensor | None
    """[slots, steps, feature_width] of the last step's tokens, as the next draft takes them; None decodes plainly."""

    @classmethod
    def allocate(
        cls, target: Target, cache: KVCache, drafter: BufferedDrafter | None, chain: TreeConfig | None = None
    ) -> Slots:
        """Allocate for steps over a drafter's trees, which reads its inputs where they lie; None decodes plainly.

        ``chain``: for steps over chains of this shape instead, with tensors apart from the drafter's.
        """
        slots, device, width = cache.num_slots, target.device, MAX_NEW_TOKENS
        features, shared = None, dict[str, Tensor]()
        if drafter is not None and chain is None:
            width, features = drafter.tree.new_tokens_width, drafter.features
            shared = {name: getattr(drafter.bufs, name) for name in INPUTS}
        elif drafter is not None and chain is not None:
            width = chain.new_tokens_width
            features = drafter.features.new_zeros((slots, width, drafter.features.shape[2]))
        state = SlotState.allocate(slots, MAX_EOS, device, width, **shared)
        lists = SlotState.allocate(slots, MAX_EOS, device, width)
        names = ("active_slots", "active_inverse", "active_count", "record")
        entering = state._replace(**{name: getattr(lists, name) for name in names})
        choice = ChoiceState.allocate(slots, cache.capacity, target.vocab_size, device)
        choice = choice._replace(num_generated=state.num_generated)
        return cls(target, cache, state, entering, choice, PromptBox.allocate(cache.capacity, device), features)

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
