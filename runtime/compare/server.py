"""Ask a running server with OpenAI's chat API: streamed answers, log-probabilities, the counts of its metrics page."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import UsageError, brief

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_PATIENCE_S, _METRICS_DELAY_S = 60.0, 2.0
"""Longest waits for a server that answers 429, and until its metrics count an answer that has arrived."""
_OPENER = urllib.request.OpenerDirector()
"""Knows neither proxies of the environment nor redirects, which would send prompts or keys elsewhere."""
_OPENER.add_handler(urllib.request.HTTPHandler())
_OPENER.add_handler(urllib.request.HTTPSHandler())
_OPENER.add_handler(urllib.request.HTTPErrorProcessor())
_OPENER.add_handler(urllib.request.HTTPDefaultErrorHandler())


class ServerError(Exception):
    """A request without a whole answer, and why; ``wait_s``: when the server wants it again, after a 429."""

    wait_s: float | None = None


@dataclass(frozen=True)
class Reply:
    """An answer, or why there is none; times are of `time.perf_counter`, and ``ended_s`` is 0 without a whole answer.

    ``tokens``: by the server's count, 0 where it does not tell; ``num_accepted``: drafts, by llama-server's timings;
    ``choices``, if asked for: each token, and the log-probabilities of the likeliest at its place; ``problem``: what
    went wrong, if only on the way to the answer.
    """

    text: str = ""
    tokens: int = 0
    began_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    num_accepted: int | None = None
    choices: tuple[tuple[bytes, Mapping[bytes, float]], ...] = ()
    problem: str = ""


class Server:
    """A server at ``url``, with or without ``/v1``, that may be silent for ``timeout_s``; API key: EAGLE_KEY_LABEL.

    Raises `UsageError` for a URL of another kind, and for a key that no header can hold.
    """

    def __init__(self, label: str, url: str, timeout_s: float = 120.0) -> None:
        self.label, self.url, self.timeout_s = label, url.rstrip("/").removesuffix("/v1"), timeout_s
        name = "EAGLE_KEY_" + re.sub(r"\W", "_", label).upper()
        key = os.environ.get(name, "")
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"{name}: expected a key of printable ASCII characters, found others in it.")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        if not re.match(r"https?://[^/]", url):
            raise UsageError(f"{label}={url}: expected a URL such as http://localhost:8000.")

    @cached_property
    def model(self) -> str:
        """The first model that it lists; raises `ServerError` where it lists none."""
        try:
            return str(json.loads(self._read("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError("/v1/models lists no model") from error

    def counts(self, before: Mapping[str, float] | None = None, tokens: int = 0) -> dict[str, float]:
        """Return the metrics of the server's Prometheus page, summed over labels; empty where there is no page.

        Waits up to two seconds until ``tokens`` more generated tokens are counted than ``before``.
        """
        deadline = time.perf_counter() + _METRICS_DELAY_S
        while True:
            found = defaultdict[str, float](float)
            with suppress(ServerError, ValueError):
                for name, value in _SAMPLE.findall(self._read("/metrics")):
                    found[name] += float(value)
            now, then = (sum(page.get(name, 0.0) for name in _GENERATED) for page in (found, before or {}))
            if not found.keys() & _GENERATED or now >= then + tokens or time.perf_counter() > deadline:
                return found
            time.sleep(0.05)

    def ask(self, prompt: str, max_new_tokens: int, with_logprobs: bool = False) -> Reply:
        """Let the server answer greedily; after a 429 again, at the time that it names, else after 1, 2, 4… seconds."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"logprobs": True, "top_logprobs": 20} if with_logprobs else {}),
        }
        waited_s, pause_s = 0.0, 1.0
        while True:
            try:
                reply = self._answer({"model": self.model, **body})
                return replace(reply, problem=f"429, answered after a wait of {waited_s:g} s") if waited_s else reply
            except ServerError as error:
                wait_s = error.wait_s or pause_s
                if error.wait_s is None or waited_s + wait_s > _PATIENCE_S:
                    return Reply(problem=str(error))
                time.sleep(wait_s)
                waited_s, pause_s = waited_s + wait_s, 2 * pause_s

    def _answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a streamed answer."""
        began_s, first_s, ended_s = time.perf_counter(), 0.0, 0.0
        text, tokens, choices = "", 0, list[tuple[bytes, Mapping[bytes, float]]]()
        num_accepted: int | None = None
        with self._open("/v1/chat/completions", json.dumps(body).encode()) as response:
            for value in self._events(response, began_s):
                try:
                    event = json.loads(value)
                    if event.get("usage"):
                        tokens = int(event["usage"]["completion_tokens"])
                    if "draft_n_accepted" in (event.get("timings") or {}):
                        num_accepted = int(event["timings"]["draft_n_accepted"])
                    for choice in (event.get("choices") or ()) if event.get("usage") else event["choices"]:
                        delta = choice.get("delta") or {}
                        # Some servers tell a thought under both of its names.
                        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                        text += thought + (delta.get("content") or "")
                        first_s = first_s or (time.perf_counter() if text else 0.0)
                        for each in (choice.get("logprobs") or {}).get("content") or ():
                            likely = {_token(one): float(one["logprob"]) for one in (*each["top_logprobs"], each)}
                            choices.append((_token(each), likely))
                        if (reason := choice.get("finish_reason")) in ("abort", "error"):
                            raise ServerError(f"the server broke the answer off: {reason!r}")
                        if reason:
                            ended_s = time.perf_counter()
                except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                    raise ServerError(f"garbage in the stream: {brief(value)}") from error
        if not ended_s:
            raise ServerError(f"the stream broke off after {len(text)} characters")
        problem = "" if tokens else "no speed, as the server does not tell how many tokens it generated"
        return Reply(text, tokens, began_s, first_s or ended_s, ended_s, num_accepted, tuple(choices), problem)

    def _events(self, response: Iterable[bytes], heard_s: float) -> Iterator[str]:
        """Yield the data of server-sent events, up to the one that says that all is done; silent since ``heard_s``."""
        for line in response:
            kind, _, value = line.decode(errors="replace").strip().partition(":")
            if kind == "data":
                heard_s = time.perf_counter()
                if value.strip() == "[DONE]":
                    return
                yield value
            # Comments that keep a connection alive are silence, too.
            elif time.perf_counter() > heard_s + self.timeout_s:
                raise TimeoutError

    def _read(self, path: str) -> str:
        with self._open(path) as response:
            return response.read().decode(errors="replace")

    @contextmanager
    def _open(self, path: str, data: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """Send a request and give its response; raises `ServerError` for whatever goes wrong with either."""
        timeout_s = self.timeout_s if data else min(10.0, self.timeout_s)
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            try:
                with _OPENER.open(request, timeout=timeout_s) as response:
                    yield response
            except urllib.error.HTTPError as error:
                with error:
                    body, moved = error.read(500).decode(errors="replace"), error.headers.get("Location")
                    said = f"redirects to {moved}, which is not asked" if moved else brief(body)
                    failure = ServerError(f"{error.code}: {said}")
                after = error.headers.get("Retry-After", "")
                failure.wait_s = None if error.code != 429 else float(after) if after.isdigit() else 0.0
                raise failure from error
        except (http.client.HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            said = f"silent for {timeout_s:g} s" if isinstance(reason, TimeoutError) else f"{reason!r}"
            raise ServerError(said) from error


def _token(entry: Mapping[str, Any]) -> bytes:
    return bytes(entry["bytes"]) if entry.get("bytes") else str(entry["token"]).encode()


def count_passes(
    before: Mapping[str, float], after: Mapping[str, float], replies: Sequence[Reply]
) -> tuple[float, float]:
    """Return target passes that verified drafts, and the tokens that they gave; zeros where nothing tells of drafts.

    ``before`` and ``after``: metrics around the replies. vLLM's (0.32, `v1/spec_decode/metrics.py`) count drafts and
    accepted tokens. SGLang's (0.5.23, `srt/observability/metrics_collector.py`) count passes and generated tokens, of
    which an answer's first comes from its prompt's pass, as llama-server's does (`tools/server/server-common.cpp`).
    """
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()} if before else {}
    if drafts := gained.get("vllm:spec_decode_num_drafts_total"):
        return drafts, drafts + gained["vllm:spec_decode_num_accepted_tokens_total"]
    if passes := gained.get("sglang:spec_verify_calls_total"):
        return passes, gained["sglang:generation_tokens_total"] - len(replies)
    drafted = [each for each in replies if each.tokens and each.num_accepted is not None]
    tokens = sum(each.tokens - 1 for each in drafted)
    return tokens - sum(each.num_accepted or 0 for each in drafted), tokens
