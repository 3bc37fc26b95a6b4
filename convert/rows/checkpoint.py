"""A checkpoint on disk, of one file or many, in safetensors or torch's own format, read lazily and checked throughout.

Opening reads headers and indexes only. `tensor` and `rows` read just what they return, and keep a record of it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import CheckpointError
from . import stream
from .bin import TorchFile
from .dtypes import torch_dtype
from .paths import TORCH_SUFFIXES, WeightsIndex, choose_weights, list_names, path_inside, read_index
from .safetensors_file import SafetensorsFile
from .stream import Bytes, WeightsFile
from .types import FileRecord, ReadRecord, TensorInfo, damaged, shorten

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "FileRecord", "ReadRecord", "TensorInfo", "open_checkpoint", "open_weights_file"]


class Checkpoint:
    """Named tensors of one or several weights files, with a record of what was read.

    Made by `open_checkpoint`; `where` names it in messages.
    """

    def __init__(self, where: str, file_of: Mapping[str, WeightsFile]) -> None:
        self.where = where
        self._file_of = dict(file_of)
        self._reads: dict[Path, list[ReadRecord]] = {}

    @classmethod
    def of(cls, file: WeightsFile, where: str | None = None) -> Checkpoint:
        """A checkpoint of one open file."""
        return cls(where or file.where, dict.fromkeys(file.tensors, file))

    def fork(self) -> Checkpoint:
        """The same open files under a record of their own, which begins with what was read so far."""
        other = Checkpoint(self.where, self._file_of)
        other._reads = {path: list(reads) for path, reads in self._reads.items()}
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._file_of)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and size of a tensor; CheckpointError where there is none of that name."""
        return self.file_of(name).tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; nothing of its data is read."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; CheckpointError for the packed 4 and 6-bit types."""
        return torch_dtype(self.info(name).dtype, f"{self.where}: tensor {shorten(name)}")

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into newly allocated memory, bit for bit, in its own dtype.

        Raises:
            CheckpointError: no such tensor, or the file cannot be read as it was when it was opened.
        """
        return self._tensor(name, self.dtype(name), None)

    def rows(self, name: str, ids: ArrayLike) -> torch.Tensor:
        """Read rows `ids` [rows] of a tensor [all_rows, ...] into newly allocated memory [rows, ...], bit for bit.

        The rows come in the order of `ids`, which may repeat. From safetensors exactly these rows are read.

        Raises:
            CheckpointError: as `tensor`; or an id is outside the tensor, or `ids` is not a list of integers.
        """
        return self._tensor(name, self.dtype(name), self._row_ids(name, ids))

    def raw(self, name: str) -> Bytes:
        """Read a whole tensor as uint8 [rows, row_bytes]; a scalar is one row. Raises as `tensor`."""
        return self._read(name, None)

    def pieces(
        self, name: str, ids: ArrayLike | None = None, piece_bytes: int = stream.PIECE_BYTES
    ) -> Generator[Bytes, None, str]:
        """Yield a tensor [all_rows, ...], or its rows `ids` in that order, bit for bit, as uint8 [n, row_bytes].

        For streaming through: it is faster than `tensor` and `rows`, and takes little memory whatever the size, because
        the pieces share a few buffers. **A piece is valid only until two more have been asked for.** The read is
        recorded in `files` after the last piece; the SHA-256 of all bytes is what the generator returns.

        Args:
            name: of the tensor.
            ids: rows, as in `rows`; None for the whole tensor.
            piece_bytes: size of a piece; it has at least one row. A scalar is one row.

        Raises:
            CheckpointError: as `rows`.
        """
        wanted = None if ids is None else self._row_ids(name, ids)
        sha256 = yield from stream.pieces(self.file_of(name), name, wanted, piece_bytes)
        self._record(name, wanted, sha256)
        return sha256

    def sha256(self, name: str) -> str:
        """Read a tensor piece by piece and return the SHA-256 of its bytes. Raises as `tensor`."""
        return stream.Hashed(self.pieces(name)).read_all()

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file of the checkpoint, with what was read of it so far."""
        files = {file.path: file for file in self._file_of.values()}
        return tuple(
            FileRecord(path, file.size_bytes, tuple(self._reads.get(path, ()))) for path, file in files.items()
        )

    def _tensor(self, name: str, dtype: torch.dtype, ids: NDArray[np.int64] | None) -> torch.Tensor:
        import torch

        info = self.info(name)
        shape = info.shape if ids is None else (len(ids), *info.shape[1:])
        return torch.from_numpy(self._read(name, ids).reshape(-1)).view(dtype).reshape(shape)

    def _read(self, name: str, ids: NDArray[np.int64] | None) -> Bytes:
        value, sha256 = stream.read(self.file_of(name), name, ids)
        self._record(name, ids, sha256)
        return value

    def _row_ids(self, name: str, ids: ArrayLike) -> NDArray[np.int64]:
        wanted = np.asarray(ids)
        if wanted.size == 0:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise CheckpointError.at(
                self.where,
                f"rows of {shorten(name)}: expected a list of integers, found {wanted.dtype} of shape {wanted.shape}.",
                tensor=name,
                found=str(wanted.dtype),
            )
        return np.ascontiguousarray(wanted, dtype=np.int64)

    def file_of(self, name: str) -> WeightsFile:
        """Return the open file that holds a tensor; CheckpointError where there is none of that name."""
        try:
            return self._file_of[name]
        except KeyError:
            raise CheckpointError.at(
                self.where,
                f"no tensor {shorten(name)}; it holds {len(self._file_of)}: "
                f"{shorten(sorted(self._file_of)[:12], 400)}.",
                tensor=name,
            ) from None

    def _record(self, name: str, ids: NDArray[np.int64] | None, sha256: str) -> None:
        info = self.info(name)
        rows = None if ids is None else len(ids)
        size_bytes = info.size_bytes if rows is None else rows * info.row_bytes
        self._reads.setdefault(self.file_of(name).path, []).append(ReadRecord(name, rows, size_bytes, sha256))


