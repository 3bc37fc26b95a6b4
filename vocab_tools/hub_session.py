"""How every request to the Hub goes: one time limit, one rule for asking again, every wait told before it begins.

`huggingface_hub`, `datasets` and `transformers` share an HTTP session. `be_patient` puts the rule into its `send`,
below the loops of their own, which wait for an hour where a server says so, or without a word:

    no answer      A question (HEAD, or what the API is asked) is given up after HF_HUB_ETAG_TIMEOUT seconds, as nobody
                   is there. Content is waited for HF_HUB_DOWNLOAD_TIMEOUT seconds, and asked for again.
    busy, broken   Asked again after 1, 2, 4, 8 s, or when the server says; five tries, none later than
                   `LIMITS.patience_s` after the first failure, each megabyte anew. A body goes on where it broke.
    a drip         A body of fewer than `LIMITS.min_bytes_per_s`, over half a minute of waiting for it, ends.

What is given up is raised as an error that those loops let pass, and that `trouble_of` looks through.
Transfers by hf_xet are not HTTP requests of this session.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from .hub_errors import (
    BUSY,
    GIVEN_UP,
    TooSlowError,
    broken_off,
    endpoint,
    failures,
    http_library,
    is_given_up,
    transport_errors,
    trouble_of,
)

_TRIES = 5
# This many bytes between two breaks are progress: the tries are counted anew.
_PROGRESS_BYTES = 1 << 20
_WINDOW_S = 30.0
# requests reads until it has so many bytes; httpx hands on what comes.
_READ_BYTES = 1 << 10
_REPOSITORY = re.compile(r"/(?:api/(?:models|datasets|spaces)/|datasets/|spaces/)?(?!api/)([^/]+/[^/]+)")

_asked_last = ""
"""The repository that the Hub was asked about last, for messages."""


@dataclass
class Limits:
    """What is waited for at most.

    Attributes:
        patience_s: seconds from the first failure, or the first since the last megabyte, after which no try begins.
        min_bytes_per_s: bytes a second below which a transfer ends.
    """

    patience_s: float = 60.0
    min_bytes_per_s: float = 1000.0


LIMITS = Limits()
"""The limits of this process; the options --patience and --min-speed of the commands set them."""


class Tries:
    """The failures of one request in a row; messages call what was asked for by `label`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.progress()

    def progress(self) -> None:
        """Count anew: something came."""
        self._number, self._failed_s = 1, 0.0

    def wait_after(self, error: BaseException, is_passing: bool | None = None) -> bool:
        """Wait before the next try, told first, and return True; return False at once where there is none.

        Whether another may succeed is for `trouble_of` to say where `is_passing` is None.
        """
        trouble = trouble_of(error, self._label)
        pause_s = max(trouble.retry_after_s or 0.0, 2.0 ** (self._number - 1))
        # The time spent waiting for an answer, or reading a body before it broke, does not count against the patience.
        self._failed_s = time.monotonic() if self._number == 1 else self._failed_s
        is_late = time.monotonic() - self._failed_s + pause_s > LIMITS.patience_s
        if not (trouble.is_passing if is_passing is None else is_passing) or self._number == _TRIES or is_late:
            return False
        self._number += 1
        which = f"(try {self._number} of {_TRIES})"
        print(f"{trouble.headline}; trying again in {pause_s:.0f} s {which}", file=sys.stderr)
        time.sleep(pause_s)
        return True


def be_patient() -> None:
    """Let the session that huggingface_hub has now keep the rule; to be called before anything is asked."""
    from huggingface_hub import get_session

    session: Any = get_session()
    if getattr(session.send, "func", None) is not _send:
        session.send = partial(_send, session.send)


