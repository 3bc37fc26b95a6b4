"""The header of a safetensors file, checked in full before anything of it is trusted.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, the little-endian length N of the header; N
bytes of JSON that map each name to dtype, shape and data_offsets [begin, end) relative to the end of the header; the
data. The tensors tile the data without hole or overlap.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .dtypes import BITS
from .types import TensorInfo, damaged, shorten

# The limit of the safetensors library itself; a larger header is a lie or not a header.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
LFS_POINTER = b"version https://git-lfs"

_MAX_INT = 2**63 - 1
_MAX_DIMENSIONS = 64  # torch's own limit


@dataclass(frozen=True)
class TensorSpan(TensorInfo):
    """A tensor and the place of its bytes in the file: `offset` counts from the first byte of the file."""

    offset: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A header that has passed every check.

    Attributes:
        tensors: by name, in file order.
        metadata: the strings under `__metadata__`.
        data_offset: where the data begins, in bytes from the start of the file.
    """

    tensors: Mapping[str, TensorSpan]
    metadata: Mapping[str, str]
    data_offset: int


def lfs_pointer_error(where: str, size_bytes: int) -> CheckpointError:
    """The error for a file that Git LFS has not fetched yet."""
    return CheckpointError.at(
        where,
        f"this is a Git LFS pointer, a text of {size_bytes:,} bytes, not the weights.\n"
        "Run `git lfs pull` in that folder, or fetch the repository with `hf download`.",
        found="Git LFS pointer",
    )


def header_length(first_bytes: bytes, file_size_bytes: int, where: str) -> int:
    """Return the length in bytes of the JSON header announced by the first 8 bytes of a file.

    Raises:
        CheckpointError: the file is too short to be safetensors, or the length cannot be true.
    """
    if len(first_bytes) < LENGTH_BYTES or file_size_bytes < LENGTH_BYTES:
        raise damaged(
            where,
            f"not a safetensors file: expected at least {LENGTH_BYTES} bytes, found {file_size_bytes:,}",
            found=file_size_bytes,
        )
    if first_bytes.startswith(LFS_POINTER):
        raise lfs_pointer_error(where, file_size_bytes)
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise damaged(
            where,
            f"not a safetensors file: its first 8 bytes announce a header of {length:,} bytes, expected at most "
            f"{MAX_HEADER_BYTES:,}",
            header_bytes=length,
        )
    if LENGTH_BYTES + length > file_size_bytes:
        raise damaged(
            where,
            f"truncated: expected a header of {length:,} bytes after the first 8, found a file of {file_size_bytes:,} "
            "bytes",
            header_bytes=length,
            found=file_size_bytes,
        )
    return length


def parse_header(raw: bytes, file_size_bytes: int, where: str) -> SafetensorsHeader:
    """Check a JSON header, without the 8 bytes before it, against the size of its file and return it.

    Raises:
        CheckpointError: the header is not the JSON that the format demands, or what it claims about names, dtypes,
            shapes and offsets contradicts itself or the size of the file.
    """
    entries = _load_object(raw, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(where, f"__metadata__ must map strings to strings, found {shorten(metadata)}", key="__metadata__")
    data_offset = LENGTH_BYTES + len(raw)
    spans = [_span(name, entry, data_offset, where) for name, entry in entries.items()]
    spans.sort(key=lambda span: (span.offset, span.size_bytes))
    end = data_offset
    for span in spans:
        if span.offset != end:
            problem = "overlaps the tensor before it" if span.offset < end else "leaves a hole before it"
            raise damaged(
                where,
                f"tensor {shorten(span.name)} {problem}: expected its data at offset {end - data_offset:,}, the header "
                f"says {span.offset - data_offset:,}",
                tensor=span.name,
                expected=end - data_offset,
                found=span.offset - data_offset,
            )
        end += span.size_bytes
    if end != file_size_bytes:
        problem = "truncated" if end > file_size_bytes else "longer than its header says"
        raise damaged(
            where,
            f"{problem}: the header describes {end:,} bytes, the file has {file_size_bytes:,}",
            expected=end,
            found=file_size_bytes,
        )
    return SafetensorsHeader({span.name: span for span in spans}, metadata, data_offset)


def header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data: length and JSON, padded as the library pads it, so that the data is aligned."""
    text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _load_object(raw: bytes, where: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise damaged(where, f"the header names {shorten(twice)} twice", tensor=twice)
        return found

    if not raw.startswith(b"{"):
        found = shorten(raw[:16])
        problem = f"not a safetensors file: expected a header that begins with '{{', found {found}"
        raise damaged(where, problem, expected="{", found=raw[:16])
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"the header is not valid JSON ({shorten(str(error))})", found="invalid JSON") from error
    if not isinstance(entries, dict):
        raise damaged(where, "the header is not a JSON object")
    return entries


def _span(name: str, entry: object, data_offset: int, where: str) -> TensorSpan:
    def lie(problem: str, key: str | None = None) -> CheckpointError:
        return damaged(f"{where}: tensor {shorten(name)}", problem, tensor=name, key=key)

    if not _is_text(name):
        raise lie("the name is not valid Unicode text")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise lie(f"expected dtype, shape and data_offsets, found {shorten(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise lie(f"unknown dtype {shorten(dtype)}, expected one of {', '.join(BITS)}", "dtype")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise lie(f"shape must be a list of at most {_MAX_DIMENSIONS} sizes, found {shorten(shape)}", "shape")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise lie(f"data_offsets must be [begin, end] with begin <= end, found {shorten(offsets)}", "data_offsets")
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        needs = f"{shorten(bits)} bits" if bits % 8 else f"{shorten(bits // 8)} bytes"
        span = offsets[1] - offsets[0]
        raise lie(f"{dtype} of shape {shorten(shape)} takes {needs}, the offsets span {span:,}", "data_offsets")
    return TensorSpan(name, dtype, tuple(shape), bits // 8, data_offset + offsets[0])


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_INT for size in value)
