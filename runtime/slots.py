"""Which places of a batch hold a running sequence.

A batch has a fixed number of slots. Tensors of fixed shape are indexed by slot; work is done for the active ones only.
Three tensors say which, in the form TensorRT-LLM and SGLang use, so that kernels can read them on the device:
``active_slots[i]`` is the slot of the i-th active sequence, ``active_inverse[slot]`` is that i, ``active_count`` is how
many there are. Example with four slots of which 3 and 1 run::

    active_slots   [1, 3, -1, -1]     active_inverse  [-1, 0, -1, 1]     active_count  [2]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UsageError


@dataclass(frozen=True)
class ActiveSlots:
    """The active slots of a batch, ascending, on the host and on the device."""

    indices: tuple[int, ...]
    """The active slots, ascending (host)."""
    active_slots: Tensor
    """int64 [slots]: the active slots first, then -1."""
    active_inverse: Tensor
    """int64 [slots]: place among the active, -1 for an inactive slot."""
    active_count: Tensor
    """int64 [1]."""

    @classmethod
    def of(cls, indices: Iterable[int], num_slots: int, device: torch.device | str = "cpu") -> ActiveSlots:
        """Build from slot numbers in any order.

        Raises `UsageError` unless all are different and below ``num_slots``.
        """
        chosen = tuple(sorted(indices))
        if len(set(chosen)) != len(chosen) or not all(0 <= slot < num_slots for slot in chosen):
            raise UsageError(
                f"active slots {list(chosen)} must be different and below {num_slots}.",
                active=list(chosen),
                slots=num_slots,
            )
        inverse = [-1] * num_slots
        for place, slot in enumerate(chosen):
            inverse[slot] = place
        return cls(
            chosen,
            torch.tensor([*chosen, *[-1] * (num_slots - len(chosen))], dtype=torch.int64, device=device),
            torch.tensor(inverse, dtype=torch.int64, device=device),
            torch.tensor([len(chosen)], dtype=torch.int64, device=device),
        )

    @property
    def num_slots(self) -> int:
        """Slots of the batch, active or not."""
        return self.active_slots.shape[0]

    @property
    def num_active(self) -> int:
        """Sequences that are running."""
        return len(self.indices)

    def gather(self, by_slot: Tensor) -> Tensor:
        """Take the active rows of a tensor [slots, ...]: [active, ...]."""
        if self.num_active == self.num_slots:
            return by_slot
        return by_slot.index_select(0, self.active_slots[: self.num_active])

    def scatter(self, rows: Tensor, blank: int | float | bool) -> Tensor:
        """Put rows [active, ...] back by slot: [slots, ...], inactive slots filled with ``blank``."""
        if self.num_active == self.num_slots:
            return rows
        by_slot = rows.new_full((self.num_slots, *rows.shape[1:]), blank)
        return by_slot.index_copy(0, self.active_slots[: self.num_active], rows)
