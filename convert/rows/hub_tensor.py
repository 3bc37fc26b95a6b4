"""One tensor of a safetensors file of the Hub, fetched by byte ranges and kept as a small safetensors file.

Only the header of the file and the bytes of the tensor travel, in pieces that are kept as they come, so that a run that
was stopped goes on where it was. The cache, `HF_HOME/assets/eagle-slim/tensors/REPO`, holds for each commit:

    COMMIT.safetensors    the whole, with the SHA-256 of what came, which is checked whenever it is used
    COMMIT.partial        its first bytes, header included, until all have come
    COMMIT.lock           held with flock(2) while a process fetches

Each answer is held against the range that was asked for, and against the first one's ETag, commit and size; one that
does not agree is asked for once more, then refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eagle_slim.vocab_tools.hub import LIBRARY_NAME, explained

from ..errors import CheckpointError, SourceError
from .files import Bytes, SafetensorsFile, TensorInfo, damaged, header_bytes

PIECE_BYTES = 16 << 20
# In the place of the SHA-256 until all bytes have come.
_NO_DIGEST = "0" * 64
# Most headers fit, so that one request does; a Llama shard has 10 to 30 kB.
_FIRST_BYTES = 64 << 10


@dataclass
class HubFile:
    """A file at one commit; `etag` as the Hub first named it, `content_etag` as the server of its bytes ("" before)."""

    label: str
    repo_id: str
    commit: str
    url: str
    size_bytes: int
    etag: str
    content_etag: str = ""

    @classmethod
    def open(cls, repo_id: str, commit: str, name: str, label: str) -> HubFile:
        """Ask for size and ETag of file `name`; SourceError where they cannot be had, or are of another commit."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(repo_id, name, revision=commit)
        with explained(repo_id, commit):
            metadata = get_hf_file_metadata(url, library_name=LIBRARY_NAME, retry_on_errors=True)
            size, etag = metadata.size, metadata.etag
            if size is None or not etag:
                raise ValueError(f"the answer about {name} names no {'size' if size is None else 'ETag'}")
            if metadata.commit_hash not in (None, commit):
                raise ValueError(f"the answer about {name} is of commit {metadata.commit_hash}, not of {commit}")
        return cls(label, repo_id, commit, url, size, etag)

    def read(self, start: int, end: int) -> bytes:
        """Fetch bytes [start, end) in one request; SourceError where they cannot be had, or others came twice."""
        for _ in range(2):
            response = self._ask(start, end)
            if (problem := self._disagreement(response, start, end)) is None:
                self.content_etag = self.content_etag or _etag(response.headers, "ETag")
                return bytes(response.content)
        advice = f"Fetch the repository whole (`hf download {self.repo_id}`) and give its folder with --target."
        raise SourceError.at(self.label, f"asked twice for bytes {start:,} to {end - 1:,}: {problem}.\n{advice}")

    def _ask(self, start: int, end: int) -> Any:
        # Public, not in __all__.
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

        asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        headers = {**build_hf_headers(library_name=LIBRARY_NAME), **asked}
        with explained(self.repo_id):
            response = http_backoff("GET", self.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            hf_raise_for_status(response)
        return response

    def _disagreement(self, response: Any, start: int, end: int) -> str | None:
        """Tell how an answer, redirects included, differs from the range that was asked for, or from the first one."""
        headers = [each.headers for each in (*response.history, response)]
        expected, found = f"bytes {start}-{end - 1}/{self.size_bytes}", f"status {response.status_code}"
        if response.status_code == 206:
            found = response.headers.get("Content-Range", "none")
        elif response.status_code == 200 and (start, end) == (0, self.size_bytes):
            found = expected
        checks = [("range", expected, found), ("number of bytes", end - start, len(response.content))]
        checks += [("commit", self.commit, each["X-Repo-Commit"]) for each in headers if "X-Repo-Commit" in each]
        checks += [("ETag", self.etag, _etag(each, "X-Linked-ETag")) for each in headers if "X-Linked-ETag" in each]
        etag = _etag(response.headers, "ETag")
        # Without a redirect the Hub itself sends the bytes, and names the file.
        first = self.content_etag or (etag if response.history or "X-Linked-ETag" in headers[0] else self.etag)
        checks.append(("ETag of the bytes", first, etag))
        wrong = [f"expected {what} {right}, found {other}" for what, right, other in checks if other != right]
        return wrong[0] if wrong else None

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


def _etag(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "").removeprefix("W/").strip('"')


def cached_tensor(repo_id: str, commit: str) -> Path:
    """Return where the tensor of a commit is kept, or would be: in huggingface_hub's cache of derived files."""
    from huggingface_hub import cached_assets_path, constants

    name = repo_id.replace("/", "--")
    folder = cached_assets_path(LIBRARY_NAME, "tensors", name, assets_dir=constants.HF_ASSETS_CACHE)
    return folder / f"{commit}.safetensors"


def kept_tensor(whole: Path) -> SafetensorsFile:
    """Open a tensor that was fetched; CheckpointError where none was, or these are not the bytes that came."""
    file = SafetensorsFile(whole)
    for info in file.tensors.values():
        if len(file.tensors) == 1 and _digest(info, file.array(info.name)) == file.metadata.get("sha256"):
            return file
    raise damaged(whole, "it holds other bytes than were fetched")


def _digest(info: TensorInfo, data: Bytes) -> str:
    digest = hashlib.sha256(header_bytes([info], {}))
    digest.update(data.reshape(-1).data)
    return digest.hexdigest()


def fetch_tensor(file: HubFile, header: SafetensorsFile, tensor: str, whole: Path) -> None:
    """Fetch a tensor of a remote file to the path `whole`, if it is not there."""
    with explained(file.repo_id):
        whole.parent.mkdir(parents=True, exist_ok=True)
        with whole.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(CheckpointError):
                kept_tensor(whole)
                return
            info, path = header.tensors[tensor], whole.with_suffix(".partial")
            # What came of another content begins otherwise, and is begun anew.
            prefix = header_bytes([info], {"etag": f"{file.etag} {file.content_etag}", "sha256": _NO_DIGEST})
            with path.open("a+b") as partial:
                _complete(file, info, header.offset(tensor), prefix, partial)
            with path.open("r+b") as partial:
                partial.seek(prefix.index(_NO_DIGEST.encode()))
                partial.write(_digest(info, SafetensorsFile(path).array(tensor)).encode())
                partial.flush()
                os.fsync(partial.fileno())
            os.replace(path, whole)


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