def list_folder(repo_id: str, folder: str, revision: str | None = None) -> list[str]:
    """Names of the files in a folder of a model repository, folder included; none where there is no such folder.

    Raises one of `transfer_errors` where the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    be_patient()
    try:
        return [entry.path for entry in HfApi().list_repo_tree(repo_id, folder, revision=revision)]
    except EntryNotFoundError:
        return []


class _Request:
    """A request that is sent until it is answered.

    ``send`` is the session's own function, of httpx since huggingface_hub 1.0, of requests before; ``is_streamed``:
    the caller reads the body.
    """

    def __init__(self, send: Callable[..., Any], request: Any, options: dict[str, Any], is_streamed: bool) -> None:
        self._request, self.is_streamed = request, is_streamed
        self._range = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "bytes=0-")
        self._is_content = request.method == "GET" and (is_streamed or "Range" in request.headers)
        limited = self._limit_silence(options.pop("timeout", None))
        self._send = partial(send, request, stream=True, **options, **limited)
        self.tries = Tries(_label(str(request.url)))

    def answer(self) -> Any:
        """The response; read, unless the caller reads it."""
        while True:
            response = None
            try:
                response = self._send()
                body = _Body(self, response)
                _refuse_busy(response)
                if not self.is_streamed:
                    body.read_all()
                return response
            except failures() as error:
                if response is not None:
                    response.close()
                self.wait_after(error)

    def can_go_on(self, response: Any) -> bool:
        """Whether the rest of the body can be asked for, should it break."""
        is_plain = response.status_code in (200, 206) and "Content-Encoding" not in response.headers
        return is_plain and self._range is not None and self._request.method == "GET"

    def rest(self, response: Any, done: int, broken: Exception) -> Any:
        """What is missing of a response after `done` bytes."""
        assert self._range is not None
        start = int(self._range.group(1)) + done
        self._request.headers["Range"] = f"bytes={start}-{self._range.group(2)}"
        found = self._send()
        _refuse_busy(found)
        is_the_same = found.headers.get("ETag") == response.headers.get("ETag")
        if not (is_the_same and found.headers.get("Content-Range", "").startswith(f"bytes {start}-")):
            found.close()
            raise self.given_up(broken) from broken
        return found

    def wait_after(self, error: Exception) -> None:
        """Wait for the next try, or raise that it is given up."""
        if is_given_up(error):
            raise error
        # A body that was read from a file as it was sent cannot be sent again from here; and what the libraries ask of
        # other servers, as to count downloads, is not worth a wait.
        body = getattr(self._request, "body", None) or getattr(self._request, "stream", None)
        can_repeat = body is None or isinstance(body, bytes | str) or type(body).__name__ == "ByteStream"
        can_repeat = can_repeat and (self._is_content or _is_the_hub(str(self._request.url)))
        is_silence = self._is_content and type(error).__name__ == "ReadTimeout"
        if not (can_repeat and self.tries.wait_after(error, is_silence or None)):
            raise self.given_up(error) from error

    def given_up(self, error: Exception) -> Exception:
        """The error to raise; the libraries' own loops do not retry it."""
        from huggingface_hub.errors import HfHubHTTPError

        answer: Any = SimpleNamespace(status_code=GIVEN_UP, headers={}, request=self._request)
        failure = HfHubHTTPError(str(error), response=answer)
        # `datasets` raises it anew, from None.
        failure.given_up = error  # type: ignore[attr-defined]
        return failure

    def _limit_silence(self, given_s: object) -> dict[str, float]:
        """Set the time limit of a request of httpx, or return that of requests, which is an option of `send`."""
        from huggingface_hub import constants

        limit_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT if self._is_content else constants.HF_HUB_ETAG_TIMEOUT)
        # The Hub works on a large commit before it answers.
        if self._request.method == "PUT" or "/commit/" in str(self._request.url):
            limit_s = LIMITS.patience_s
        if not hasattr(self._request, "extensions"):
            return {"timeout": min(given_s, limit_s) if isinstance(given_s, int | float) else limit_s}
        given = self._request.extensions.get("timeout", {})
        limited = {phase: min(limit_s, given.get(phase) or limit_s) for phase in ("connect", "read", "write", "pool")}
        self._request.extensions = {**self._request.extensions, "timeout": limited}
        return {}


class _Body:
    """The body of a response, in place of its stream (httpx) or `iter_content` (requests).

    It goes on where it broke, and ends where it drips.
    """

    def __init__(self, request: _Request, response: Any) -> None:
        self._request, self._response, self._current = request, response, response
        self._is_httpx = hasattr(response, "iter_raw")
        self._own = self._chunks_of(response)
        if self._is_httpx:
            base = http_library().SyncByteStream
            stream = type("Body", (base,), {"__iter__": lambda _: self._chunks(), "close": lambda _: self._close()})
            response.stream = stream()
        else:
            response.iter_content = lambda *_, **__: self._chunks()

    def read_all(self) -> None:
        """Read it into the response."""
        if self._is_httpx:
            self._response.read()
        else:
            assert self._response.content is not None

    def _chunks(self) -> Iterator[bytes]:
        may_go_on = self._request.can_go_on(self._response)
        size_bytes = int(self._response.headers.get("Content-Length", 0)) if may_go_on else 0
        done, mark, broken = 0, 0, None
        while True:
            try:
                if broken is not None:
                    self._current = self._request.rest(self._response, done, broken)
                    self._own = self._chunks_of(self._current)
                for chunk in _fast_enough(self._own):
                    done += len(chunk)
                    yield chunk
                if done < size_bytes:
                    raise broken_off(f"the connection closed {size_bytes - done:,} bytes early")
                return
            except failures() as error:
                self._close()
                if not may_go_on:
                    # What was to be read at once is asked for again as a whole.
                    raise self._request.given_up(error) if self._request.is_streamed else error from error
                if done - mark >= _PROGRESS_BYTES:
                    self._request.tries.progress()
                mark, broken = done, error
                self._request.wait_after(error)

    def _chunks_of(self, response: Any) -> Any:
        return response.stream if self._is_httpx else response.iter_content(_READ_BYTES)

    def _close(self) -> None:
        with contextlib.suppress(*transport_errors()):
            (self._own if self._is_httpx else self._current).close()


def _send(send: Callable[..., Any], request: Any, stream: bool = False, **options: Any) -> Any:
    """`send` of a session under the rule."""
    return _Request(send, request, options, stream).answer()


def _refuse_busy(response: Any) -> None:
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # public, not in __all__

    if response.status_code in BUSY:
        hf_raise_for_status(response)


def _fast_enough(chunks: Any) -> Iterator[bytes]:
    waited_s, came = 0.0, 0
    source = iter(chunks)
    while True:
        # Time that the reader spends between two chunks is not the network's.
        began_s = time.monotonic()
        chunk = next(source, None)
        waited_s += time.monotonic() - began_s
        if chunk is None:
            return
        came += len(chunk)
        if waited_s >= _WINDOW_S:
            if came < LIMITS.min_bytes_per_s * waited_s:
                raise TooSlowError(came / waited_s, LIMITS.min_bytes_per_s)
            waited_s, came = 0.0, 0
        yield chunk


def _label(url: str) -> str:
    """What a message calls the address: its repository, or its server."""
    global _asked_last
    parts = urlsplit(url)
    found = _REPOSITORY.match(unquote(parts.path)) if _is_the_hub(url) else None
    if found:
        _asked_last = found.group(1)
    # The Hub sends those who ask for a large file to other servers.
    return _asked_last or parts.netloc


def _is_the_hub(url: str) -> bool:
    return urlsplit(url).netloc == urlsplit(endpoint()).netloc
