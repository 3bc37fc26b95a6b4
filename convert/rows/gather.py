"""LM-head rows on their way from a checkpoint to the slim file: gathered, rounded, checked, and a checksum of each.

Rows that keep their dtype keep their bits. Rows of a target in another dtype are rounded to nearest even to the head's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import row_checksums
from ..errors import CheckpointError, MismatchError
from .checkpoint import Checkpoint, Hashed
from .dtypes import LONG_NAMES, first_nonfinite_row, rounded
from .safetensors_file import Bytes


@dataclass
class GatheredRows:
    """Rows of a matrix, read in chunks when iterated; afterwards `checksums` are those of the rows handed out.

    Attributes:
        row_ids: int64 [rows], the rows wanted, in the order wanted.
        dtype: what the rows are to be: one of `dtypes.FLOATS`.
        where: source in words, for messages.
        target_ids: int64 [rows], the token of each row, for messages.
    """

    source: Checkpoint
    name: str
    row_ids: NDArray[np.int64]
    dtype: str
    where: str
    target_ids: NDArray[np.int64]
    _checksums: list[NDArray[np.uint8]] = field(default_factory=list, init=False)

    @property
    def rounded(self) -> bool:
        """Whether the rows change dtype on the way."""
        return self.source.info(self.name).dtype != self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, hidden]."""
        return (len(self.row_ids), self.source.shape(self.name)[1])

    @property
    def checksums(self) -> NDArray[np.uint8]:
        """uint8 [rows, 8]; valid once every chunk has been handed out."""
        return np.concatenate(self._checksums)

    def chunks(self) -> Generator[Bytes, None, str]:
        """Begin to gather: a generator of the rows in order, uint8 [n, row_bytes], that returns their SHA-256."""
        return self._chunks(Hashed(self.source.pieces(self.name, self.row_ids)))

    def _chunks(self, reading: Hashed) -> Generator[Bytes, None, str]:
        self._checksums.clear()
        found = self.source.info(self.name).dtype
        start, of_rounded = 0, hashlib.sha256()
        for rows in reading:
            tokens = self.target_ids[start : start + len(rows)]
            start += len(rows)
            refuse_nonfinite(rows, found, self.where, self.name, tokens)
            if found != self.dtype:
                rows = rounded(rows, found, self.dtype)
                self._refuse_overflow(rows, found, tokens)
                of_rounded.update(rows.data)
            self._checksums.append(row_checksums(rows))
            yield rows
        return of_rounded.hexdigest() if self.rounded else reading.sha256

    def _refuse_overflow(self, rows: Bytes, found: str, tokens: NDArray[np.int64]) -> None:
        if (row := first_nonfinite_row(rows, self.dtype)) is not None:
            raise MismatchError(
                f"{self.where}: {self.name}: row of token {tokens[row]} holds a value too large for the head's "
                f"{LONG_NAMES[self.dtype]}.\nConvert a head in the target's own dtype ({LONG_NAMES[found]})."
            )


def refuse_nonfinite(
    rows: Bytes, dtype: str, where: str, name: str, target_ids: NDArray[np.int64] | None = None, first_row: int = 0
) -> None:
    """Raise CheckpointError where rows uint8 [n, row_bytes] (from `first_row` on) hold NaN or infinity, naming one."""
    if (row := first_nonfinite_row(rows, dtype)) is None:
        return
    token = None if target_ids is None else int(target_ids[row])
    place = f"row {first_row + row}" if token is None else f"row of token {token}"
    raise CheckpointError(
        f"{where}: {name}: {place} holds NaN or infinity.\nThe checkpoint is damaged: fetch it again."
    )
