"""Element types by their safetensors names, and the arithmetic on raw bytes that conversions need.

Rows are uint8 arrays here, so that converting safetensors to safetensors does not import torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch

LONG_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""Dtypes of whole bytes, as torch and config.json spell them."""

FLOATS = ("BF16", "F16", "F32")
"""The dtypes that a head and an LM head may have."""

# All exponent bits set: infinity, and above it NaN.
_INFINITY_BITS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


def long_name(name: str, where: str) -> str:
    """Return how torch spells a safetensors dtype; CheckpointError for the packed ones (F4, F6)."""
    if name not in LONG_NAMES:
        raise CheckpointError.at(
            where,
            f"dtype {name} is packed below one byte and cannot be read as a tensor here.\n"
            "Use a checkpoint that stores this tensor in bf16, fp16, fp32 or an 8-bit type.",
        )
    return LONG_NAMES[name]


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """Return the safetensors spelling of a torch dtype, or None where the format has none."""
    spelled = str(dtype).removeprefix("torch.")
    return next((name for name, long_name in LONG_NAMES.items() if long_name == spelled), None)


def item_size(name: str) -> int:
    """Bytes per element of a dtype of whole bytes."""
    return 1 if name == "BOOL" else int(re.findall(r"\d+", name)[0]) // 8


def all_finite(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Whether contiguous bytes of BF16, F16 or F32 hold neither NaN nor infinity, without temporary memory.

    With all exponent bits set a number is not finite, and its bits exceed those of every finite number of its sign: as
    signed integers the positive ones come to the top, as unsigned integers the negative ones. bf16 infinity is
    0x7f80, minus infinity 0xff80. Two maxima cost a tenth of testing every exponent.
    """
    if raw.size == 0:
        return True
    wide = dtype == "F32"
    unsigned = raw.reshape(-1).view(np.uint32 if wide else np.uint16)
    infinity, sign = _INFINITY_BITS[dtype], 1 << (31 if wide else 15)
    return int(unsigned.view(np.int32 if wide else np.int16).max()) < infinity and int(unsigned.max()) < sign + infinity


def first_nonfinite_row(raw: NDArray[np.uint8], dtype: str) -> int | None:
    """Index of the first row of [rows, row_bytes] that holds NaN or infinity, or None."""
    if all_finite(raw, dtype):
        return None
    return next(row for row in range(len(raw)) if not all_finite(raw[row], dtype))


def rounded(raw: NDArray[np.uint8], dtype: str, wanted: str) -> NDArray[np.uint8]:
    """Finite numbers [rows, row_bytes] of one of `FLOATS` in another, to nearest even; too large is infinity."""
    single = _as_float32(raw, dtype)
    result: NDArray[Any]
    if wanted == "F32":
        result = single
    elif wanted == "F16":
        with np.errstate(over="ignore"):
            result = single.astype(np.float16)
    else:
        bits = single.view(np.uint32)
        result = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    return result.view(np.uint8).reshape(len(raw), -1)


def _as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    flat = np.ascontiguousarray(raw).reshape(-1)
    if dtype == "F32":
        return flat.view(np.float32)
    if dtype == "F16":
        return flat.view(np.float16).astype(np.float32)
    return (flat.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
