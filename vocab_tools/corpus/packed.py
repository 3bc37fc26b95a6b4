"""Compressed files, read as a stream: gzip, zstandard, bzip2 and xz."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_WINDOW_BYTES = 64 << 10


class _ZstdFile:
    def __init__(self, raw: BinaryIO) -> None:
        import pyarrow as pa

        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")

    def read1(self, size: int) -> bytes:
        # A call that meets damage loses what it had unpacked before, so calls are kept small.
        data: bytes = self._stream.read(min(size, _WINDOW_BYTES))
        return data


_OPEN: Mapping[str, Callable[[Any], Any]] = {".gz": gzip.open, ".zst": _ZstdFile, ".bz2": bz2.open, ".xz": lzma.open}
PACKED = tuple(_OPEN)


def is_packed(name: str) -> bool:
    """Whether a file is compressed, by the end of its name."""
    return Path(name).suffix.lower() in _OPEN


class PackedFile(io.RawIOBase):
    """The decompressed bytes of a file; they end at its end, or where it is damaged.

    Attributes:
        suffix: the end of the file's name, which tells the compression.
        fault: how the file is damaged; None while no damage was met.

    Raises:
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.fault: str | None = None
        self.suffix = Path(path).suffix.lower()
        self._packed = Path(path).open("rb")  # noqa: SIM115 - closed by `close`
        self._unpacked = _OPEN[self.suffix](self._packed)

    @property
    def compressed_position(self) -> int:
        """Number of compressed bytes that were read."""
        return self._packed.tell()

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as one step of decompression goes; 0 at the end."""
        if self.fault is not None:
            return 0
        view = memoryview(buffer)
        try:
            data = self._unpacked.read1(len(view))
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            self.fault = str(error)
            return 0
        except OSError as error:
            # An error with a number is the system's, one without is a decompressor's.
            if error.errno is not None:
                raise
            self.fault = str(error)
            return 0
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._packed.close()
        super().close()


class PackedReader(io.BufferedReader):
    """A buffered `PackedFile`: `read` returns less than was asked for only at the end or before the damage."""

    raw: PackedFile

    def __init__(self, path: str) -> None:
        super().__init__(PackedFile(path), _WINDOW_BYTES)

    def skip(self, size: int) -> int:
        """Read past `size` bytes; returns how many there were."""
        left = size
        while left and (window := self.read(min(left, 1 << 20))):
            left -= len(window)
        return size - left


def fault_of(stream: BinaryIO) -> str | None:
    """Describe the damage that was met in a packed file; None without damage, and for any other stream."""
    if not isinstance(stream, PackedReader) or stream.raw.fault is None:
        return None
    return f"the {stream.raw.suffix} stream is damaged from about here: {stream.raw.fault}"
