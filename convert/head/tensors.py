"""The tensors of a draft head under their canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..rows.checkpoint import Checkpoint
from ..rows.dtypes import item_size
from ..rows.types import TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LazyTensors:
    """The tensors of a head under their canonical names, read from the checkpoint when asked for.

    `stored` has the name there by the canonical one.
    """

    source: Checkpoint
    stored: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, sorted."""
        return tuple(sorted(self.stored))

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and size of a tensor, from the header. KeyError where it is absent."""
        return self.source.info(self.stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header. KeyError where it is absent."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header. KeyError where it is absent."""
        return self.source.dtype(self.stored[name])

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, as stored. KeyError where it is absent."""
        return self.source.tensor(self.stored[name])

    def rows(self, name: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """Rows `ids` [n] of a matrix, [n, columns], bit for bit as stored. KeyError where the matrix is absent."""
        return self.source.rows(self.stored[name], ids)

    def is_nonzero(self, name: str) -> bool:
        """Whether a floating-point tensor is there and holds anything but zeros, of either sign."""
        if name not in self:
            return False
        # Every bit but the sign of each element, which is the highest of its last byte.
        raw = self.source.raw(self.stored[name]).reshape(-1, item_size(self.info(name).dtype))
        return bool(raw[:, :-1].any() or (raw[:, -1] & 0x7F).any())
