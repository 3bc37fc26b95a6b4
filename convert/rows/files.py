"""Weights files on disk: which of a folder are read, the dtypes in them, and one safetensors file, mapped as bytes.

Read are, as in transformers, the first of `WEIGHTS_PREFERENCE`, or else one single other `*.safetensors`. What is
beside the chosen files (an older `.bin`) is not looked at; of a head's, `open_head` warns.

Rows are uint8 arrays: NumPy has no bfloat16, and importing torch takes memory and time that a conversion does not need.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.files import read_object, regular_file
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..artifact.checksums import sha256_file
from ..errors import CheckpointError

Bytes = NDArray[np.uint8]

_FLOAT8 = {"F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
_FLOAT8 |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
_2_BYTES = {"I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16"}
_4_BYTES = {"I32": "int32", "U32": "uint32", "F32": "float32"}
_8_BYTES = {"C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64"}
LONG_NAMES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", **_FLOAT8, **_2_BYTES, **_4_BYTES, **_8_BYTES}
"""Dtypes of whole bytes, as torch and config.json spell them, in reverse order of their tensors in a file."""

FLOATS = ("BF16", "F16", "F32")
"""The dtypes that a head and an LM head may have."""

# All exponent bits set: infinity, and above it NaN.
_INFINITY_BITS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
WEIGHTS_PREFERENCE = (_SAFETENSORS, f"{_SAFETENSORS}.index.json", _PICKLED, f"{_PICKLED}.index.json")
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHTS = re.compile(r"(?!training_args|optimizer|scheduler|scaler|consolidated)[^/]*\.(safetensors|bin)")
"""Names of files that an engine may read a head from: no state of a trainer, and not Mistral's copy of a model.

vLLM, SGLang and FR-Spec read .pt, the suffix of maps and of trainers' states, only where neither of the two is.
"""


def item_size(name: str) -> int:
    """Return the bytes per element of a dtype of whole bytes."""
    return 1 if name == "BOOL" else int(re.findall(r"\d+", name)[0]) // 8


def all_finite(raw: Bytes, dtype: str) -> bool:
    """Tell whether contiguous bytes of BF16, F16 or F32 hold neither NaN nor infinity.

    The bits of both exceed those of every finite number of their sign: as signed integers the positive ones come to the
    top, as unsigned integers the negative ones. Two maxima cost a tenth of testing every exponent.
    """
    if raw.size == 0:
        return True
    wide = dtype == "F32"
    unsigned = raw.reshape(-1).view(np.uint32 if wide else np.uint16)
    infinity, sign = _INFINITY_BITS[dtype], 1 << (31 if wide else 15)
    return int(unsigned.view(np.int32 if wide else np.int16).max()) < infinity and int(unsigned.max()) < sign + infinity


def first_nonfinite_row(raw: Bytes, dtype: str) -> int | None:
    """Find the first row of [rows, row_bytes] that holds NaN or infinity: its index, or None."""
    if all_finite(raw, dtype):
        return None
    return next(row for row in range(len(raw)) if not all_finite(raw[row], dtype))


def rounded(raw: Bytes, dtype: str, wanted: str) -> Bytes:
    """Round finite numbers [rows, row_bytes] of one of `FLOATS` to another, to nearest even; too large is infinity."""
    flat = np.ascontiguousarray(raw).reshape(-1)
    if dtype == "BF16":
        # It is the upper half of fp32.
        single = (flat.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        single = flat.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32, copy=False)
    result: NDArray[Any] = single
    if wanted == "F16":
        with np.errstate(over="ignore"):
            result = single.astype(np.float16)
    elif wanted == "BF16":
        bits = single.view(np.uint32)
        nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        result = (nearest >> np.uint32(16)).astype(np.uint16)
    return result.view(np.uint8).reshape(len(raw), -1)


def choose_weights(names: list[str], where: str) -> str:
    """Return which of the file names of a folder or repository holds or indexes its weights; else CheckpointError."""
    for preferred in WEIGHTS_PREFERENCE:
        if preferred in names:
            return preferred
    files = sorted(name for name in names if "/" not in name)
    others = [name for name in files if name.endswith(".safetensors")]
    plain = [name for name in others if name != "consolidated.safetensors"] or others
    if len(plain) == 1 and "-of-" not in plain[0]:
        return plain[0]
    found = f"Found {', '.join(plain[:5] or [*files[:8], *sorted({*names} - {*files})[:8]]) or 'no files'}."
    problem = f"no weights: expected one of {', '.join(WEIGHTS_PREFERENCE)}. {found}"
    advice = "Fetch them, give the file that is meant such a name, or name a sub-folder of a head with --subfolder."
    if any("-of-" in name and name.endswith((".safetensors", *TORCH_SUFFIXES)) for name in files):
        advice = "These are shards without their index: fetch the .index.json too, or save the head as one file."
    raise CheckpointError.at(where, f"{problem}\n{advice}")


def read_index(path: Path) -> dict[str, str]:
    """Read the shard of each tensor from an index; CheckpointError for another file, or a shard that may lead out."""
    weight_map = read_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(path, "expected an object with a filled weight_map")
    for name, shard in weight_map.items():
        if not stays_inside(shard) or not shard.endswith((".safetensors", *TORCH_SUFFIXES)):
            problem = f"shard of tensor {shorten(name)}: expected a file of weights in this folder"
            raise CheckpointError.at(path, f"{problem}, found {shorten(shard)}.\nFetch the repository again.")
    return weight_map


def stays_inside(name: object) -> bool:
    """Tell whether `name` is a relative path without `..`, which no shell or terminal reads as anything else."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


