"""A small Hugging Face Hub on loopback: enough of the API for `huggingface_hub` and `datasets` to work unchanged.

Large files (`.safetensors`, `.bin`, `.parquet`) are redirected, as on the Hub, to a second origin without
authentication (`hub.cdn`); a token that arrives there is noted in `hub.leaked_tokens`. Repositories can be gated.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit

Content = bytes | str | Path
Files = Mapping[str, Content]

_LFS_SUFFIXES = (".safetensors", ".bin", ".parquet", ".pt")


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Repo:
    id: str
    kind: str
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        listing = [self.id, len(self.commits), sorted((name, digest_of(content)) for name, content in files.items())]
        oid = hashlib.sha1(json.dumps(listing).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Fault:
    """A fault, as long as it is injected: with the content of a file, or with any request for a path."""

    times: int | None = None  # None for always
    # With the content of a file:
    break_after: int | None = None  # the connection closes after so many bytes of the body
    ignore_range: bool = False  # the whole file comes with status 200
    extra_bytes: int = 0  # so many come after the range that was asked for, and Content-Length counts them
    etag: str | None = None  # other bytes come, under this ETag
    commit: str | None = None  # they are said to be of this commit
    shift: int = 0  # the range begins so many bytes further on, and Content-Range says so
    as_whole: bool = False  # the range comes with status 200, as if it were all of the file
    total: int | None = None  # of the file, as Content-Range names it
    without: tuple[str, ...] = ()  # headers that answers about a file lack
    # With any request for a path that ends so, HEAD and API included:
    unanswered: bool = False  # the connection closes without an answer
    silent: bool = False  # the connection stays open without an answer, until the server closes
    answer: Any = None  # these bytes, or this value as JSON, with status 200
    status: int | None = None  # this status and no content

    @property
    def is_early(self) -> bool:
        """Whether it comes before it is known which file is asked for."""
        return any((self.unanswered, self.silent, self.answer is not None, self.status))


@dataclass
class Request:
    """One request, with the bytes of the body of its answer."""

    body_bytes: int
    file: str | None
    token: str | None


class HubServer:
    """A Hub; a context manager that serves while it is open.

    Attributes:
        endpoint: address of the Hub, for HF_ENDPOINT.
        cdn: address of the second origin, from which large files come.
        tokens: token -> whether it may read what is gated.
        requests: every request answered so far.
        leaked_tokens: tokens that were sent to `cdn`.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens = {"hf_good": True, "hf_other": False}
        self.requests: list[Request] = []
        self.leaked_tokens: list[str] = []
        self.faults: list[tuple[str, Fault]] = []
        self.closing = threading.Event()
        self._hub = _Server(self)
        self._cdn = _Server(self)
        self.endpoint = self._hub.address
        self.cdn = self._cdn.address

    def __enter__(self) -> "HubServer":
        for server in (self._hub, self._cdn):
            server.thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            server.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.close_connections()
            server.server_close()

    def _add(self, kind: str, repo_id: str, files: Files, gated: bool = False, branch: str = "main") -> str:
        """Add a repository, or a commit to it; returns the commit."""
        repo = self.repos.setdefault((kind, repo_id), Repo(repo_id, kind, gated))
        read = {name: content.read_bytes() if isinstance(content, Path) else content for name, content in files.items()}
        return repo.commit(
            {name: data.encode() if isinstance(data, str) else data for name, data in read.items()}, branch
        )

    add_model, add_dataset = partialmethod(_add, "model"), partialmethod(_add, "dataset")

    def inject(self, name: str, fault: Fault) -> None:
        """Let requests for the content of files whose path ends in `name` go wrong."""
        self.faults.append((name, fault))

    def bytes_sent(self, suffix: str = "") -> int:
        """Bytes of bodies sent so far; only of files whose name ends in `suffix`, where one is given."""
        return sum(r.body_bytes for r in list(self.requests) if not suffix or (r.file or "").endswith(suffix))

    def fault_for(self, name: str, is_early: bool = False) -> Fault | None:
        matching = (fault for suffix, fault in self.faults if name.endswith(suffix) and fault.is_early is is_early)
        found = next((fault for fault in matching if fault.times != 0), None)
        if found is not None and found.times is not None:
            found.times -= 1
        return found

    def headers_without(self, name: str) -> tuple[str, ...]:
        return next((fault.without for suffix, fault in self.faults if name.endswith(suffix)), ())


