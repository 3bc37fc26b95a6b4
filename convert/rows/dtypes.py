"""Element types by their safetensors names, and arithmetic on the raw bytes of bf16, fp16 and fp32.

Rows are uint8 arrays: NumPy has no bfloat16, and importing torch takes memory and time that a conversion does not need.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Dtypes of whole bytes, as torch and config.json spell them, in reverse order of their tensors in a file."""

FLOATS = ("BF16", "F16", "F32")
"""The dtypes that a head and an LM head may have."""

# All exponent bits set: infinity, and above it NaN.
_INFINITY_BITS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


def item_size(name: str) -> int:
    """Return the bytes per element of a dtype of whole bytes."""
    return 1 if name == "BOOL" else int(re.findall(r"\d+", name)[0]) // 8


def all_finite(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Whether contiguous bytes of BF16, F16 or F32 hold neither NaN nor infinity.

    The bits of both exceed those of every finite number of their sign: as signed integers the positive ones come to the
    top, as unsigned integers the negative ones. Two maxima cost a tenth of testing every exponent.
    """
    if raw.size == 0:
        return True
    wide = dtype == "F32"
    unsigned = raw.reshape(-1).view(np.uint32 if wide else np.uint16)
    infinity, sign = _INFINITY_BITS[dtype], 1 << (31 if wide else 15)
    return int(unsigned.view(np.int32 if wide else np.int16).max()) < infinity and int(unsigned.max()) < sign + infinity


def first_nonfinite_row(raw: NDArray[np.uint8], dtype: str) -> int | None:
    """Find the first row of [rows, row_bytes] that holds NaN or infinity: its index, or None."""
    if all_finite(raw, dtype):
        return None
    return next(row for row in range(len(raw)) if not all_finite(raw[row], dtype))


def rounded(raw: NDArray[np.uint8], dtype: str, wanted: str) -> NDArray[np.uint8]:
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
