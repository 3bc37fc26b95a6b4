"""One `pytorch_model.bin`: read with `weights_only=True`, so that nothing of it runs; mapped where torch can map it."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .files import LONG_NAMES, TensorInfo, damaged, refuse_pointers, shorten

if TYPE_CHECKING:
    import torch

_SHORT_NAMES = {long_name: name for name, long_name in LONG_NAMES.items()}


class TorchFile:
    """A file of `torch.save`, of which nothing runs: a zip archive, mapped, or torch's old format; CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_pointers(path)
        self._loaded = {name: _dense(path, name, value) for name, value in _load(path).items()}
        self.tensors = {
            name: TensorInfo(name, _SHORT_NAMES[str(found.dtype)[6:]], tuple(found.shape), found.nbytes)
            for name, found in self._loaded.items()
        }

    def array(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor, uint8 [rows, row_bytes]; KeyError where there is none of that name."""
        import torch

        info, tensor = self.tensors[name], self._loaded[name].contiguous().reshape(-1)
        array: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
        return array.reshape(info.num_rows, info.row_bytes)


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        with warnings.catch_warnings():
            # torch's warning of a pickle protocol that it may not read; whether it does is seen at once.
            warnings.simplefilter("ignore", UserWarning)
            is_zip = zipfile.is_zipfile(path)
            file = _checked(path) if is_zip else path
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and file is path)
    except pickle.UnpicklingError as error:
        if code := re.search(r"(?:GLOBAL|Can only (?:build|create)[^\n]* got) (\S+)", str(error)):
            problem = f"refused: found a pickle that would call {shorten(code[1])} when it is loaded"
            raise CheckpointError.at(path, f"{problem}.\nNone of it ran. Ask its author for safetensors.") from error
        # torch names the cause in one line, amid advice on how to switch the protection off.
        cause = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise damaged(path, f"not a pickle that torch's safe loader reads ({shorten(cause, 200)})") from error
    except Exception as error:
        # The bytes of a damaged pickle can raise whatever the unpickler's opcodes can: there is no smaller class.
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {shorten(str(error))})") from error
    if not isinstance(loaded, Mapping) or not loaded:
        problem = f"expected tensors by name, found {type(loaded).__name__}.\nExport the model's state_dict."
        raise CheckpointError.at(path, problem)
    return dict(loaded)


def _checked(path: Path) -> Path | io.BytesIO:
    """Hold every record of an archive against its CRC-32, which torch does not where it maps the file.

    Returns the path; or, where it is pickled by a protocol that torch's safe loader does not read, the archive in
    memory, pickled by protocol 2. Raises BadZipFile.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if not any(record.CRC for record in records):
            # torch was told to leave the checksums out.
            return path
        if (bad := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {bad} is not that of its bytes")
        pickled = next((record for record in records if record.filename.endswith("data.pkl")), None)
        if pickled is None or archive.read(pickled)[:2] < b"\x80\x04":
            return path
        rewritten = io.BytesIO()
        with zipfile.ZipFile(rewritten, "w") as copy:
            for record in records:
                data = archive.read(record)
                copy.writestr(record.filename, _by_protocol_2(data) if record is pickled else data)
    rewritten.seek(0)
    return rewritten


def _by_protocol_2(pickled: bytes) -> bytes:
    """Write the instructions of pickle protocols 4 and 5 as those of protocol 2; nothing of it runs.

    Texts are written out wherever they are used, as a name of a class is two texts on the stack in protocol 4 and part
    of its instruction in protocol 2. What has no counterpart is left for torch's loader to refuse.
    """
    written: list[bytes] = []
    kept: dict[int, str] = {}
    pushed: list[tuple[int, str]] = []
    num_kept, was_text = 0, False
    steps: list[tuple[str, Any, int]] = [(step.name, value, at or 0) for step, value, at in pickletools.genops(pickled)]
    ends = [*(at for _, _, at in steps[1:]), len(pickled)]
    for (name, value, start), end in zip(steps, ends, strict=True):
        raw, text = pickled[start:end], None
        if name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            text = value
        elif name in ("BINGET", "LONG_BINGET"):
            text = kept.get(value)
        if text is not None:
            encoded = text.encode("utf-8", "surrogatepass")
            raw = pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
            pushed.append((len(written), text))
        elif name == "MEMOIZE":
            raw = b"" if was_text else pickle.LONG_BINPUT + struct.pack("<I", num_kept)
            if was_text:
                kept[num_kept] = pushed[-1][1]
            num_kept += 1
        elif name == "STACK_GLOBAL":
            (first, module), (second, attribute) = pushed[-2:]
            written[first] = written[second] = b""
            raw = pickle.GLOBAL + f"{module}\n{attribute}\n".encode()
        elif name in ("PROTO", "FRAME"):
            raw = pickle.PROTO + b"\x02" if name == "PROTO" else b""
        written.append(raw)
        was_text = text is not None
    return b"".join(written)


def _dense(path: Path, name: object, value: object) -> torch.Tensor:
    import torch

    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        problem = f"expected tensors by name, found {shorten(name)} of type {type(value).__name__}"
        raise CheckpointError.at(path, f"{problem}.\nSave the state_dict of the model alone.")
    if value.layout != torch.strided or value.device.type != "cpu" or str(value.dtype)[6:] not in _SHORT_NAMES:
        problem = f"tensor {shorten(name)}: expected a dense tensor, found {value.layout} {value.dtype}"
        raise CheckpointError.at(path, f"{problem} on {value.device}.\nSave the model with plain dense tensors.")
    return value.detach().resolve_conj().resolve_neg()
