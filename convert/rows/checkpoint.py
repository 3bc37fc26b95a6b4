"""A checkpoint on disk, of one file or many, in safetensors or torch's own format.

Opening reads headers and indexes; data is mapped, and comes into memory where it is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..artifact.checksums import sha256_of
from ..errors import CheckpointError, MismatchError
from .bin import TorchFile
from .files import (
    LONG_NAMES,
    TORCH_SUFFIXES,
    Bytes,
    SafetensorsFile,
    TensorInfo,
    choose_weights,
    damaged,
    first_nonfinite_row,
    list_names,
    read_index,
    rounded,
    shorten,
)

if TYPE_CHECKING:
    import torch

# A piece stays in a core's cache while it is checked and written.
PIECE_BYTES = 2 << 20

WeightsFile = SafetensorsFile | TorchFile


class Checkpoint:
    """Named tensors of one or several weights files; made by `open_checkpoint`."""

    def __init__(self, where: str, file_of: Mapping[str, WeightsFile]) -> None:
        self.where = where
        self._file_of = dict(file_of)
        self._unchecked: dict[str, str] = {}

    @classmethod
    def of(cls, file: WeightsFile, where: str | None = None) -> Checkpoint:
        """Make a checkpoint of one open file."""
        return cls(where or str(file.path), dict.fromkeys(file.tensors, file))

    def expect(self, header_sha256: str, tensors: Mapping[str, str]) -> None:
        """Hold the one safetensors file against SHA-256s: its header now, tensors when first taken; CheckpointError."""
        file, *others = self.files
        with file.path.open("rb") as opened:
            header = opened.read(file.data_offset if isinstance(file, SafetensorsFile) else 0)
        if others or sha256_of(header) != header_sha256 or set(tensors) != set(self._file_of):
            raise damaged(file.path, "the header is not as the manifest beside it records")
        self._unchecked = dict(tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._file_of)

    @property
    def files(self) -> tuple[WeightsFile, ...]:
        """Every open file."""
        return tuple(dict.fromkeys(self._file_of.values()))

    def check_index(self) -> None:
        """Raise CheckpointError for a tensor that the index has not in its shard: vLLM and SGLang read whole shards."""
        for file in self.files:
            if others := [name for name in file.tensors if self._file_of.get(name) is not file]:
                problem = f"holds {shorten(others[0])}, which the index beside it does not place there"
                raise CheckpointError.at(file.path, f"{problem}.\nSave the head again, best as one file.")

    def file_of(self, name: str) -> WeightsFile:
        """Return the open file that holds a tensor; CheckpointError where there is none of that name."""
        if name not in self._file_of:
            names = shorten(sorted(self._file_of)[:12], 400)
            raise CheckpointError.at(self.where, f"no tensor {shorten(name)}; it holds {names}.")
        return self._file_of[name]

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and size of a tensor; CheckpointError where there is none of that name."""
        return self.file_of(name).tensors[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into new memory, bit for bit, in its own dtype; CheckpointError where there is none."""
        return self._tensor(name, self.array(name).copy(), self.info(name).shape)

    def rows(self, name: str, ids: ArrayLike) -> torch.Tensor:
        """Gather rows `ids` of a tensor in that order, bit for bit: [rows, ...]; CheckpointError for an id outside."""
        wanted, info = np.asarray(ids, np.int64), self.info(name)
        outside = wanted[(wanted < 0) | (wanted >= info.num_rows)]
        if len(outside):
            problem = f"tensor {shorten(name)}: row {outside[0]} was asked for, of {info.num_rows}"
            raise CheckpointError.at(self.where, f"{problem}.\nVocabulary and checkpoint do not belong together.")
        return self._tensor(name, self.array(name)[wanted], (len(wanted), *info.shape[1:]))

    def array(self, name: str) -> Bytes:
        """Return a whole tensor as uint8 [rows, row_bytes], read-only where it is mapped; a scalar is one row."""
        array = self.file_of(name).array(name)
        if (expected := self._unchecked.get(name)) is not None:
            if sha256_of(array.reshape(-1).data) != expected:
                raise damaged(self.where, f"{shorten(name)} is not as the manifest beside it records")
            del self._unchecked[name]
        return array

    def pieces(self, name: str, ids: NDArray[np.int64] | None = None) -> Iterator[Bytes]:
        """Yield a tensor, or its rows `ids` in that order, as uint8 [n, row_bytes] of at most 2 MiB, bit for bit."""
        array = self.array(name)
        step = max(1, PIECE_BYTES // max(1, array.shape[1]))
        for start in range(0, len(array if ids is None else ids), step):
            yield array[start : start + step] if ids is None else array[ids[start : start + step]]

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of the bytes of a tensor."""
        return sha256_of(self.array(name).reshape(-1).data)

    def _tensor(self, name: str, array: Bytes, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, LONG_NAMES[self.info(name).dtype])
        return torch.from_numpy(array.reshape(-1)).view(dtype).reshape(shape)


@dataclass(frozen=True)
class SourceRows:
    """Rows of a checkpoint's tensor on their way to the slim file: as they are, or rounded to `dtype`.

    `row_ids` int64 [rows] are the rows wanted, in that order; None for all. Messages name `where`, and of `target_ids`
    int64 [rows], the token of each row.
    """

    source: Checkpoint
    name: str
    dtype: str
    where: str
    row_ids: NDArray[np.int64] | None = None
    target_ids: NDArray[np.int64] | None = None

    @property
    def rounded(self) -> bool:
        """Whether the rows change dtype on the way."""
        return self.source.info(self.name).dtype != self.dtype

    def pieces(self) -> Iterator[Bytes]:
        """Yield rows, uint8 [n, row_bytes]; CheckpointError for NaN or infinity, MismatchError for an overflow."""
        stored, start = self.source.info(self.name).dtype, 0
        for rows in self.source.pieces(self.name, self.row_ids):
            if (row := first_nonfinite_row(rows, stored)) is not None:
                problem = f"{self._place(start + row)} holds NaN or infinity"
                raise CheckpointError(f"{problem}.\nThe checkpoint is damaged: fetch it again.")
            if self.rounded:
                rows = rounded(rows, stored, self.dtype)
                if (row := first_nonfinite_row(rows, self.dtype)) is not None:
                    problem = f"{self._place(start + row)} holds a value too large for {LONG_NAMES[self.dtype]}"
                    raise MismatchError(f"{problem}.\nConvert a head in the target's dtype, {LONG_NAMES[stored]}.")
            start += len(rows)
            yield rows

    def differing(self, written: Bytes) -> NDArray[np.int64]:
        """Return which rows are not those of `written`, uint8 [rows, row_bytes]: int64 [n]; raises as `pieces`."""
        start, different = 0, []
        for rows in self.pieces():
            different.append(start + np.flatnonzero((written[start : start + len(rows)] != rows).any(axis=1)))
            start += len(rows)
        return np.concatenate([np.zeros(0, np.int64), *different])

    def _place(self, row: int) -> str:
        token = f"row {row}" if self.target_ids is None else f"row of token {self.target_ids[row]}"
        return f"{self.where}: {self.name}: {token}"


def open_checkpoint(folder: Path | str, only: Collection[str] | None = None) -> Checkpoint:
    """Open the weights in a folder as `save_pretrained` writes it; `files.choose_weights` chooses the file.

    Shards that hold none of the tensors `only` (all, if None) need not be there. Raises CheckpointError: no weights, or
    damaged, incomplete, contradictory or unsafe ones.
    """
    folder = Path(folder)
    chosen = choose_weights(list_names(folder), str(folder))
    index = folder / f"{chosen}.index.json"
    if index.is_file() and chosen not in read_index(index).values():
        problem = f"{chosen} and {index.name} are two models: transformers reads the first, vLLM and SGLang the second"
        raise CheckpointError.at(folder, f"{problem}.\nKeep the one that is meant.")
    if not chosen.endswith(".index.json"):
        return Checkpoint.of(_open(folder / chosen), str(folder))
    shard_of = {name: shard for name, shard in read_index(folder / chosen).items() if only is None or name in only}
    shards = {shard: _open(folder / shard) for shard in dict.fromkeys(shard_of.values())}
    for name, shard in shard_of.items():
        if name not in shards[shard].tensors:
            raise damaged(folder / chosen, f"says that {shard} holds {shorten(name)}, but it does not")
    return Checkpoint(str(folder), {name: shards[shard] for name, shard in shard_of.items()})


def _open(path: Path) -> WeightsFile:
    return TorchFile(path) if path.name.endswith(TORCH_SUFFIXES) else SafetensorsFile(path)
