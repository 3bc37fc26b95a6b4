"""A draft vocabulary that follows the prompt: ids of a prompt that the base does not hold join it for that sequence.

The *base* is the draft vocabulary that all sequences share. After it each slot has a *tail*: ids of its prompt that are
outside the base and that the head was trained on. Ids that may join are numbered best first, and these numbers,
*ranks*, are what a tail holds: of more than ``most`` ids the highest ranks, the rarest ids, stay out. So a tail depends
on which ids the prompt holds, not on their order.

Example with a base of ids 0 to 3, ranks 7: 0, 5: 1, 9: 2 (id 8 was never trained) and ``most`` 2::

    prompt    2  9  8  5  9  7
    tail      5  7                  (7 and 5 are better than 9)

A tail's rows are LM-head rows like the base's: children of a node are the best of base and tail by (logit descending,
target id ascending), and log-probabilities are over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..errors import NothingToFollowError, check_choice, misfit

DEFAULT_FOLLOW_ROWS = 512
MAX_FOLLOW_ROWS = 8192
UNIT_ROWS = 16
"""Rows in a unit of a tail; one program multiplies one unit at a time."""


@dataclass(frozen=True)
class FollowRows:
    """The LM-head rows that may join a base, and how many of them may join one sequence.

    Raises `UsageError` for no row that could join, and for ``most`` outside 1 to 8,192.
    """

    most: int
    """Most ids that join a sequence."""
    ids: Tensor
    """int64 [ranks]: target id of each rank."""
    row_of_rank: Tensor
    """int32 [ranks]: where in `rows` each rank is."""
    rows: Tensor
    """[n, hidden]: LM-head rows, of the head's type and on its device; the base's may be among them."""
    row_of_id: Tensor
    """int32 [target_vocab], beside the rows: where in them each target id's is, -1 for ids without one."""
    rank_order: NDArray[np.int64] | None = None
    """Target ids best first, as far as they are ranked."""

    def __post_init__(self) -> None:
        check_follow_rows(self.most)
        if len(self.ids) == 0:
            raise NothingToFollowError(
                "There is nothing to follow with: the draft vocabulary holds every id that the head was trained on. "
                "Give a smaller draft_vocab, or leave follow out."
            )

    @classmethod
    def of(
        cls, most: int, base_ids: Tensor, rows: Tensor, row_of_id: Tensor, rank_order: NDArray[np.int64] | None = None
    ) -> FollowRows:
        """Rank what may join a base (``base_ids`` int64, any order): ids outside it that have a row.

        ``rank_order``: target ids best first; ids that it lacks come after its own, by id. Raises as the class does.
        """
        free = row_of_id.cpu().numpy() >= 0
        free[base_ids.cpu().numpy()] = False
        known = np.zeros(0, np.int64) if rank_order is None else rank_order[free[rank_order]]
        free[known] = False
        ids = torch.from_numpy(np.concatenate((known, np.flatnonzero(free)))).to(rows.device)
        return cls(most, ids, row_of_id[ids], rows, row_of_id, rank_order)

    def over(self, base_ids: Tensor) -> FollowRows:
        """Rank what may join another base. Raises `UsageError` where that leaves nothing."""
        return self.of(self.most, base_ids, self.rows, self.row_of_id, self.rank_order)

    @property
    def width(self) -> int:
        """Places of a tail: ``most``, or all that may join, in whole units."""
        return -(-min(self.most, len(self.ids)) // UNIT_ROWS) * UNIT_ROWS

    @cached_property
    def rank_of_id(self) -> NDArray[np.int32]:
        """int32 [target_vocab]: rank of each target id, -1 for ids that never join."""
        ranks = np.full(len(self.row_of_id), -1, dtype=np.int32)
        ranks[self.ids_on_host] = np.arange(len(self.ids), dtype=np.int32)
        return ranks

    @cached_property
    def ids_on_host(self) -> NDArray[np.int64]:
        """`ids` as an array."""
        return self.ids.cpu().numpy()

    def tail_of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks, ascending, that join for a prompt of these token ids."""
        ranks = np.unique(self.rank_of_id[np.array(token_ids, dtype=np.int64)])
        return tuple(ranks[ranks >= 0][: self.most].tolist())

    def holds(self, tail: Sequence[int], token_id: int) -> bool:
        """Whether a target id has joined."""
        return int(self.rank_of_id[token_id]) in tail

    def rows_of(self, tail: Sequence[int]) -> Tensor:
        """Gather the LM-head rows of a tail: [len(tail), hidden]."""
        ranks = torch.tensor(tail, dtype=torch.int64, device=self.rows.device)
        return self.rows[self.row_of_rank[ranks].long()]


def check_follow(follow: str, most: int) -> None:
    """Raise `UsageError` unless ``follow`` is "prompt" or None, and ``most`` ids can join."""
    check_choice("follow", follow, ("prompt", None))
    check_follow_rows(most)


def check_follow_rows(most: int) -> None:
    """Raise `UsageError` unless ``most`` ids can join a sequence."""
    if isinstance(most, bool) or not isinstance(most, (int, np.integer)) or not 1 <= most <= MAX_FOLLOW_ROWS:
        raise misfit("follow_rows", f"a number from 1 to {MAX_FOLLOW_ROWS:,}", most)


@dataclass(frozen=True)
class Tails:
    """The tails of all slots, on the device. Places beyond a slot's size are undefined."""

    ranks: Tensor
    """int32 [slots, width]."""
    ids: Tensor
    """int32 [slots, width]: target id of each rank."""
    sizes: Tensor
    """int32 [slots]."""
    rows: Tensor | None = None
    """[slots, units, chunks, 16, block_k]: LM-head rows as the kernel reads them; None for the reference."""
    scales: Tensor | None = None
    """float32 [slots, width]: one per row, read where rows are FP8."""
    loaded: Tensor | None = None
    """int32 [slots, width]: rank of the row that lies at each place, -1 for none."""

    @classmethod
    def allocate(cls, slots: int, width: int, device: torch.device | str) -> Tails:
        """Allocate empty tails, without rows."""
        ranks, ids = (torch.full((slots, width), -1, dtype=torch.int32, device=device) for _ in range(2))
        return cls(ranks, ids, torch.zeros(slots, dtype=torch.int32, device=device))

    def set_slot(self, slot: int, tail: Sequence[int], follow: FollowRows) -> None:
        """Write a slot's tail from the host, without waiting for the device."""
        size, ranks = len(tail), np.array(tail, dtype=np.int64)
        values = np.full((3, self.ranks.shape[1]), -1, dtype=np.int32)
        values[0, :size], values[1, :size], values[2] = ranks, follow.ids_on_host[ranks], size
        packed = torch.from_numpy(values)
        packed = (packed.pin_memory() if self.ranks.is_cuda else packed).to(self.ranks.device, non_blocking=True)
        self.ranks[slot], self.ids[slot] = packed[0], packed[1]
        self.sizes[slot : slot + 1] = packed[2, :1]

    def read_slot(self, slot: int) -> tuple[int, ...]:
        """Read a slot's tail (this waits for the device)."""
        return tuple(sorted(self.ranks[slot, : int(self.sizes[slot])].tolist()))


@dataclass(frozen=True)
class JoinedVocab:
    """Base and tails side by side, columns by ascending target id: so ties go to the smaller id in either."""

    rows: Tensor
    """[active, longest tail, hidden]."""
    order: Tensor
    """int64 [active, columns]: where each column is among base and tail."""
    ids: Tensor
    """int64 [active, columns]: target id of each column."""
    sizes: Tensor
    """int64 [active, 1]."""

    @classmethod
    def of(cls, base_ids: Tensor, tails: Sequence[Sequence[int]], follow: FollowRows) -> JoinedVocab:
        """Lay out the tails of the active sequences behind their base."""
        longest = max(map(len, tails))
        device, hidden = follow.rows.device, follow.rows.shape[1]
        rows = torch.zeros((len(tails), longest, hidden), dtype=follow.rows.dtype, device=device)
        # Places without a row sort behind all ids, in an order of their own.
        ids = torch.arange(longest, device=device).expand(len(tails), longest) + len(follow.row_of_id)
        ids = torch.cat((base_ids.expand(len(tails), -1), ids), 1)
        for place, tail in enumerate(tails):
            rows[place, : len(tail)] = follow.rows_of(tail)
            ids[place, len(base_ids) : len(base_ids) + len(tail)] = follow.ids[list(tail)]
        order = ids.argsort(1)
        sizes = torch.tensor([[len(tail)] for tail in tails], device=device)
        return cls(rows, order, ids.gather(1, order), sizes)

    def logits(self, base: Tensor, hidden: Tensor) -> Tensor:
        """Compute logits of all columns: ``base`` float32 [active, nodes, base], ``hidden`` [active, nodes, hidden].

        float32 [active, nodes, columns]; -inf where a sequence's tail is shorter than another's.
        """
        tail = torch.stack([F.linear(own, rows) for own, rows in zip(hidden, self.rows, strict=True)]).float()
        unused = torch.arange(tail.shape[-1], device=tail.device) >= self.sizes
        tail = tail.masked_fill(unused[:, None], float("-inf"))
        joined = torch.cat((base, tail), -1)
        return joined.gather(-1, self.order[:, None].expand_as(joined))
