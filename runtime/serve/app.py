"""The HTTP side of `eagle-serve`: endpoints, keys, errors, and answers whole or as server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
from eagle_slim.vocab_tools.errors import EagleSlimError

from ..errors import brief
from .engine import ServeEngine
from .metrics import Metrics
from .protocol import RefusedError, ServedCall, read_call, refusal_of

if TYPE_CHECKING:
    from ..model import SpeculativeModel

_LOG = logging.getLogger("eagle_slim.serve")
_MAX_BODY_BYTES = 64 << 20
_LONG_BODY_BYTES = 8192
"""From where on a call is read in another thread: HTTP would wait."""


class Service:
    """Endpoints over an engine for the model that ``load`` returns; ``ready`` and ``ended`` as in `ServeEngine`.

    ``names``: of the model; without one, the target's. ``api_keys``: clients must give one of them, if there is any,
    and what one has sent is reused for no other. ``origins``: web pages that may call, from a browser. ``grace_s``:
    seconds that answers have to end, once the server is to.
    """

    def __init__(
        self,
        load: Callable[[], SpeculativeModel],
        ready: Callable[[str], None] = lambda _: None,
        ended: Callable[[], None] = lambda: None,
        *,
        names: Sequence[str] = (),
        api_keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        slots: int = 16,
        max_waiting: int = 256,
        grace_s: float = 30.0,
    ) -> None:
        from prometheus_client import CollectorRegistry

        self._load, self.names, self._keys, self._origins, self._grace_s = load, names, api_keys, origins, grace_s
        self._registry = CollectorRegistry()
        # One: tokenizers of many long prompts at a time would keep the model's thread waiting.
        self._reader = ThreadPoolExecutor(1, "reader")
        self.engine = ServeEngine(self._load_named, ready, ended, slots, max_waiting)

    def _load_named(self) -> SpeculativeModel:
        """Load the model in the engine's thread, and derive what it is called."""
        model = self._load()
        if model.tokenizer is not None:
            # A first text settles whether it cuts and pads, which must not change while another thread encodes.
            model.tokenizer("a")
        opened, rows = model.opened, model.target.exactness
        named = None if opened is None else opened.target_name
        self.names = self.names or [str(named or getattr(model.config, "_name_or_path", "") or model.config.model_type)]
        weights = hashlib.sha256(model.target.embedding[:256].detach().float().cpu().numpy().tobytes()).hexdigest()[:8]
        versions = f"eagle-slim {version('eagle-slim')}, torch {torch.__version__}"
        about = f"{self.names[0]}, weights {weights}: {model}; {rows or 'rows are not exact'}; {versions}"
        if opened is not None and Path(opened.head.location).exists():
            # Clients need not know where it lies.
            about = about.replace(opened.head.location, Path(opened.head.location).name)
        self._shared = {"system_fingerprint": about, "exactness": rows}
        counts = (lambda: len(self.engine.running), lambda: len(self.engine.waiting))
        self.engine.metrics = Metrics(self._registry, self.names[0], *counts)
        return model

    def app(self) -> Any:
        """Return the ASGI application."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.routing import Route

        cors = Middleware(CORSMiddleware, allow_origins=self._origins, allow_methods=["*"], allow_headers=["*"])
        routes = [
            Route("/health", lambda _: _response(b"", 503 if self.engine.model is None else 200)),
            Route("/metrics", lambda _: _response(generate_latest(self._registry), kind=CONTENT_TYPE_LATEST)),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", partial(self._answer, "text"), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answer, "chat"), methods=["POST"]),
        ]
        return Starlette(
            routes=routes,
            middleware=[cors] if self._origins else [],
            exception_handlers=dict.fromkeys((EagleSlimError, HTTPException, ClientDisconnect, Exception), _refuse),
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        self.engine.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(self.engine.close, self._grace_s)
        self._reader.shutdown(wait=False)

    def _open_model(self) -> SpeculativeModel:
        if self.engine.model is None:
            raise RefusedError("The model is not loaded yet.", 503, "loading", **{"Retry-After": "5"})
        return self.engine.model

    def _owner_of(self, request: Any) -> str | None:
        """Return which of several keys a client has given. Raises `RefusedError` without a right one."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        # All are compared, in a time that tells nothing.
        matches = [hmac.compare_digest(given, key.encode()) for key in self._keys]
        if matches and not any(matches):
            raise RefusedError("The API key is not right.", 401, "invalid_api_key")
        return str(matches.index(True)) if len(matches) > 1 else None

    async def _models(self, request: Any) -> Any:
        self._owner_of(request)
        length = self._open_model().max_model_len
        wanted = request.path_params.get("name")
        shared = {"object": "model", "created": 0, "owned_by": "eagle-slim", "max_model_len": length}
        models = [{"id": name, **shared} for name in self.names if wanted in (None, name)]
        if not models:
            raise RefusedError(f"The model {wanted!r} does not exist.", 404, "model_not_found", "model")
        return _response(orjson.dumps({"object": "list", "data": models} if wanted is None else models[0]))

    async def _answer(self, kind: str, request: Any) -> Any:
        began, owner, model = time.perf_counter(), self._owner_of(request), self._open_model()
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise RefusedError(f"The body is longer than {_MAX_BODY_BYTES} bytes.", 413)
        most = self.engine.num_slots + self.engine.max_waiting
        read = partial(read_call, kind, bytes(body), model, self.names, most)
        is_long = len(body) >= _LONG_BODY_BYTES
        call = await asyncio.get_running_loop().run_in_executor(self._reader, read) if is_long else read()
        call.began = began
        call.shared |= self._shared
        for answer in call.answers:
            answer.request.owner = owner
        self.engine.submit(call)
        call.watcher = asyncio.create_task(self._watch(request, call))
        await call.changed.wait()
        call.check()
        if not call.is_streamed:
            return _response(call.whole())
        return _response(_events(call), headers={"cache-control": "no-cache"}, kind="text/event-stream")

    async def _watch(self, request: Any, call: ServedCall) -> None:
        """Cancel a call whose client hangs up."""
        # The body has been read: nothing else comes.
        await request.receive()
        self.engine.cancel(call)


async def _events(call: ServedCall) -> AsyncIterator[bytes]:
    """Yield server-sent events until all answers have ended."""
    is_done = False
    try:
        while not is_done:
            await call.changed.wait()
            call.changed.clear()
            call.check()
            is_done = call.is_done
            if data := call.news():
                yield data
    except RefusedError as error:
        yield b"data: %b\n\n" % error.body()
    yield b"data: [DONE]\n\n"


def _response(body: Any, status: int = 200, headers: Any = None, kind: str = "application/json") -> Any:
    from starlette.responses import Response, StreamingResponse

    return (Response if isinstance(body, bytes) else StreamingResponse)(body, status, headers, kind)


async def _refuse(request: Any, error: Exception) -> Any:
    """Return the response to a call that is refused or has failed."""
    from starlette.requests import ClientDisconnect

    refusal = RefusedError("The client is gone.", 499) if isinstance(error, ClientDisconnect) else refusal_of(error)
    if not refusal.is_logged:
        # Path and field are a client's text.
        path, field = brief(request.url.path), "" if refusal.param is None else brief(refusal.param)
        _LOG.info(f"{path} {refusal.status}: {refusal.code or 'refused'} {field}")
    return _response(refusal.body(), refusal.status, refusal.headers)
