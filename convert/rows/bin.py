"""One `pytorch_model.bin`: read with `weights_only=True`, so that nothing of it runs; mapped where torch can map it."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .dtypes import safetensors_dtype
from .types import TensorInfo, damaged, refuse_pointers, shorten

if TYPE_CHECKING:
    import torch


class TorchFile:
    """A file of `torch.save`: a zip archive, whose tensors are mapped, or torch's format before 1.6, read whole.

    Raises:
        CheckpointError: the file is damaged, would run code when unpickled, or holds anything but dense tensors by
            name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_pointers(path)
        self.size_bytes = path.stat().st_size
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_archive(path)
        self._loaded = {name: _dense(path, name, value) for name, value in _load(path, mapped=is_zip).items()}
        self.tensors = {name: self._info(name, tensor) for name, tensor in self._loaded.items()}

    def array(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor, uint8 [rows, row_bytes]; KeyError where there is none of that name."""
        import torch

        info, tensor = self.tensors[name], self._loaded[name].contiguous().reshape(-1)
        array: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
        return array.reshape(info.num_rows, info.row_bytes)

    def _info(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        dtype = safetensors_dtype(tensor.dtype)
        size_bytes = tensor.numel() * tensor.element_size()
        if dtype is None:
            problem = f"tensor {shorten(name)} is of {tensor.dtype}, which safetensors does not have"
            raise CheckpointError.at(self.path, f"{problem}.\nSave it in another dtype.")
        if size_bytes > self.size_bytes:
            problem = f"tensor {shorten(name)} claims {size_bytes:,} bytes, the whole file has {self.size_bytes:,}"
            raise damaged(self.path, problem)
        return TensorInfo(name, dtype, tuple(tensor.shape), size_bytes)


def _check_archive(path: Path) -> None:
    """Check what torch takes on trust when it maps an archive: the checksums, and that nothing is compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
            broken = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, RuntimeError) as error:
        raise damaged(path, f"truncated or damaged zip archive ({shorten(str(error))})") from error
    if broken is not None:
        raise damaged(path, f"the checksum of record {shorten(broken)} does not fit")
    if packed:
        raise damaged(path, f"record {shorten(packed[0])} is compressed, which torch.save never does")


def _load(path: Path, mapped: bool) -> dict[str, Any]:
    import torch

    try:
        with warnings.catch_warnings():
            # torch's warning of a pickle protocol that it may not read; whether it does is seen at once.
            warnings.simplefilter("ignore", UserWarning)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    except Exception as error:
        # The bytes of a damaged pickle can raise whatever the unpickler's opcodes can: there is no smaller class.
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {shorten(str(error))})") from error
    if not isinstance(loaded, Mapping) or not loaded:
        found = type(loaded).__name__
        advice = "Export the model's state_dict."
        raise CheckpointError.at(path, f"expected tensors by name, found {found}.\n{advice}")
    return dict(loaded)


def _refused(path: Path, reason: str) -> CheckpointError:
    # torch names the cause in one line, amid advice on how to switch the protection off.
    if code := re.search(r"(?:GLOBAL|Can only (?:build|create)[^\n]* got) (\S+)", reason):
        return CheckpointError.at(
            path,
            f"refused: expected tensors only, found a pickle that would call {shorten(code[1])} when it is loaded.\n"
            "Nothing of it was run. Ask its author for safetensors, or convert it on a machine where you trust it.",
        )
    if operand := re.search(r"Unsupported operand (\d+)", reason):
        return CheckpointError.at(
            path,
            "its pickle is of a protocol (4 or 5) that torch's safe loader does not read, or no pickle at all "
            f"(operand {operand[1]}).\nWhere you trust it, load it with torch and save its tensors as safetensors.",
        )
    cause = reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or reason
    return damaged(path, f"not a pickle of tensors ({shorten(cause, 200)})")


def _dense(path: Path, name: object, value: object) -> torch.Tensor:
    """Return a value of the loaded mapping as a plain dense tensor, negative and conjugate views made so."""
    import torch

    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise CheckpointError.at(
            path,
            f"expected tensors by name, found {shorten(name)} of type {type(value).__name__}.\n"
            "A training checkpoint must be exported first: save the model's state_dict alone.",
        )
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise CheckpointError.at(
            path,
            f"tensor {shorten(name)}: expected a dense tensor, found {value.layout} {value.dtype} on {value.device}.\n"
            "Save the model with plain dense tensors.",
        )
    return value.detach().resolve_conj().resolve_neg()