def open_checkpoint(path: Path | str, only: Collection[str] | None = None, weights_file: str = "") -> Checkpoint:
    """Open the weights in a folder, or one file of weights.

    Which files of a folder count is said in `rows/paths.py`. Everything is checked before it is trusted: headers
    against file sizes, the index against the shards, shard names and links against the folder.

    Args:
        path: a folder as `save_pretrained` writes it, a snapshot of the Hugging Face cache, or a file.
        only: names of the tensors that will be wanted; shards that hold none of them need not be there. All, if None.
        weights_file: name of the file in the folder to open; "" for the usual one.

    Raises:
        CheckpointError: no weights, or damaged, incomplete, contradictory or unsafe ones.
    """
    path = Path(path)
    if path.is_file():
        return Checkpoint.of(open_weights_file(path))
    if not path.is_dir():
        raise CheckpointError.at(path, "no such folder or file.\nExpected a checkpoint.")
    chosen = weights_file or choose_weights(list_names(path), str(path))
    if not chosen.endswith(".index.json"):
        return Checkpoint.of(open_weights_file(path_inside(path, chosen)), str(path))
    index = read_index(path_inside(path, chosen))
    return Checkpoint(str(path), _sharded(path, index, only))


def same_tensors(one: Checkpoint, name: str, other: Checkpoint, other_name: str) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    infos = one.info(name), other.info(other_name)
    if infos[0].dtype != infos[1].dtype or infos[0].shape != infos[1].shape:
        return False
    pieces = zip(one.pieces(name), other.pieces(other_name), strict=True)
    return all(np.array_equal(a, b) for a, b in pieces)


def open_weights_file(path: Path) -> WeightsFile:
    """Open one file by its suffix: torch's format for .bin, .pt and .pth, else safetensors."""
    return TorchFile(path) if path.name.endswith(TORCH_SUFFIXES) else SafetensorsFile(path)


def _sharded(folder: Path, index: WeightsIndex, only: Collection[str] | None) -> dict[str, WeightsFile]:
    wanted = {name: shard for name, shard in index.shard_of.items() if only is None or name in only}
    needed = tuple(dict.fromkeys(wanted.values()))
    shards = {shard: open_weights_file(path_inside(folder, shard)) for shard in needed}
    versions = "Index and shards come from different versions"
    for name, shard in wanted.items():
        if name not in shards[shard].tensors:
            problem = f"says that {shard} holds {shorten(name)}, but it does not.\n{versions}"
            raise damaged(index.where, problem, tensor=name, shard=shard)
    for shard, file in shards.items():
        for name in file.tensors:
            if (claimed := index.shard_of.get(name)) != shard:
                says = f"says {claimed}" if claimed else "does not name it"
                raise damaged(
                    f"{folder / shard}",
                    f"holds tensor {shorten(name)}, but the index {says}.\n{versions}",
                    tensor=name,
                    shard=shard,
                    claimed=claimed,
                )
    return {name: shards[shard] for name, shard in wanted.items()}
