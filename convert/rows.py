"""LM-head rows on their way from a checkpoint to the slim file: gathered, rounded, checked, and a checksum of each.

Rows that keep their dtype keep their bits. Rows of a target in another dtype are rounded to nearest even to the head's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .errors import CheckpointError, MismatchError
from .hashing import row_checksums

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Gathered at once: large enough for long sequential reads, small beside any slim head.
CHUNK_BYTES = 32 << 20


class RowSource(Protocol):
    """A matrix whose rows can be gathered."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the matrix, [rows, columns]."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the matrix."""

    def rows(self, name: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """Rows `ids` [rows], in that order, [rows, columns]."""


@dataclass
class GatheredRows:
    """Rows of a matrix, read in chunks when iterated; afterwards `checksums` are those of the rows handed out.

    Attributes:
        source: where the matrix is.
        name: its name there.
        row_ids: int64 [rows], the rows wanted, in the order wanted.
        dtype: what the rows are to be.
        where: source in words, for messages.
        target_ids: int64 [rows], the token of each row, for messages.
    """

    source: RowSource
    name: str
    row_ids: NDArray[np.int64]
    dtype: torch.dtype
    where: str
    target_ids: NDArray[np.int64]
    _checksums: list[NDArray[np.uint8]] = field(default_factory=list, init=False)

    @property
    def rounded(self) -> bool:
        """Whether the rows change dtype on the way."""
        return self.source.dtype(self.name) != self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, hidden]."""
        return (len(self.row_ids), self.source.shape(self.name)[1])

    @property
    def checksums(self) -> NDArray[np.uint8]:
        """uint8 [rows, 8]; valid once every chunk has been handed out."""
        return np.concatenate(self._checksums)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the rows [n, hidden], in order.

        Raises:
            CheckpointError: a row holds NaN or infinity.
            MismatchError: a value does not fit the head's dtype.
        """
        self._checksums.clear()
        row_bytes = self.shape[1] * self.source.dtype(self.name).itemsize
        step = max(1, CHUNK_BYTES // max(row_bytes, 1))
        for start in range(0, len(self.row_ids), step):
            piece = slice(start, start + step)
            rows = self.source.rows(self.name, self.row_ids[piece])
            refuse_nonfinite(rows, f"{self.where}: {self.name}", self.target_ids[piece])
            if rows.dtype != self.dtype:
                rounded = rows.to(self.dtype)
                self._refuse_overflow(rounded, self.target_ids[piece])
                rows = rounded
            self._checksums.append(row_checksums(rows))
            yield rows

    def _refuse_overflow(self, rounded: torch.Tensor, target_ids: NDArray[np.int64]) -> None:
        import torch

        if all_finite(rounded):
            return
        bad = int(torch.nonzero(~torch.isfinite(rounded).all(dim=1))[0])
        raise MismatchError(
            f"{self.where}: {self.name}: row of token {int(target_ids[bad])} holds a value too large for the head's "
            f"{str(self.dtype).removeprefix('torch.')}; convert a head in the target's own dtype "
            f"({str(self.source.dtype(self.name)).removeprefix('torch.')})"
        )


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity: one pass, no temporary memory."""
    import torch

    if tensor.numel() == 0:
        return True
    # aminmax hands NaN through, and an infinity is the extreme.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def refuse_nonfinite(tensor: torch.Tensor, where: str, target_ids: NDArray[np.int64] | None = None) -> None:
    """Raise CheckpointError where a tensor holds NaN or infinity, naming the first row."""
    import torch

    if all_finite(tensor):
        return
    rows = tensor.reshape(tensor.shape[0], -1)
    row = int(torch.nonzero(~torch.isfinite(rows).all(dim=1))[0])
    place = f"row {row}" if target_ids is None else f"row of token {int(target_ids[row])}"
    raise CheckpointError(f"{where}: {place} holds NaN or infinity; the checkpoint is damaged, fetch it again")
