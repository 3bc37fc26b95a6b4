"""LM-head rows on their way from a checkpoint to the slim file: gathered, rounded, checked, and a checksum of each.

Rows that keep their dtype keep their bits. Rows of a target in another dtype are rounded to nearest even to the head's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import CheckpointError, MismatchError
from .checksums import row_checksums

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .checkpoint import FileRecord

_INFINITY_BITS = {"torch.bfloat16": 0x7F80, "torch.float16": 0x7C00, "torch.float32": 0x7F800000}


class RowSource(Protocol):
    """A checkpoint with a matrix whose rows can be gathered."""

    @property
    def files(self) -> Sequence[FileRecord]:
        """What was read so far."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the matrix, [rows, columns]."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the matrix."""

    def pieces(self, name: str, ids: NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """Rows `ids`, in that order, in pieces [n, columns], each valid until two more have been asked for."""


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
        """Yield the rows [n, hidden], in order; a chunk is valid until two more have been asked for.

        Raises:
            CheckpointError: a row holds NaN or infinity.
            MismatchError: a value does not fit the head's dtype.
        """
        self._checksums.clear()
        start = 0
        for rows in self.source.pieces(self.name, self.row_ids):
            piece = slice(start, start + len(rows))
            start += len(rows)
            refuse_nonfinite(rows, f"{self.where}: {self.name}", self.target_ids[piece])
            if rows.dtype != self.dtype:
                rounded = rows.to(self.dtype)
                self._refuse_overflow(rounded, self.target_ids[piece])
                rows = rounded
            self._checksums.append(row_checksums(rows))
            yield rows

    def digest(self) -> str:
        """SHA-256 of all rows as they were read, which is as they are written where they keep their dtype."""
        reads = [read for file in self.source.files for read in file.reads if read.tensor == self.name and read.rows]
        return reads[-1].sha256

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
    """Whether a CPU tensor of bf16, fp16 or fp32 holds neither NaN nor infinity, without temporary memory.

    With all exponent bits set a number is not finite, and its bits exceed those of every finite number of its sign: as
    signed integers the positive ones come to the top, as unsigned integers the negative ones. bf16 infinity is
    0x7f80, minus infinity 0xff80. Two maxima on one core take a tenth of the time of `torch.isfinite` on all.
    """
    import torch

    if tensor.numel() == 0:
        return True
    infinity = _INFINITY_BITS[str(tensor.dtype)]
    wide = tensor.dtype.itemsize == 4
    bits = tensor.contiguous().view(torch.int32 if wide else torch.int16).numpy()
    unsigned = bits.view(np.uint32 if wide else np.uint16)
    sign = 1 << (31 if wide else 15)
    return int(bits.max()) < infinity and int(unsigned.max()) < sign + infinity


def refuse_nonfinite(
    tensor: torch.Tensor, where: str, target_ids: NDArray[np.int64] | None = None, first_row: int = 0
) -> None:
    """Raise CheckpointError where a tensor (or its part from `first_row` on) holds NaN or infinity, naming the row."""
    import torch

    if all_finite(tensor):
        return
    rows = tensor.reshape(tensor.shape[0], -1)
    row = int(torch.nonzero(~torch.isfinite(rows).all(dim=1))[0])
    place = f"row {first_row + row}" if target_ids is None else f"row of token {int(target_ids[row])}"
    raise CheckpointError(f"{where}: {place} holds NaN or infinity; the checkpoint is damaged, fetch it again")