def clean_subfolder(subfolder: object) -> str:
    """Return --subfolder without a slash at its end, "" for None; UsageError where it could lead out of its folder."""
    if subfolder is None:
        return ""
    if not isinstance(subfolder, str) or not stays_inside(subfolder):
        expected = "expected the name of a folder inside the repository or folder, such as eagle3"
        raise UsageError(f"--subfolder {shorten(subfolder)}: {expected}.")
    return "/".join(PurePosixPath(subfolder).parts)


def list_names(folder: Path) -> list[str]:
    """Return the names of the files of a folder; CheckpointError where it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not os.path.isdir(folder / name))
    except OSError as error:
        raise CheckpointError.at(folder, f"cannot be listed: {error.strerror}.") from error


@dataclass(frozen=True)
class TensorInfo:
    """One dense tensor as its file describes it: `dtype` in safetensors' spelling ("BF16"), `shape` () for a scalar."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def num_rows(self) -> int:
        """Size of the first dimension; a scalar counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 where the tensor is empty."""
        return self.size_bytes // self.num_rows if self.num_rows else 0


class SafetensorsFile:
    """A safetensors file on disk, mapped read-only; messages name `where`, or the path.

    `metadata` are the strings under `__metadata__`, `data_offset` the bytes before the first tensor's data. Raises
    CheckpointError: the file cannot be opened, or `safetensors` refuses its header.
    """

    def __init__(self, path: Path, where: str = "") -> None:
        self.path = path
        refuse_pointers(path, where)
        try:
            with safe_open(path, framework="numpy") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise damaged(where or path, f"not a sound safetensors file ({error})") from error
        with path.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.size_bytes = len(mapped)
        self.data_offset = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : self.data_offset])
        header.pop("__metadata__", None)
        self._data = np.frombuffer(mapped, np.uint8)
        self._ends = {name: entry["data_offsets"] for name, entry in header.items()}
        self.tensors = {
            name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), self._ends[name][1] - self._ends[name][0])
            for name, entry in header.items()
        }

    def array(self, name: str) -> Bytes:
        """Return a tensor, uint8 [rows, row_bytes], in the mapped file; KeyError where there is none of that name."""
        info, begin = self.tensors[name], self.offset(name)
        return self._data[begin : begin + info.size_bytes].reshape(info.num_rows, info.row_bytes)

    def offset(self, name: str) -> int:
        """Return where the data of a tensor begins, in bytes from the start of the file."""
        begin: int = self.data_offset + self._ends[name][0]
        return begin


def header_bytes(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the data of a safetensors file: size, and JSON padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for info in tensors:
        begin, end = end, end + info.size_bytes
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def damaged(where: str | Path, problem: str) -> CheckpointError:
    """Build the error for a file that is not what it claims to be."""
    advice = "The download may have been cut short or the file damaged: delete it and fetch it again."
    return CheckpointError.at(where, f"{problem}.\n{advice}")


def refuse_pointers(path: Path, where: str = "") -> None:
    """Raise CheckpointError for what is not there, or no regular file (`regular_file`)."""
    if not path.exists():
        raise damaged(where or path, "not there")
    regular_file(path, CheckpointError, "file of weights")


@lru_cache
def _sha256(path: Path, changed_ns: int) -> str:
    # Once for a file, which several steps of a run open.
    return sha256_file(path)


def check_blob(path: Path) -> None:
    """Hold a file of the Hub's cache against its name there, the SHA-256 of a large one; else CheckpointError."""
    real = path.resolve()
    is_named_by_it = real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name)
    if is_named_by_it and _sha256(real, real.stat().st_mtime_ns) != real.name:
        raise damaged(real, f"{path.name} is not as the Hub has it: its SHA-256 is another than its name in the cache")


def shorten(value: object, limit: int = 80) -> str:
    """Return at most `limit` characters of `repr(value)`, for messages that quote what a file claims."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
