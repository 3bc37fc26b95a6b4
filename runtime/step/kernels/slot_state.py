"""State of every slot between two steps, and the record of a step that the host reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...settings import MAX_NEW_TOKENS

RUNNING, ENDED_BY_EOS, ENDED_BY_LENGTH, ENDED_BY_FAULT = 0, 1, 2, 3
"""Ends of a sequence, as a record has them; the last one: no token could be chosen (`choose_tokens`)."""
RECORD_HEAD = 3
"""A record begins with: tokens accepted, tokens kept, how it ended; then come the tokens, and each one's rank."""


class SlotState(NamedTuple):
    """State of every slot between two steps; int32 on one device. Row s belongs to slot s.

    A sequence whose newest token (the next root) is x_n has ``lengths`` n rows in the target's cache and ``prefix``
    n - ``num_new`` pairs in the drafter's, which takes the last ``num_new`` of ``new_tokens`` and ``features`` first.

    ``lengths``, ``num_new``, ``prefix`` [slots]; ``new_tokens`` [slots, width or more]: tokens of the last step, behind
    those that plain steps kept, ``num_new`` in use, the last one the next root. ``active_slots`` [slots]: the running
    slots, ascending, then -1; ``active_inverse`` [slots]: a slot's place among them, or -1; ``active_count`` [1].
    ``running`` [slots]: 1 while a sequence runs; ``num_generated`` [slots]: new tokens so far; ``max_generated``
    [slots]: where it ends; ``eos_ids`` [slots, ids]: -1 for none. ``path`` [slots, width]: nodes of the last accepted
    path, then -1.

    ``record`` [slots + 1, 3 + 2 * width]: what the host reads of the last step; 0 accepted tokens for a slot that took
    no part. The rank of an accepted node counts its siblings of lower numbers, which were likelier; 0 for the root.
    The last row begins with the drafter's error, with which nothing was accepted.
    """

    lengths: Tensor
    new_tokens: Tensor
    num_new: Tensor
    prefix: Tensor
    active_slots: Tensor
    active_inverse: Tensor
    active_count: Tensor
    running: Tensor
    num_generated: Tensor
    max_generated: Tensor
    eos_ids: Tensor
    path: Tensor
    record: Tensor

    @classmethod
    def allocate(
        cls, slots: int, num_eos: int, device: torch.device | str, width: int = MAX_NEW_TOKENS, **shared: Tensor
    ) -> SlotState:
        """Allocate for ``slots`` empty slots; ``shared`` tensors (the drafter's own inputs) are used as they are.

        ``width``: places for the tokens of a step (`TreeConfig.new_tokens_width`).
        """
        shapes: dict[str, tuple[int, ...]] = {
            "new_tokens": (slots, width),
            "active_count": (1,),
            "eos_ids": (slots, max(1, num_eos)),
            "path": (slots, width),
            "record": (slots + 1, RECORD_HEAD + 2 * width),
        }
        missing = [name for name in cls._fields if name not in shared]
        tensors = {name: torch.zeros(shapes.get(name, (slots,)), dtype=torch.int32, device=device) for name in missing}
        state = cls(**shared, **tensors)
        state.clear_()
        return state

    def clear_(self) -> None:
        """Empty all slots."""
        for name in self._fields:
            blank = -1 if name in ("active_slots", "active_inverse", "eos_ids", "path") else 0
            getattr(self, name).fill_(blank)

    def copy_progress_(self, other: SlotState) -> None:
        """Copy which slots run, and where their answers stand and end."""
        lists = ("active_slots", "active_inverse", "active_count")
        for name in (*lists, "running", "num_generated", "max_generated", "eos_ids"):
            getattr(self, name).copy_(getattr(other, name))
