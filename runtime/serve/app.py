"""The HTTP side of `eagle-serve`: endpoints, keys, errors, and answers whole or as server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import orjson
import torch
from eagle_slim.vocab_tools.errors import EagleSlimError

from .calls import RefusedError, ServedCall, refusal_of
from .engine import ServeEngine
from .metrics import Metrics
from .protocol import Asked, Writer, read_asked

if TYPE_CHECKING:
    from ..model import SpeculativeModel

_LOG = logging.getLogger("eagle_slim.serve")
_MAX_BODY_BYTES = 64 << 20
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server; ``names`` of its model: without one, the target's."""

    names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    """Clients must give one of them, if there is any; what one has sent is reused for no other."""
    max_slots: int = 16
    max_waiting: int = 256
    origins: Sequence[str] = ()
    """Web pages that may call, from a browser."""
    grace_s: float = 30.0
    """Seconds that answers have to end, once the server is to."""


class Service:
    """Endpoints over an engine for the model that ``load`` returns.

    ``ready`` and ``ended`` are called on the event loop: once the model can answer, and when it no longer can.
    """

    def __init__(
        self,
        load: Callable[[], SpeculativeModel],
        options: ServeOptions,
        ready: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.options, self.names, self.fingerprint = options, list(options.names), ""
        self._hooks = (ready, ended)
        self.metrics, self._load = Metrics(), load
        self.engine = ServeEngine(self._load_named, options.max_slots, options.max_waiting, self.metrics)
        # Tokenizers and templates take long for long prompts.
        self._reader = ThreadPoolExecutor(1, "reader")

    def _load_named(self) -> SpeculativeModel:
        """Load the model in the engine's thread, and derive what it is called."""
        model = self._load()
        config, opened = model.config, model.opened
        named = None if opened is None else opened.target_name
        target = str(named or getattr(config, "_name_or_path", "") or config.model_type)
        self.names = self.names or [target]
        head = "loaded" if opened is None else "built-in" if opened.is_embedded else opened.head.location
        weights = hashlib.sha256(model.target.embedding[:256].detach().float().cpu().numpy().tobytes()).hexdigest()[:8]
        versions = f"eagle-slim {version('eagle-slim')}, torch {torch.__version__}"
        rows = model.target.exactness or "rows are not exact"
        self.fingerprint = f"{target} {weights} {model.dtype}; head {head}, {model.draft_vocab} ids; {rows}; {versions}"
        self.metrics.begin(self.names[0], lambda: self.engine.num_running, lambda: self.engine.num_waiting)
        return model

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response
        from starlette.routing import Route

        origins = list(self.options.origins)
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        routes = [
            Route("/health", lambda _: Response(status_code=503 if self.engine.model is None else 200)),
            Route("/metrics", lambda _: Response(self.metrics.text(), headers={"content-type": self.metrics.kind})),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", partial(self._answer, "text"), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answer, "chat"), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((EagleSlimError, HTTPException, ClientDisconnect, Exception), _refuse)
        return Starlette(
            routes=routes,
            middleware=[cors] if origins else [],
            exception_handlers=handlers,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        self.engine.start(asyncio.get_running_loop(), *self._hooks)
        yield
        await asyncio.to_thread(self.engine.close, self.options.grace_s)
        self._reader.shutdown(wait=False)

    def _open_model(self) -> SpeculativeModel:
        if self.engine.model is None:
            raise RefusedError("The model is not loaded yet.", 503, "loading", **{"Retry-After": "5"})
        return self.engine.model

    def _owner_of(self, request: Any) -> str | None:
        """Return which of several keys a client has given. Raises `RefusedError` without a right one."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        # All are compared, in a time that tells nothing.
        matches = [hmac.compare_digest(given, key.encode()) for key in self.options.api_keys]
        if matches and not any(matches):
            raise RefusedError("The API key is not right.", 401, "invalid_api_key")
        return str(matches.index(True)) if len(matches) > 1 else None

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        self._owner_of(request)
        length = self._open_model().max_model_len
        wanted = request.path_params.get("name")
        shared = {"object": "model", "created": 0, "owned_by": "eagle-slim", "max_model_len": length}
        models = [{"id": name, **shared} for name in self.names if wanted in (None, name)]
        if not models:
            raise RefusedError(f"The model {wanted!r} does not exist.", 404, "model_not_found", "model")
        return JSONResponse({"object": "list", "data": models} if wanted is None else models[0])

    async def _answer(self, kind: str, request: Any) -> Any:
        owner, model = self._owner_of(request), self._open_model()
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise RefusedError(f"The body is longer than {_MAX_BODY_BYTES} bytes.", 413)
        most = self.options.max_slots + self.options.max_waiting
        read = partial(read_asked, kind, bytes(body), model, self.names, most)
        asked = await asyncio.get_running_loop().run_in_executor(self._reader, read)
        for each, _ in asked.entries:
            each.owner = owner
        call = ServedCall([each for each, _ in asked.entries], asked.is_streamed)
        self.engine.submit(call, [rules for _, rules in asked.entries])
        return Reply(self.engine, asked, call, Writer(asked, call, self.fingerprint, model.target.exactness))


class Reply:
    """The response to a call, as an ASGI application: waits for the call, which ends where the client hangs up."""

    def __init__(self, engine: ServeEngine, asked: Asked, call: ServedCall, writer: Writer) -> None:
        self._engine, self._asked, self._call, self._writer = engine, asked, call, writer

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        """Send the answers."""
        watcher = asyncio.create_task(self._watch(receive))
        status = 0
        try:
            # A client that is gone.
            with suppress(OSError):
                status = await (self._send_parts(send) if self._asked.is_streamed else self._send_whole(send))
        finally:
            watcher.cancel()
            self._engine.cancel(self._call)
            self._log(status)

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.cancel(self._call)

    async def _send_whole(self, send: Any) -> int:
        call = self._call
        while not (call.is_done or call.error):
            await call.changed.wait()
            call.changed.clear()
        if call.error is not None:
            return await _send_error(send, refusal_of(call.error))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps(self._writer.whole())})
        return 200

    async def _send_parts(self, send: Any) -> int:
        call, has_begun, is_done = self._call, False, False
        while not is_done:
            await call.changed.wait()
            call.changed.clear()
            error, is_done = call.error, call.is_done or call.error is not None
            if error is not None and not has_begun:
                return await _send_error(send, refusal_of(error))
            chunks = self._writer.news() if error is None else [orjson.dumps(refusal_of(error).body())]
            if not chunks and not is_done:
                continue
            data = b"".join(b"data: %b\n\n" % chunk for chunk in chunks)
            if not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                has_begun = True
            data += b"data: [DONE]\n\n" if is_done else b""
            await send({"type": "http.response.body", "body": data, "more_body": not is_done})
        return 200

    def _log(self, status: int) -> None:
        call, usage = self._call, self._writer.usage()
        reasons = ", ".join(sorted({answer.request.finish_reason or "cancelled" for answer in call.answers}))
        first = "no token" if call.first_token_s is None else f"first token after {1e3 * call.first_token_s:.0f} ms"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        _LOG.info(
            f"{self._writer.id} {status}: {usage['prompt_tokens']} prompt tokens ({cached} reused), "
            f"{usage['completion_tokens']} new; {first}, {time.perf_counter() - call.began:.2f} s; ended by {reasons}"
        )


async def _send_error(send: Any, error: RefusedError) -> int:
    headers = {"content-type": "application/json", **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": orjson.dumps(error.body())})
    return error.status


async def _refuse(_request: Any, error: Exception) -> Any:
    """Return the response to a call that is refused or has failed."""
    from starlette.responses import JSONResponse

    refusal = refusal_of(error)
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)
