"""A checkpoint on disk, of one file or many, in safetensors or torch's own format.

Opening reads headers and indexes; data is mapped, and comes into memory where it is looked at.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..artifact.checksums import sha256_of
from ..errors import CheckpointError
from .bin import TorchFile
from .dtypes import long_name
from .paths import TORCH_SUFFIXES, choose_weights, list_names, path_inside, read_index
from .safetensors_file import Bytes, SafetensorsFile
from .types import FileRecord, ReadRecord, TensorInfo, damaged, shorten

if TYPE_CHECKING:
    import torch

# A piece stays in a core's cache while it is checked and hashed.
PIECE_BYTES = 2 << 20

WeightsFile = SafetensorsFile | TorchFile


class Checkpoint:
    """Named tensors of one or several weights files, with a record of what was read, in the order asked for.

    Made by `open_checkpoint`; `where` names it in messages.
    """

    def __init__(self, where: str, file_of: Mapping[str, WeightsFile]) -> None:
        self.where = where
        self._file_of = dict(file_of)
        self._reads: dict[Path, list[ReadRecord]] = {}
        self._unchecked: dict[str, str] = {}

    @classmethod
    def of(cls, file: WeightsFile, where: str | None = None) -> Checkpoint:
        """Make a checkpoint of one open file."""
        return cls(where or str(file.path), dict.fromkeys(file.tensors, file))

    def fork(self) -> Checkpoint:
        """Return the same open files under a record of their own, which begins with what was read so far."""
        other = Checkpoint(self.where, self._file_of)
        other._reads = {path: list(reads) for path, reads in self._reads.items()}
        other._unchecked = dict(self._unchecked)
        return other

    def expect(self, header_sha256: str, tensors: Mapping[str, str]) -> None:
        """Hold the one safetensors file against checksums: its header now, each tensor before it is first taken.

        `tensors` has the SHA-256 of each by name.

        Raises:
            CheckpointError: the header is not that one; later, from whatever reads a tensor, that its bytes are not.
        """
        (file,) = set(self._file_of.values())
        with file.path.open("rb") as opened:
            header = opened.read(file.data_offset if isinstance(file, SafetensorsFile) else 0)
        if sha256_of(header) != header_sha256 or set(tensors) != set(self._file_of):
            raise damaged(file.path, "the header is not as the manifest beside it records")
        self._unchecked = dict(tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._file_of)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and size of a tensor; CheckpointError where there is none of that name."""
        return self.file_of(name).tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; CheckpointError for the packed 4 and 6-bit types."""
        import torch

        return getattr(torch, self._long_name(name))  # type: ignore[no-any-return]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into newly allocated memory, bit for bit, in its own dtype.

        Raises:
            CheckpointError: no such tensor, or of a packed dtype.
        """
        return self._tensor(name, self.array(name).copy(), self.shape(name))

    def rows(self, name: str, ids: ArrayLike) -> torch.Tensor:
        """Gather rows `ids` [rows] of a tensor [all_rows, ...] into newly allocated memory [rows, ...], bit for bit.

        The rows come in the order of `ids`, which may repeat.

        Raises:
            CheckpointError: as `tensor`; or an id is outside the tensor, or `ids` is not a list of integers.
        """
        wanted = self._row_ids(name, ids)
        return self._tensor(name, self.array(name)[wanted], (len(wanted), *self.shape(name)[1:]))

    def array(self, name: str) -> Bytes:
        """Return a whole tensor as uint8 [rows, row_bytes], read-only where it is mapped; a scalar is one row."""
        self._long_name(name)
        found = self.file_of(name).array(name)
        if (expected := self._unchecked.get(name)) is not None:
            if sha256_of(found.reshape(-1).data) != expected:
                raise damaged(self.where, f"{shorten(name)} is not as the manifest beside it records")
            del self._unchecked[name]
        return found

    def raw(self, name: str) -> Bytes:
        """Return a tensor as `array` does, and record that it was read."""
        found, info = self.array(name), self.info(name)
        if info.dtype == "BOOL" and found.size and (largest := int(found.max())) > 1:
            problem = f"tensor {shorten(name)}: booleans must be 0 or 1, found {largest}"
            raise damaged(self.where, problem)
        self._begin(name, None).sha256 = sha256_of(found.reshape(-1).data)
        return found

    def pieces(self, name: str, ids: ArrayLike | None = None) -> Generator[Bytes, None, str]:
        """Yield a tensor [all_rows, ...], or its rows `ids` in that order, bit for bit, as uint8 [n, row_bytes].

        A piece of a whole tensor lies in the mapped file. `files` lists the read once the last piece has come; the
        SHA-256 of all bytes is what the generator returns. Raises as `rows`, at once.
        """
        wanted = None if ids is None else self._row_ids(name, ids)
        read = self._begin(name, None if wanted is None else len(wanted))
        return _pieces(self.array(name), wanted, read)

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of the bytes of a tensor, and record that it was read."""
        return Hashed(self.pieces(name)).read_all()

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file of the checkpoint, with what was read of it so far."""
        files = {file.path: file for file in self._file_of.values()}
        return tuple(
            FileRecord(path, file.size_bytes, tuple(read for read in self._reads.get(path, ()) if read.sha256))
            for path, file in files.items()
        )

    def file_of(self, name: str) -> WeightsFile:
        """Return the open file that holds a tensor; CheckpointError where there is none of that name."""
        try:
            return self._file_of[name]
        except KeyError:
            raise CheckpointError.at(
                self.where,
                f"no tensor {shorten(name)}; it holds {len(self._file_of)}: "
                f"{shorten(sorted(self._file_of)[:12], 400)}.",
            ) from None

    def _tensor(self, name: str, array: Bytes, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array.reshape(-1)).view(self.dtype(name)).reshape(shape)

    def _long_name(self, name: str) -> str:
        return long_name(self.info(name).dtype, f"{self.where}: tensor {shorten(name)}")

    def _row_ids(self, name: str, ids: ArrayLike) -> NDArray[np.int64]:
        wanted, info = np.asarray(ids), self.info(name)
        if wanted.size == 0:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu" or not info.shape:
            raise CheckpointError.at(
                self.where,
                f"rows of {shorten(name)}: expected a list of integers and a tensor with rows, found {wanted.dtype} of "
                f"shape {wanted.shape} and a tensor of shape {info.shape}.",
            )
        outside = wanted[(wanted < 0) | (wanted >= info.num_rows)]
        if len(outside):
            raise CheckpointError.at(
                self.where,
                f"tensor {shorten(name)}: row {outside[0]} was asked for, of {info.num_rows}.\n"
                "The vocabulary and this checkpoint do not belong together.",
            )
        return wanted.astype(np.int64)

    def _begin(self, name: str, rows: int | None) -> ReadRecord:
        info = self.info(name)
        read = ReadRecord(name, rows, info.size_bytes if rows is None else rows * info.row_bytes)
        self._reads.setdefault(self.file_of(name).path, []).append(read)
        return read