class _Server(ThreadingHTTPServer):
    # Closing waits for the handlers, so that no socket outlives its test.
    daemon_threads = False
    thread: threading.Thread

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def close_connections(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that clients break off; tests do that on purpose."""


class _BrokenOffError(Exception):
    """The connection has been cut on purpose."""


class _RefusedError(Exception):
    """A refusal: status, error code of the Hub, message."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without it, small answers wait for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET  # noqa: N815

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.file: str | None = None
        authorization = self.headers.get("Authorization", "")
        self.token = authorization.removeprefix("Bearer ") or None
        path = unquote(url.path)
        try:
            early = self.hub.fault_for(path, is_early=True) or Fault()
            if early.unanswered:
                self._break_off()
            if early.silent:
                self._count()
                self.hub.closing.wait()
                raise _BrokenOffError
            if early.answer is not None:
                self.send(200, early.answer)
            elif early.status is not None:
                self.send(early.status, {"error": "as asked for"})
            else:
                self._route(path)
        except _RefusedError as refused:
            status, code, message = refused.args
            self.send(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})
        except (_BrokenOffError, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, path: str) -> None:
        for pattern, method in _ROUTES:
            is_here = method is not _Handler.stored or self.server is self.hub._cdn
            if is_here and (match := pattern.fullmatch(path)):
                method(self, **match.groupdict())
                return
        self.send(404, {"error": "Not Found"})

    def send(self, status, value=None, headers=None, break_after=None):
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if not isinstance(value, bytes):
            self.send_header("Content-Type", "application/json")
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        request = self._count()
        self.end_headers()
        if self.command != "HEAD":
            # Before it is sent, so that a client that has it finds it counted.
            request.body_bytes += len(body[:break_after])
            self.wfile.write(body[:break_after])
            if break_after is not None:
                self._break_off()

    def _break_off(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        raise _BrokenOffError

    def _count(self) -> Request:
        request = Request(0, self.file, self.token)
        self.hub.requests.append(request)
        return request

    def _tree(self, kind: str, repo_id: str, revision: str, content: bool) -> tuple[Repo, str]:
        """Return a repository and a commit of it, or refuse as the Hub does."""
        if self.token is not None and self.token not in self.hub.tokens:
            raise _RefusedError(401, "", "Invalid credentials in Authorization header")
        repo = self.hub.repos.get((kind, repo_id))
        if repo is None:
            raise _RefusedError(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if repo.gated and content and not self.hub.tokens.get(self.token or "", False):
            raise _RefusedError(403 if self.token else 401, "GatedRepo", f"Access to model {repo_id} is restricted.")
        oid = repo.find(revision)
        if oid is None:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, oid

    def info(self, kind: str, repo: str, revision: str | None = None) -> None:
        entry, oid = self._tree(kind, repo, revision or "main", content=False)
        siblings = [{"rfilename": name} for name in sorted(entry.commits[oid])]
        self.send(200, {"id": repo, "sha": oid, "tags": [], "downloads": 0, "siblings": siblings})

    def tree(self, kind: str, repo: str, revision: str, path: str | None = None) -> None:
        entry, oid = self._tree(kind, repo, revision, content=False)
        files = entry.commits[oid]
        prefix = f"{path.strip('/')}/" if path and path.strip("/") else ""
        inside = {name: content for name, content in files.items() if name.startswith(prefix)}
        if prefix and not inside:
            raise _RefusedError(404, "EntryNotFound", f"{path} does not exist")
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        folders = {str(folder) for name in inside for folder in PurePosixPath(name).parents} - {"."}
        entries: Any = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in sorted(folders)]
        for name, content in sorted(inside.items()):
            entries.append({"type": "file", "path": name, "size": len(content), "oid": digest_of(content)})
        here = [entry for entry in entries if entry["path"].startswith(prefix)]
        self.send(200, [entry for entry in here if recursive or "/" not in entry["path"][len(prefix) :]])

    def resolve(self, repo: str, revision: str, name: str, kinds: str | None = None) -> None:
        kind = (kinds or "models/")[:-2]
        entry, oid = self._tree(kind, repo, revision, content=True)
        content = entry.commits[oid].get(name)
        if content is None:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        etag = f'"{digest_of(content)}"'
        for header in self.hub.headers_without(name):
            headers.pop(header, None)
            etag = "" if header == "ETag" else etag
        if not name.endswith(_LFS_SUFFIXES):
            self.content(name, content, headers | ({"ETag": etag} if etag else {}))
            return
        target = f"{self.hub.cdn}/stored/{entry.kind}/{entry.id}/{oid}/{quote(name)}?signature=for-this-file-only"
        headers |= {"X-Linked-ETag": etag, "X-Linked-Size": str(len(content)), "Location": target}
        self.send(302, None, headers)

    def stored(self, kind: str, repo: str, oid: str, name: str) -> None:
        if self.token is not None:
            self.hub.leaked_tokens.append(self.token)
        content = self.hub.repos[kind, repo].commits[oid][name]
        self.content(name, content, {"ETag": f'"{digest_of(content)}"', "Accept-Ranges": "bytes"})

    def content(self, name: str, content: bytes, headers: dict[str, str]) -> None:
        self.file = name
        fault = (self.hub.fault_for(name) if self.command == "GET" else None) or Fault()
        start, end, status = 0, len(content), 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and not fault.ignore_range:
            start, status = int(asked[1]), 206
            end = min(len(content), int(asked[2]) + 1) if asked[2] else len(content)
            start, end = start + fault.shift, end + fault.shift
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{fault.total or len(content)}"
        if fault.etag is not None:
            content, headers["ETag"] = content[::-1], f'"{fault.etag}"'
        if fault.commit is not None:
            headers["X-Repo-Commit"] = fault.commit
        if fault.as_whole:
            status = 200
            del headers["Content-Range"]
        body = content[start:end] + b"\0" * fault.extra_bytes
        self.send(status, body, headers, fault.break_after)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_API = r"/api/(?P<kind>model|dataset)s/" + _REPO
_ROUTES = [
    (re.compile(pattern), method)
    for pattern, method in (
        (r"/stored/(?P<kind>[a-z]+)/" + _REPO + r"/(?P<oid>[0-9a-f]{40})/(?P<name>.+)", _Handler.stored),
        (_API, _Handler.info),
        (_API + r"/revision/(?P<revision>[^/]+(?:/[^/]+)*)", _Handler.info),
        (_API + r"/tree/(?P<revision>[^/]+)(?P<path>/.*)?", _Handler.tree),
        (r"/(?P<kinds>datasets/)?" + _REPO + r"/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
    )
]


@contextlib.contextmanager
def connected(hub: HubServer, home: Path | str, token: str | None = None, offline: bool = False) -> Iterator[None]:
    """Let `huggingface_hub`, and `datasets` if it is imported, talk to `hub` in this process, with caches under `home`.

    They read the environment when they are imported, so their constants are replaced, and restored afterwards.
    """
    import transformers.utils.hub as transformers_hub
    from huggingface_hub import close_session, constants

    home = Path(home)
    folders = {"HF_HOME": "", "HF_HUB_CACHE": "hub", "HF_ASSETS_CACHE": "assets", "HF_XET_CACHE": "xet"}
    folders |= {"HF_TOKEN_PATH": "token", "HF_STORED_TOKENS_PATH": "stored_tokens"}
    values: dict[str, Any] = {key: str(home / name) for key, name in folders.items()}
    values |= {"HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_TELEMETRY": True, "HF_HUB_OFFLINE": offline}
    values["ENDPOINT"] = hub.endpoint
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    replaced: list[tuple[Any, dict[str, Any]]] = [(constants, values)]
    if hasattr(transformers_hub, "_hf_api"):
        # Since 5.10 transformers keeps one client for the process, with the endpoint it was made for.
        replaced.append((transformers_hub, {"_hf_api": None}))
    if settings := sys.modules.get("datasets.config"):
        more = {"HF_ENDPOINT": hub.endpoint, "HF_DATASETS_CACHE": home / "datasets", "HF_HUB_OFFLINE": offline}
        replaced.append((settings, more))
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    with contextlib.ExitStack() as stack:
        for module, new in replaced:
            stack.enter_context(mock.patch.multiple(module, **new))
        stack.enter_context(mock.patch.dict(os.environ, kept | ({"HF_TOKEN": token} if token else {}), clear=True))
        stack.callback(close_session)
        close_session()
        yield
