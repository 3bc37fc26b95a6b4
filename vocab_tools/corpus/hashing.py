"""The files of a corpus while it is counted: their hashes for the provenance, and that they stay as they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import CorpusError
from .find import CorpusFile


def check_unchanged(files: Sequence[CorpusFile]) -> None:
    """Check that no file changed since it was listed.

    Raises:
        CorpusError: one did.
    """
    for file in files:
        try:
            state = os.stat(file.path)
        except OSError as error:
            raise CorpusError(f"{file.path}: disappeared while it was being counted: {error.strerror}.") from error
        if (state.st_size, state.st_mtime_ns) != (file.size, file.modified_ns):
            raise CorpusError.at(
                file.path,
                "changed while it was being counted. Start again when nothing writes to it any more.",
                changed=True,
            )


class FileHasher:
    """SHA-256 of the files, computed in a thread while they are counted.

    Of a plain text file only the part that was counted is hashed; a compressed file or a table is hashed whole.
    """

    def __init__(self, files: Sequence[CorpusFile]) -> None:
        self._files = files
        self._hashes = [hashlib.sha256() for _ in files]
        self._done = [0] * len(files)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="corpus-hash")
        self._orders: list[Future[None]] = []

    def reached(self, shard: int, position: int) -> None:
        """Say how far a file was counted; -1 stands for its end."""
        file = self._files[shard]
        whole = position < 0 or file.compressed or file.format == "parquet"
        self._orders.append(self._thread.submit(self._advance, shard, file.size if whole else min(position, file.size)))

    def finish(self) -> list[dict[str, Any]]:
        """Return name, number of bytes and SHA-256 of every file that was read from.

        Raises:
            CorpusError: a file could not be read.
        """
        try:
            for order in self._orders:
                order.result()
        except OSError as error:
            raise CorpusError(f"{error.filename}: cannot be read: {error.strerror}.") from error
        return [
            {"name": file.name, "bytes": done, "sha256": digest.hexdigest()}
            for file, done, digest in zip(self._files, self._done, self._hashes, strict=True)
            if done
        ]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _advance(self, shard: int, stop: int) -> None:
        if stop <= self._done[shard]:
            return
        with Path(self._files[shard].path).open("rb") as data:
            data.seek(self._done[shard])
            while self._done[shard] < stop:
                window = data.read(min(1 << 20, stop - self._done[shard]))
                if not window:
                    return
                self._hashes[shard].update(window)
                self._done[shard] += len(window)
