"""Checksums: of whole files, and of every row of a matrix.

A row's checksum is the XXH3-64 of its little-endian bytes, as 8 big-endian bytes. It tells which of a hundred thousand
rows changed or moved, costs a tenth of a SHA-256, and keeps the manifest small; the tensor's own SHA-256 guards against
intent. XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

ROW_CHECKSUM_BYTES = 8


def sha256_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes as lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def row_checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hash each contiguous row of a matrix uint8 [rows, row_bytes]: uint8 [rows, 8]."""
    joined = b"".join(map(xxh3_64_digest, rows))
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), ROW_CHECKSUM_BYTES)


def encode_checksums(checksums: NDArray[np.uint8]) -> str:
    """Encode checksums as one base64 string, 8 bytes per row in row order."""
    return base64.b64encode(checksums.tobytes()).decode("ascii")


def decode_checksums(text: str, num_rows: int) -> NDArray[np.uint8]:
    """Decode what `encode_checksums` returned; ValueError where it is not base64, or not `num_rows` checksums."""
    data = base64.b64decode(text, validate=True)
    if len(data) != num_rows * ROW_CHECKSUM_BYTES:
        raise ValueError(f"expected {num_rows} row checksums of 8 bytes, found {len(data)} bytes")
    return np.frombuffer(data, dtype=np.uint8).reshape(num_rows, ROW_CHECKSUM_BYTES)
