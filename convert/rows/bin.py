"""One `pytorch_model.bin`: read with `weights_only=True`, mapped from disk where the file allows it.

Such files are zip archives since torch 1.6; their tensors are mapped, and only what is read comes into memory.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..files import open_regular
from .dtypes import safetensors_dtype
from .safetensors_header import LFS_POINTER, lfs_pointer_error
from .stream import Bytes, Fill, Job, Rows, WeightsFile
from .types import TensorInfo, damaged, shorten

if TYPE_CHECKING:
    import torch

SAFER = "Ask its author for safetensors, or convert it on a machine where you trust it."
# The pickle of a checkpoint holds names and shapes only: a few hundred bytes for each tensor.
_MAX_PICKLE_BYTES = 256_000_000


class TorchFile(WeightsFile):
    """A file of `torch.save`. Opened at once (names and shapes), data mapped and read on demand.

    Raises:
        CheckpointError: the file is damaged, would run code when unpickled, or holds anything but dense tensors by
            name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self._check_start()
        self._check_zip()
        self._loaded = self._load()
        self._infos = {name: self._info(name, tensor) for name, tensor in self._loaded.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""
        return self._infos

    @contextmanager
    def reading(self, name: str) -> Iterator[Fill]:
        """Open a tensor for reading; see `WeightsFile.reading`."""
        import torch

        source, rows = self._loaded[name], self._infos[name].num_rows
        matrix = source.reshape(rows, -1) if source.numel() else source.new_empty(rows, 0)
        # Row by row in memory, and as bytes: index_select has no kernel for some 8-bit floats.
        raw = (matrix if matrix.stride(1) == 1 else matrix.contiguous()).view(torch.uint8)

        def fill(wanted: Rows, out: Bytes) -> Sequence[Job]:
            into = torch.from_numpy(out)
            if isinstance(wanted, slice):
                return [lambda: into.copy_(raw[wanted])]
            return [lambda: torch.index_select(raw, 0, torch.from_numpy(wanted), out=into)]

        yield fill

    def _check_start(self) -> None:
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                self.size_bytes = os.fstat(file.fileno()).st_size
                magic = file.read(64)
        except OSError as error:
            raise CheckpointError.at(
                self.where, f"cannot be opened: {error.strerror}.\nExpected a file of weights."
            ) from error
        if magic.startswith(LFS_POINTER):
            raise lfs_pointer_error(self.where, self.size_bytes)

    def _check_zip(self) -> None:
        """Check what torch takes on trust when it maps an archive: plain storage, room for every record, one pickle."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                records = archive.infolist()
                self._check_records(records)
                # torch maps the file and never looks at the checksums.
                broken = archive.testzip()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, RuntimeError) as error:
            raise damaged(self.where, f"truncated or damaged zip archive ({shorten(str(error))})") from error
        if broken is not None:
            raise damaged(self.where, f"damaged: the checksum of record {shorten(broken)} does not fit", record=broken)

    def _check_records(self, records: Sequence[zipfile.ZipInfo]) -> None:
        names = [record.filename for record in records]
        if len(set(names)) != len(names):
            raise damaged(self.where, "damaged: the archive holds two records of one name")
        pickles = [record for record in records if record.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError.at(
                self.where,
                f"not a checkpoint of torch.save: expected one data.pkl of at most "
                f"{_MAX_PICKLE_BYTES:,} bytes, found {[record.file_size for record in pickles]}.\n"
                "A TorchScript archive or an ordinary zip file cannot be converted.",
            )
        for record in records:
            name = shorten(record.filename)
            if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                raise damaged(self.where, f"damaged: record {name} is compressed, which torch.save never does")
            if record.header_offset < 0 or record.header_offset + record.file_size > self.size_bytes:
                raise damaged(self.where, f"damaged: record {name} lies outside the file")

    def _load(self) -> dict[str, torch.Tensor]:
        import torch

        try:
            loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise self._refused(str(error)) from error
        except Exception as error:
            # The bytes of a damaged pickle can raise whatever the unpickler's opcodes can: there is no smaller class.
            reason = f"{type(error).__name__}: {shorten(str(error))}"
            raise damaged(self.where, f"damaged: torch cannot read it ({reason})") from error
        return self._state_dict(loaded)

    def _refused(self, reason: str) -> CheckpointError:
        # torch names the function in one line, amid advice on how to switch the protection off.
        if code := re.search(r"(?:GLOBAL|Can only (?:build|create)[^\n]* got) (\S+)", reason):
            return CheckpointError.at(
                self.where,
                f"refused: expected tensors only, found a pickle that would call {shorten(code[1])} when "
                f"it is loaded.\nNothing of it was run. {SAFER}",
            )
        cause = reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or reason
        return damaged(self.where, f"damaged: not a pickle of tensors ({shorten(cause, 200)})")

    def _state_dict(self, loaded: Any) -> dict[str, torch.Tensor]:
        import torch

        if not isinstance(loaded, Mapping) or not loaded:
            raise CheckpointError.at(
                self.where,
                f"expected tensors by name, found {type(loaded).__name__}.\nExport the model's state_dict.",
                found=type(loaded).__name__,
            )
        for name, value in loaded.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError.at(
                    self.where,
                    f"expected tensors by name, found {shorten(name)} of type {type(value).__name__}.\n"
                    "A training checkpoint must be exported first: save the model's state_dict alone.",
                    tensor=name,
                    found=type(value).__name__,
                )
        return {name: tensor.detach() for name, tensor in loaded.items()}

    def _info(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        import torch

        label = f"{self.where}: tensor {shorten(name)}"
        dtype = safetensors_dtype(tensor.dtype)
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or dtype is None:
            raise CheckpointError(
                f"{label}: expected a dense tensor, found {tensor.layout} {tensor.dtype} on {tensor.device}.\n"
                "Save the model with plain dense tensors.",
                tensor=name,
            )
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes > self.size_bytes:
            raise damaged(
                label,
                f"claims {size_bytes:,} bytes, the whole file has {self.size_bytes:,}",
                tensor=name,
                found=size_bytes,
            )
        return TensorInfo(name, dtype, tuple(tensor.shape), size_bytes)
