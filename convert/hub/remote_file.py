"""A file of a repository read by byte ranges, through the library's own session and headers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eagle_slim.vocab_tools.hub_errors import endpoint, failures, not_the_hub, trouble_of
from eagle_slim.vocab_tools.hub_session import be_patient

from ..errors import SourceError
from .client import LIBRARY_NAME, ask, source_error


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at one commit; the transport of `range_reads`."""

    label: str
    size_bytes: int
    etag: str
    url: str
    repo_id: str
    commit: str

    @classmethod
    def open(cls, repo_id: str, commit: str, name: str, label: str) -> HubFile:
        """Ask for size and etag of file `name`.

        Raises:
            SourceError: it cannot be had, or whoever answers is not a Hub.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(repo_id, name, revision=commit)
        metadata = ask(lambda: get_hf_file_metadata(url, library_name=LIBRARY_NAME), repo_id, commit)
        if metadata.size is None or metadata.etag is None:
            raise SourceError(
                f"{label}: the server at {endpoint()} names no size and etag, so it is not a Hub.\n"
                "Check HF_ENDPOINT and the proxy."
            )
        return cls(label, metadata.size, metadata.etag, url, repo_id, commit)

    @contextmanager
    def stream(self, start: int, end: int) -> Iterator[Iterator[bytes]]:
        """Open bytes [start, end) of the file.

        Raises:
            UnreachableError: on opening or while iterating; nothing came, or no more.
            SourceError: the server refuses, or ignores ranges.
        """
        from huggingface_hub import constants

        # Both are documented as public, though the module has no __all__.
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        headers = {
            **build_hf_headers(library_name=LIBRARY_NAME),
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        be_patient()
        try:
            with _open_stream(self.url, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT) as (response, chunks):
                hf_raise_for_status(response)
                self._check_range(response, start, end)
                yield chunks
        except failures() as error:
            raise source_error(trouble_of(error, self.repo_id, self.commit)) from error

    def _check_range(self, response: Any, start: int, end: int) -> None:
        expected = f"bytes {start}-{end - 1}/{self.size_bytes}"
        found = response.headers.get("Content-Range")
        whole = response.status_code == 200 and start == 0 and end == self.size_bytes
        if whole or (response.status_code == 206 and found == expected):
            return
        if "html" in response.headers.get("Content-Type", ""):
            raise source_error(not_the_hub(self.repo_id, "an HTML page"))
        raise SourceError(
            f"{self.label}: the server does not serve byte ranges: asked for {expected}, it answered "
            f"{response.status_code} with {found or 'no range'}.\n"
            f"Fetch the repository whole (`hf download {self.repo_id}`) and give its folder with --target.",
            status=response.status_code,
        )


@contextmanager
def progress_bar(label: str, done_bytes: int, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, in the library's style, so that its switches (HF_HUB_DISABLE_PROGRESS_BARS) hold."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # public, not in __all__

    bar = tqdm(  # type: ignore[no-untyped-call]
        desc=label[-60:],
        total=total_bytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None,
    )
    with bar:
        yield bar.update


@contextmanager
def _open_stream(url: str, headers: dict[str, str], timeout_s: float) -> Iterator[tuple[Any, Any]]:
    """Open a streamed GET on the library's session: httpx since huggingface_hub 1.0, requests before."""
    from huggingface_hub import get_session

    session: Any = get_session()
    # A requests session has an attribute of this name too, a switch.
    if callable(session.stream):
        with session.stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
            yield response, response.iter_raw()
    else:
        with session.get(url, headers=headers, timeout=timeout_s, stream=True) as response:
            yield response, response.iter_content()
