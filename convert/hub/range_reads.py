"""One tensor of a safetensors file that lies on a server, fetched by byte ranges and kept in a cache.

Only the header of the file and the bytes of the tensor travel. A broken connection is taken up where it broke, in this
process or, after a kill, in the next one. The result is itself a small safetensors file. `remote_file.py` is the
transport.

The cache folder of one remote file (one content, named by its etag) holds for each tensor:

    NAME.partial        what has come so far: the header of the small file, then the tensor's first bytes
    NAME.safetensors    the whole
    NAME.json           its size and sha256, written before the whole appears; both are checked on every use
    NAME.lock           held with flock(2) while a process fetches
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from eagle_slim.vocab_tools.files import write_file

from ..artifact.checksums import sha256_from, sha256_of
from ..atomic import require_space
from ..errors import OutputError, SourceError
from ..rows.safetensors_file import SafetensorsFile
from ..rows.types import TensorInfo, damaged
from .client import UnreachableError
from .remote_file import HubFile, progress_bar

# Most headers fit, so that one request does; a Llama shard has 10 to 30 kB. Of a small file, no more than a hundredth.
_LENGTH_BYTES = 8
_FIRST_BYTES = 64 << 10
_FIRST_SHARE = 100
_MAX_FILE_NAME = 200


@dataclass(frozen=True)
class RemoteHeader:
    """The header of a remote safetensors file: every tensor by name, and where its data begins in the file."""

    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]


def read_remote_header(file: HubFile) -> RemoteHeader:
    """Fetch the header of a remote safetensors file; `safetensors` checks it at the head of an empty file."""
    wanted = max(_LENGTH_BYTES, min(_FIRST_BYTES, file.size_bytes // _FIRST_SHARE))
    first = _fetch_bytes(file, 0, min(wanted, file.size_bytes))
    end = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    if end > file.size_bytes:
        raise damaged(file.label, f"not a safetensors file: its header would end at byte {end:,}")
    raw = first if end <= len(first) else first + _fetch_bytes(file, len(first), end)
    with tempfile.NamedTemporaryFile() as empty:
        empty.write(raw[:end])
        empty.truncate(file.size_bytes)
        empty.flush()
        found = SafetensorsFile(Path(empty.name), file.label)
    return RemoteHeader(found.tensors, {name: found.offset(name) for name in found.tensors})


def _small_header(info: TensorInfo, etag: str) -> bytes:
    """The bytes before the data of a safetensors file of one tensor, padded as the library pads them."""
    described = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [0, info.size_bytes]}
    text = json.dumps({"__metadata__": {"etag": etag}, info.name: described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def fetch_tensor(file: HubFile, span: TensorInfo, offset: int, folder: Path) -> Path:
    """Return a safetensors file of one tensor of a remote file: from the cache folder of its content, or fetched."""
    entry = CacheEntry(folder, span.name)
    if entry.checked():
        return entry.whole
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with open(entry.path(".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have fetched it while this one waited.
            if not entry.checked():
                _complete(file, span, offset, entry)
    return entry.whole


@dataclass(frozen=True)
class CacheEntry:
    """The files of one tensor in the cache folder of one remote file."""

    folder: Path
    tensor: str

    @property
    def whole(self) -> Path:
        """The finished file."""
        return self.path(".safetensors")

    def checked(self) -> bool:
        """Whether the finished file is there with the size and hash noted for it."""
        try:
            noted = json.loads(self.path(".json").read_bytes())
            with open(self.whole, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                return bool(size == noted["size_bytes"] and sha256_from(file).hexdigest() == noted["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def path(self, suffix: str) -> Path:
        """A file of the tensor, by its ending."""
        name = quote(self.tensor, safe="")
        if len(name) > _MAX_FILE_NAME:
            name = sha256_of(self.tensor.encode())
        return self.folder / (name + suffix)


def _complete(file: HubFile, span: TensorInfo, offset: int, entry: CacheEntry) -> None:
    prefix = _small_header(span, file.etag)
    total = len(prefix) + span.size_bytes
    with open(entry.path(".partial"), "a+b") as partial:
        done = _resume(partial, prefix, total)
        require_space(entry.folder, total - done)
        partial.seek(0)
        digest = sha256_from(partial)

        def keep(chunk: bytes) -> None:
            partial.write(chunk)
            digest.update(chunk)

        begin = offset - len(prefix)
        with progress_bar(f"{file.label}: {span.name}", done - len(prefix), span.size_bytes) as advance:
            try:
                _transfer(file, begin + done, begin + total, keep, advance)
            finally:
                partial.flush()
        os.fsync(partial.fileno())
    write_file(entry.path(".json"), json.dumps({"sha256": digest.hexdigest(), "size_bytes": total}).encode())
    os.replace(entry.path(".partial"), entry.whole)
    SafetensorsFile(entry.whole)


def _resume(partial: BinaryIO, prefix: bytes, total: int) -> int:
    """Return how many bytes of the small file are there already, after making sure that it is this one."""
    done = partial.seek(0, os.SEEK_END)
    partial.seek(0)
    if len(prefix) <= done <= total and partial.read(len(prefix)) == prefix:
        return done
    partial.truncate(0)
    partial.write(prefix)
    partial.flush()
    return len(prefix)


def _transfer(
    file: HubFile, start: int, end: int, keep: Callable[[bytes], None], advance: Callable[[int], object]
) -> None:
    """Bring bytes [start, end) to `keep`, in order."""
    at = start
    try:
        with file.stream(start, end) as chunks:
            for chunk in chunks:
                if at + len(chunk) > end:
                    raise SourceError.at(
                        file.label,
                        f"the server sent more than bytes {at:,} to {end:,} that were asked for.\n"
                        "It does not serve ranges correctly: fetch the whole repository with `hf download` "
                        "and give its folder.",
                        expected=end - start,
                    )
                keep(chunk)
                advance(len(chunk))
                at += len(chunk)
    except UnreachableError as error:
        raise SourceError.at(
            file.label,
            f"{error.trouble.headline}; {at - start:,} of {end - start:,} bytes came.\n"
            f"What has come is kept: the same command goes on from there. {error.trouble.advice}".rstrip(),
            **error.facts,
        ) from error


def _fetch_bytes(file: HubFile, start: int, end: int) -> bytes:
    raw = bytearray()
    _transfer(file, start, end, raw.extend, lambda count: None)
    return bytes(raw)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Say what to do about errors of the cache's disk."""
    advice = "Free some space, or set HF_HOME to a folder on another disk; what has come so far is kept."
    try:
        yield
    except OutputError as error:
        headline = str(error).partition("\n")[0]
        raise SourceError(f"{headline}\n{advice}", **{**error.facts, "path": str(folder)}) from error
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
        raise SourceError.at(folder, f"the cache cannot be written: {reason}.\n{advice}") from error
