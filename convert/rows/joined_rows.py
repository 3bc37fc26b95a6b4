"""Two matrices of two files as one: the rows of the second follow those of the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .stream import Bytes, Fill, Job, Rows, WeightsFile, allocate
from .types import TensorInfo


class JoinedRows(WeightsFile):
    """A matrix [n + m, columns] under one name, of which n rows lie in one file and m in another, each with its name.

    Raises:
        CheckpointError: the parts are no matrices of one dtype and width.
    """

    def __init__(self, name: str, first: tuple[WeightsFile, str], second: tuple[WeightsFile, str]) -> None:
        self._parts = (first, second)
        infos = [file.tensors[part] for file, part in self._parts]
        self.where = " and ".join(file.where for file, _ in self._parts)
        kinds = [(info.dtype, len(info.shape), *info.shape[1:]) for info in infos]
        if kinds[0] != kinds[1] or kinds[0][1] != 2:
            found = " and ".join(f"{info.dtype} {list(info.shape)}" for info in infos)
            raise CheckpointError.at(
                self.where,
                f"{name}: expected two matrices of one dtype and width, found {found}.\n"
                "The files are of two heads: fetch them again.",
            )
        self._border = infos[0].num_rows
        self.path = first[0].path.with_name(f"{first[0].path.name} + {second[0].path.name}")
        self.size_bytes = sum(file.size_bytes for file, _ in self._parts)
        shape = (sum(info.num_rows for info in infos), *infos[0].shape[1:])
        self._info = TensorInfo(name, infos[0].dtype, shape, sum(info.size_bytes for info in infos))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The joined matrix by its name."""
        return {self._info.name: self._info}

    @contextmanager
    def reading(self, name: str) -> Iterator[Fill]:
        """Open the matrix for reading; see `WeightsFile.reading`."""
        if name != self._info.name:
            raise KeyError(name)
        (first, first_name), (second, second_name) = self._parts
        with first.reading(first_name) as fill_first, second.reading(second_name) as fill_second:

            def fill(rows: Rows, out: Bytes) -> Sequence[Job]:
                ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
                of_first = ids < self._border
                parts = ((fill_first, of_first, ids), (fill_second, ~of_first, ids - self._border))
                return [partial(_gather, fill, ids[of_part], of_part, out) for fill, of_part, ids in parts
                        if of_part.any()]  # fmt: skip

            yield fill


def _gather(fill: Fill, ids: NDArray[np.int64], places: NDArray[np.bool_], out: Bytes) -> None:
    """Read rows `ids` of one part into the places of `out` uint8 [rows, row_bytes] that are theirs."""
    found = allocate(len(ids), out.shape[1])
    for job in fill(ids, found):
        job()
    out[places] = found
