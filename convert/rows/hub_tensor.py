"""One tensor of a safetensors file of the Hub, fetched by byte ranges and kept as a small safetensors file.

Only the header of the file and the bytes of the tensor travel, in pieces that are kept as they come, so that a run that
was stopped goes on where it was. The cache, `HF_HOME/assets/eagle-slim/tensors/REPO`, holds for each commit:

    COMMIT.safetensors    the whole
    COMMIT.partial        its first bytes, header included, until all have come
    COMMIT.lock           held with flock(2) while a process fetches
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from eagle_slim.vocab_tools.hub import LIBRARY_NAME, explained

from ..errors import CheckpointError, SourceError
from .files import SafetensorsFile, TensorInfo, damaged, header_bytes

PIECE_BYTES = 16 << 20
# Most headers fit, so that one request does; a Llama shard has 10 to 30 kB.
_FIRST_BYTES = 64 << 10


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at one commit."""

    label: str
    repo_id: str
    url: str
    size_bytes: int

    @classmethod
    def open(cls, repo_id: str, commit: str, name: str, label: str) -> HubFile:
        """Ask for the size of file `name`; SourceError where it cannot be had."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(repo_id, name, revision=commit)
        with explained(repo_id, commit):
            metadata = get_hf_file_metadata(url, library_name=LIBRARY_NAME)
            if metadata.size is None:
                raise ValueError("the answer about a file names no size")
        return cls(label, repo_id, url, metadata.size)

    def read(self, start: int, end: int) -> bytes:
        """Fetch bytes [start, end) in one request, which huggingface_hub repeats where it fails.

        Raises SourceError where they cannot be had, or something else came.
        """
        # Public, not in __all__.
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

        asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        headers = {**build_hf_headers(library_name=LIBRARY_NAME), **asked}
        with explained(self.repo_id):
            response = http_backoff("GET", self.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            hf_raise_for_status(response)
        if len(response.content) != end - start:
            problem = f"asked for {end - start:,} bytes of it, the server sent {len(response.content):,}"
            advice = f"Fetch the repository whole (`hf download {self.repo_id}`) and give its folder with --target."
            raise SourceError.at(self.label, f"{problem}.\n{advice}")
        return bytes(response.content)

    def read_header(self) -> SafetensorsFile:
        """Fetch the header and let `safetensors` check it at the start of an otherwise empty file of the full size."""
        first = self.read(0, min(_FIRST_BYTES, self.size_bytes))
        end = 8 + int.from_bytes(first[:8], "little")
        if end > self.size_bytes:
            raise damaged(self.label, f"not a safetensors file: its header would end at byte {end:,}")
        with tempfile.NamedTemporaryFile() as empty:
            empty.write(first[:end] if end <= len(first) else first + self.read(len(first), end))
            empty.truncate(self.size_bytes)
            empty.flush()
            return SafetensorsFile(Path(empty.name), self.label)


def cached_tensor(repo_id: str, commit: str) -> Path:
    """Return where the tensor of a commit is kept, or would be: in huggingface_hub's cache of derived files."""
    from huggingface_hub import cached_assets_path, constants

    name = repo_id.replace("/", "--")
    folder = cached_assets_path(LIBRARY_NAME, "tensors", name, assets_dir=constants.HF_ASSETS_CACHE)
    return folder / f"{commit}.safetensors"


def fetch_tensor(file: HubFile, header: SafetensorsFile, tensor: str, whole: Path) -> None:
    """Fetch a tensor of a remote file to the path `whole`, if it is not there."""
    with explained(file.repo_id):
        whole.parent.mkdir(parents=True, exist_ok=True)
        with whole.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(CheckpointError):
                SafetensorsFile(whole)
                return
            info = header.tensors[tensor]
            with whole.with_suffix(".partial").open("a+b") as partial:
                _complete(file, info, header.offset(tensor), header_bytes([info], {}), partial)
            os.replace(partial.name, whole)


def _complete(file: HubFile, info: TensorInfo, offset: int, prefix: bytes, partial: BinaryIO) -> None:
    """Fetch what a small file lacks; begin anew where it does not begin with `prefix`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # public, not in __all__

    total = len(prefix) + info.size_bytes
    done = partial.seek(0, os.SEEK_END)
    partial.seek(0)
    if partial.read(len(prefix)) != prefix:
        partial.truncate(0)
        done = partial.write(prefix)
    # huggingface_hub's own bar, so that its switches turn it off.
    bar = tqdm(desc=info.name, total=total, initial=done, unit="B", unit_scale=True, disable=None)  # type: ignore[no-untyped-call]
    with bar:
        while done < total:
            start = offset + done - len(prefix)
            piece = file.read(start, min(start + PIECE_BYTES, offset + info.size_bytes))
            done += partial.write(piece)
            partial.flush()
            bar.update(len(piece))
    os.fsync(partial.fileno())