def _pieces(array: Bytes, ids: NDArray[np.int64] | None, read: ReadRecord) -> Generator[Bytes, None, str]:
    step = max(1, PIECE_BYTES // max(1, array.shape[1]))
    digest = hashlib.sha256()
    hasher = ThreadPoolExecutor(1)
    try:
        for start in range(0, len(array if ids is None else ids), step):
            piece = array[start : start + step] if ids is None else array[ids[start : start + step]]
            hashing = hasher.submit(digest.update, piece.reshape(-1).data)
            yield piece
            hashing.result()
    finally:
        # Not joined: the garbage collector may close a generator that was left, in a thread that is just being started
        # and holds the lock that joining takes.
        hasher.shutdown(wait=False)
    read.sha256 = digest.hexdigest()
    return read.sha256


class Hashed:
    """The pieces of a generator that returns their SHA-256, which is `sha256` once the last of them has come."""

    sha256 = ""

    def __init__(self, pieces: Generator[Bytes, None, str]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[Bytes]:
        self.sha256 = yield from self._pieces

    def read_all(self) -> str:
        """Read the pieces for their SHA-256 alone."""
        deque(self, maxlen=0)
        return self.sha256


def open_checkpoint(path: Path | str, only: Collection[str] | None = None, weights_file: str = "") -> Checkpoint:
    """Open the weights in a folder, or one file of weights.

    Which files of a folder count is said in `rows/paths.py`.

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
    shard_of = read_index(path_inside(path, chosen))
    wanted = {name: shard for name, shard in shard_of.items() if only is None or name in only}
    shards = {shard: open_weights_file(path_inside(path, shard)) for shard in dict.fromkeys(wanted.values())}
    for name, shard in wanted.items():
        if name not in shards[shard].tensors:
            problem = f"says that {shard} holds {shorten(name)}, but it does not.\nThey come from different versions"
            raise damaged(path / chosen, problem)
    return Checkpoint(str(path), {name: shards[shard] for name, shard in wanted.items()})


def open_weights_file(path: Path) -> WeightsFile:
    """Open one file by its suffix: torch's format for .bin, .pt and .pth, else safetensors."""
    return TorchFile(path) if path.name.endswith(TORCH_SUFFIXES) else SafetensorsFile(path)
