"""One `pytorch_model.bin`: read with `weights_only=True`, mapped from disk where the file allows it.

Files written by torch 1.6 or later are zip archives; their tensors are mapped, and only what is read comes into memory.
Older files are one pickle stream, which torch can only load whole.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError
from .safetensors_file import allocate_bytes, check_row_ids, row_size, safetensors_dtype
from .types import FETCH_AGAIN, TensorInfo, shorten

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

SAFER = "Ask its author for safetensors, or convert it on a machine where you trust it."
# The pickle of a checkpoint holds names and shapes only: a few hundred bytes for each tensor.
_MAX_PICKLE_BYTES = 256_000_000


class TorchFile:
    """A file of `torch.save`. Opened at once (names and shapes), data mapped and read on demand.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is damaged, would run code when unpickled, or holds anything but dense tensors by
            name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{self.where}: cannot be opened: {error.strerror}.") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.where}: expected a file of weights, found a folder or a device.")
        self.size_bytes = status.st_size
        self._loaded = self._load()
        self._infos = {name: self._info(name, tensor) for name, tensor in self._loaded.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""
        return self._infos

    def read(self, name: str) -> tuple[torch.Tensor, str]:
        """Return a dense copy of the whole tensor in its own dtype and shape, and the sha256 of its bytes.

        Raises:
            KeyError: no such tensor.
        """
        import torch

        source = self._loaded[name]
        flat = allocate_bytes(self._infos[name].size_bytes, f"{self.where}: tensor {shorten(name)}")
        out = flat.view(source.dtype).reshape(source.shape)
        with torch.no_grad():
            out.copy_(source)
        return out, _sha256(flat)

    def read_rows(self, name: str, ids: NDArray[np.int64]) -> tuple[torch.Tensor, str]:
        """Return rows `ids` [rows], in that order, as a dense tensor [rows, ...], and the sha256 of those bytes.

        Raises:
            KeyError: no such tensor.
            CheckpointError: an id is outside the tensor, or the tensor has no rows.
        """
        import torch

        source, info = self._loaded[name], self._infos[name]
        check_row_ids(ids, info, self.where)
        row_bytes = row_size(info)
        flat = allocate_bytes(len(ids) * row_bytes, f"{self.where}: tensor {shorten(name)}")
        if flat.numel():
            rows = source.reshape(source.shape[0], -1)
            if rows.stride(1) != 1:
                rows = rows.contiguous()
            # As bytes, because index_select has no kernel for some 8-bit floats.
            torch.index_select(rows.view(torch.uint8), 0, torch.from_numpy(ids), out=flat.view(len(ids), row_bytes))
        return flat.view(source.dtype).reshape(len(ids), *source.shape[1:]), _sha256(flat)

    def pieces(self, name: str, ids: NDArray[np.int64] | None, piece_bytes: int) -> Generator[torch.Tensor, None, str]:
        """Yield a tensor, or its rows `ids`, in pieces of whole rows; see `Checkpoint.pieces`. Returns the sha256.

        Raises:
            KeyError: no such tensor.
            CheckpointError: as `read_rows`.
        """
        import torch

        info = self._infos[name]
        if not info.shape or info.size_bytes == 0:
            value, digest_of_all = self.read(name) if ids is None else self.read_rows(name, ids)
            yield value
            return digest_of_all
        digest = hashlib.sha256()
        step = max(1, piece_bytes // row_size(info))
        wanted = np.arange(info.shape[0]) if ids is None else ids
        for start in range(0, max(1, len(wanted)), step):
            piece, _ = self.read_rows(name, wanted[start : start + step])
            digest.update(piece.reshape(-1).view(torch.uint8).numpy().data)
            yield piece
        return digest.hexdigest()

    def _load(self) -> dict[str, torch.Tensor]:
        import torch

        is_zip = self._is_zip()
        if is_zip:
            self._check_zip()
        try:
            with warnings.catch_warnings():
                # Old files name storage classes that torch calls deprecated; reading them is what we are asked to do.
                warnings.simplefilter("ignore")
                loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError as error:
            raise self._refused(str(error)) from error
        except Exception as error:
            # The bytes of a damaged pickle can raise whatever the unpickler's opcodes can: there is no smaller class.
            raise CheckpointError(
                f"{self.where}: damaged: torch cannot read it ({type(error).__name__}: {shorten(str(error))}).\n"
                + FETCH_AGAIN
            ) from error
        return self._state_dict(loaded)

    def _refused(self, reason: str) -> CheckpointError:
        # torch names the function in one line, amid advice on how to switch the protection off.
        if code := re.search(r"(?:GLOBAL|Can only (?:build|create)[^\n]* got) (\S+)", reason):
            return CheckpointError(
                f"{self.where}: refused: expected tensors only, found a pickle that would call {shorten(code[1])} when "
                f"it is loaded.\nNothing of it was run. {SAFER}"
            )
        cause = reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or reason
        return CheckpointError(
            f"{self.where}: damaged: not a pickle of tensors ({shorten(cause, 200)}).\n{FETCH_AGAIN}"
        )

    def _is_zip(self) -> bool:
        try:
            with open(self.path, "rb") as file:
                magic = file.read(64)
        except OSError as error:
            raise CheckpointError(f"{self.where}: cannot be read: {error.strerror}.") from error
        if magic.startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"{self.where}: this is a Git LFS pointer, a text of {self.size_bytes:,} bytes, not the weights.\n"
                "Run `git lfs pull` in that folder, or fetch the repository with `hf download`."
            )
        return magic.startswith(b"PK\x03\x04")

    def _check_zip(self) -> None:
        """Check what torch takes on trust when it maps an archive: plain storage, room for every record, one pickle."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                records = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{self.where}: truncated or damaged zip archive ({shorten(str(error))}).\n{FETCH_AGAIN}"
            ) from error
        names = [record.filename for record in records]
        if len(set(names)) != len(names):
            raise CheckpointError(f"{self.where}: the archive holds two records of one name.\n{FETCH_AGAIN}")
        pickles = [record for record in records if record.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{self.where}: not a checkpoint of torch.save: expected one data.pkl of at most "
                f"{_MAX_PICKLE_BYTES:,} bytes, found {[record.file_size for record in pickles]}.\n"
                "A TorchScript archive or an ordinary zip file cannot be converted."
            )
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                raise CheckpointError(
                    f"{self.where}: record {shorten(record.filename)} is compressed; torch.save never does that.\n"
                    + FETCH_AGAIN
                )
            if record.header_offset < 0 or record.header_offset + record.file_size > self.size_bytes:
                raise CheckpointError(
                    f"{self.where}: record {shorten(record.filename)} lies outside the file.\n{FETCH_AGAIN}"
                )

    def _state_dict(self, loaded: Any) -> dict[str, torch.Tensor]:
        import torch

        if not isinstance(loaded, Mapping) or not loaded:
            raise CheckpointError(
                f"{self.where}: expected tensors by name, found {type(loaded).__name__}.\n"
                "Export the model's state_dict."
            )
        for name, value in loaded.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{self.where}: expected tensors by name, found {shorten(name)} of type {type(value).__name__}.\n"
                    "A training checkpoint must be exported first: save the model's state_dict alone."
                )
        return {name: tensor.detach() for name, tensor in loaded.items()}

    def _info(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        import torch

        label = f"{self.where}: tensor {shorten(name)}"
        dtype = safetensors_dtype(tensor.dtype)
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or dtype is None:
            raise CheckpointError(
                f"{label}: expected a dense tensor, found {tensor.layout} {tensor.dtype} on {tensor.device}.\n"
                "Save the model with plain dense tensors."
            )
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes > self.size_bytes:
            raise CheckpointError(
                f"{label}: claims {size_bytes:,} bytes, the whole file has {self.size_bytes:,}.\n{FETCH_AGAIN}"
            )
        return TensorInfo(name, dtype, tuple(tensor.shape), size_bytes)


def _sha256(flat: torch.Tensor) -> str:
    return hashlib.sha256(flat.numpy().data).hexdigest()
