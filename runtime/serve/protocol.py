"""OpenAI's protocol: calls as clients ask them, in `generate`'s words, their answers as they grow, and refusals.

A field that is not served is refused by name unless it leaves the text as it is. Null counts as not given.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import orjson
from eagle_slim.vocab_tools.errors import EagleSlimError

from ..api.options import read_count, read_flag
from ..api.prompts import encode_conversation
from ..api.request import FinishReason, Request
from ..errors import PromptError, UsageError, brief, misfit
from ..settings import SamplingConfig
from ..step.plan import CallRules

if TYPE_CHECKING:
    from ..model import SpeculativeModel

_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
_OPTIONS = {"repetition_penalty", "stop", "ignore_eos"}
"""Fields that are options of `generate` by the same name."""
_SERVED = _SAMPLING | _OPTIONS | {"model", "max_tokens", "n", "seed", "stream", "stream_options", "return_token_ids"}
_OF_KIND = {"text": {"prompt"}, "chat": {"messages", "max_completion_tokens", "tools", "chat_template_kwargs"}}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "request_id"}
_WITHOUT_EFFECT |= {"prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
_NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,))
_NEUTRAL |= {"logprobs": (False,), "echo": (False,), "logit_bias": ({},), "response_format": ({"type": "text"},)}
_NEUTRAL |= {"modalities": (["text"],), "tool_choice": ("auto", "none"), "best_of": (1,), "suffix": ("",)}
"""Values that ask for nothing, of fields that are refused otherwise."""
_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class RefusedError(EagleSlimError):
    """A call that is not served; ``status`` is HTTP's, ``param`` the field, ``headers`` of the response."""

    is_logged = False
    """Whether the call has had its line of the log."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self) -> bytes:
        """Return it in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return orjson.dumps({"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}})


def refusal_of(error: BaseException) -> RefusedError:
    """Return what a client is told of an error."""
    if isinstance(error, RefusedError):
        return error
    # Starlette's errors have a status, and headers.
    status, headers = getattr(error, "status_code", 500), getattr(error, "headers", None) or {}
    if status >= 500 and not isinstance(error, EagleSlimError):
        return RefusedError(f"{type(error).__name__} in the server", status)
    return RefusedError(str(getattr(error, "detail", error)), status, **headers)


@dataclass(eq=False)
class ServedAnswer:
    """One answer of a call: its request, and what the event loop has been told of it."""

    request: Request
    rules: CallRules
    call: ServedCall = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    told_at: float = 0.0
    num_told: int = 0
    """Tokens that the engine's thread has sent, the last of them at a time."""
    sent_at: float = 0.0
    num_written: int = 0
    """Tokens that a stream has been sent."""
    has_end: bool = False
    """Whether it has the last of them."""
    _num_letters: int = 0
    _held: str = ""
    _first: int = 0
    _last: int = 0
    """Beginning and end of the tokens whose text comes before the next."""

    def new_text(self) -> str:
        """Return the text beyond what this gave before, as far as no later token or stop string changes it."""
        request, ids = self.request, self.token_ids
        if self.finish_reason is not None or request.decode is None:
            return (request.text() or "")[self._num_letters :]
        before, now = request.decode(ids[self._first : self._last]), request.decode(ids[self._first :])
        # Half a letter.
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._first, self._last = self._last, len(ids)
        text = self._held + now[len(before) :]
        beginnings = (size for stop in request.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        kept = len(text) - max(beginnings, default=0)
        self._held, self._num_letters = text[kept:], self._num_letters + kept
        return text[:kept]


@dataclass(eq=False)
class ServedCall:
    """A call as a client asks it; ``kind``: "chat" or "text"."""

    kind: str
    answers: list[ServedAnswer]
    """``count`` answers to the first prompt, then those to the next."""
    count: int
    shared: dict[str, Any]
    """Fields that all that is sent has."""
    is_streamed: bool
    """Whether news wake it, or its end alone."""
    with_usage: bool
    with_ids: bool
    began: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None
    """Ends it where the client hangs up."""

    def __post_init__(self) -> None:
        for answer in self.answers:
            answer.call = self
        self._prompt = {}
        if self.with_ids and len(self.answers) == self.count:
            self._prompt = {"prompt_token_ids": self.answers[0].request.prompt_ids}

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    def check(self) -> None:
        """Raise `RefusedError` if an answer has ended before it was whole."""
        ended = {answer.finish_reason: answer.error for answer in self.answers}
        if (error := ended.get("fault")) or "cancelled" in ended:
            refusal = refusal_of(error or RefusedError("The server ends.", 503))
            refusal.is_logged = True
            raise refusal

    def usage(self) -> dict[str, Any]:
        """Count tokens as OpenAI does: the prompt of several answers once."""
        requests = [answer.request for answer in self.answers]
        firsts = requests[:: self.count]
        prompt, new = sum(len(each.prompt_ids) for each in firsts), sum(len(each.token_ids) for each in requests)
        accepted, drafted = sum(each.num_accepted for each in requests), sum(each.num_drafted for each in requests)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_reused for request in firsts)},
            "completion_tokens_details": details,
        }

    def __str__(self) -> str:
        """Return a line for the log, without its text."""
        used, kept = self.usage(), sum(each.request.num_accepted for each in self.answers)
        reasons = ", ".join(sorted({answer.finish_reason or "" for answer in self.answers}))
        first = f"first token after {self.first_token_s:.3f} s, " if self.first_token_s is not None else ""
        asked = f"{used['prompt_tokens']} prompt tokens ({used['prompt_tokens_details']['cached_tokens']} reused)"
        said = f"{used['completion_tokens']} new ({kept} drafted); {first}{time.perf_counter() - self.began:.2f} s"
        return f"{self.shared['id']}: {asked}, {said}; ended by {reasons}"

    def whole(self) -> bytes:
        """Write the whole answer; all must have ended."""
        choices = [self._choice(index, each, each.token_ids, "message") for index, each in enumerate(self.answers)]
        for choice in choices if self.kind == "chat" else ():
            choice["message"]["refusal"] = None
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        return orjson.dumps({"object": kind, **self.shared, **self._prompt, "choices": choices, "usage": self.usage()})

    def news(self) -> bytes:
        """Write server-sent events of what came since the last call, the last with what these bring."""
        chunks = list[dict[str, Any]]()
        for index, answer in enumerate(self.answers):
            ids, is_done = answer.token_ids[answer.num_written :], answer.finish_reason is not None
            if ids or is_done > answer.has_end:
                choice = self._choice(index, answer, ids, "delta")
                chunks.append({"choices": [choice], **self._prompt, **({"usage": None} if self.with_usage else {})})
                self._prompt = {}
                answer.num_written, answer.has_end = len(answer.token_ids), is_done
        if self.is_done and self.with_usage:
            chunks.append({"choices": [], "usage": self.usage()})
        kind = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return b"".join(b"data: %b\n\n" % orjson.dumps({"object": kind, **self.shared, **each}) for each in chunks)

    def _choice(self, index: int, answer: ServedAnswer, ids: Sequence[int], name: str) -> dict[str, Any]:
        text, reason = answer.new_text(), _REASONS[answer.finish_reason]
        message = {"content": text} if answer.num_written else {"role": "assistant", "content": text}
        said: Mapping[str, Any] = {name: message} if self.kind == "chat" else {"text": text}
        more = {"token_ids": ids} if self.with_ids else {}
        return {"index": index, "finish_reason": reason, "logprobs": None, **said, **more}


def read_call(kind: str, body: bytes, model: SpeculativeModel, names: Sequence[str], most: int) -> ServedCall:
    """Read a client's call of a model that is served by ``names``; ``most``: answers that a call may ask for.

    ``kind``: as in `ServedCall`. Raises `RefusedError`.
    """
    fields = _read_fields(kind, body, names)
    try:
        return _read_call(kind, fields, model, names, most)
    except (PromptError, UsageError) as error:
        text = str(error).replace("input_ids", "prompt")
        code, param = None, next((word for word in re.findall(r"\w+", text) if word in fields), None)
        if isinstance(error, PromptError):
            code = "context_length_exceeded" if "context" in text else None
            param = "messages" if kind == "chat" else "prompt"
        raise RefusedError(text, code=code, param=param) from error


def _read_call(
    kind: str, fields: Mapping[str, Any], model: SpeculativeModel, names: Sequence[str], most: int
) -> ServedCall:
    stream, with_ids = (read_flag(each, fields.get(each, False)) for each in ("stream", "return_token_ids"))
    of_stream = fields.get("stream_options", {})
    if not isinstance(of_stream, dict) or (of_stream and not stream):
        raise misfit("stream_options", "an object, beside stream = true", of_stream)
    with_usage = read_flag("stream_options.include_usage", of_stream.get("include_usage") or False)
    # OpenAI's defaults.
    drawn = {"temperature": 1.0, "seed": secrets.randbelow(2**63), **fields}
    if drawn.get("top_k") == -1:  # what other servers call all
        drawn["top_k"] = 0
    if type(drawn["seed"]) is int:  # OpenAI's is any
        drawn["seed"] %= 2**63
    sampling = SamplingConfig(**{name: drawn[name] for name in (*_SAMPLING, "seed") if name in drawn})
    options = {name: fields[name] for name in _OPTIONS & fields.keys()}
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    # No more than the context has room for.
    options["max_new_tokens"] = read_count(name, fields.get(name, model.max_model_len if kind == "chat" else 16), 1)
    count = read_count("n", fields.get("n", 1), 1)
    prompts: Any = _encode_chat(model, fields) if kind == "chat" else fields.get("prompt")
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    elif not isinstance(prompts, list) or not prompts or not all(isinstance(each, (str, list)) for each in prompts):
        raise misfit("prompt", "a text, a list of token ids, or a list of either", prompts)
    if len(prompts) * count > most:
        asked = "prompt and n ask" if len(prompts) > 1 else "n asks"
        raise UsageError(f"{asked} for {len(prompts) * count} answers; a call has at most {most}.")
    name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
    shared = {"id": name, "created": int(time.time()), "model": fields.get("model", names[0])}
    if sampling.is_greedy:
        prompts = [prompt for prompt in prompts for _ in range(count)]
    else:
        shared["seed"] = sampling.seed
        options |= {name: drawn[name] for name in _SAMPLING & drawn.keys()}
        options |= {"seed": [sampling.seed] * len(prompts), "num_return_sequences": count}
    answers = [ServedAnswer(*each) for each in model.read_requests(prompts, options)]
    return ServedCall(kind, answers, count, shared, stream, with_usage, with_ids)


def _read_fields(kind: str, body: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Read the fields that are given. Raises `RefusedError` for one that is not served, and another model's name."""
    try:
        given = orjson.loads(body)
    except ValueError as error:
        raise RefusedError(f"The body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RefusedError(f"The body must be a JSON object, got {brief(given)}.")
    fields = {name: value for name, value in given.items() if value is not None}
    if (model := fields.get("model", names[0])) not in names:
        raise RefusedError(f"There is no model {brief(model)} but {names[0]!r}.", 404, "model_not_found", "model")
    for name, value in fields.items():
        is_known = name in _SERVED | _OF_KIND[kind] | _WITHOUT_EFFECT
        if name in _NEUTRAL:
            # False is not 0.
            is_known = any(value == each and type(value) in (type(each), float) for each in _NEUTRAL[name])
        if not is_known:
            raise RefusedError(f"{name} = {brief(value)} is not served.", code="unsupported_parameter", param=name)
    return fields


def _encode_chat(model: SpeculativeModel, fields: Mapping[str, Any]) -> list[int]:
    messages, more = fields.get("messages"), fields.get("chat_template_kwargs", {})
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise misfit("messages", 'a list such as [{"role": "user", "content": "Hi"}]', messages)
    if not isinstance(more, dict):
        raise misfit("chat_template_kwargs", "an object", more)
    known = signature(model.tokenizer.apply_chat_template).parameters if model.tokenizer else {}
    if wrong := sorted(more.keys() & {"messages", *known}):
        raise RefusedError(f"{wrong[0]} is not served in chat_template_kwargs.", param="chat_template_kwargs")
    if fields.get("tools") and fields.get("tool_choice") != "none":
        if "tools" not in str(getattr(model.tokenizer, "chat_template", None)):
            raise RefusedError("The model's chat template takes no tools.", code="unsupported_parameter", param="tools")
        more = {**more, "tools": fields["tools"]}
    said = [_read_message(f"messages[{index}]", each) for index, each in enumerate(messages)]
    return encode_conversation(model.tokenizer, said, more)


def _read_message(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: its content one text, the arguments of its calls objects."""
    message, content, calls = dict(given), given.get("content"), given.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise misfit(f"{name}.role", "a text", message.get("role"))
    message["role"] = "system" if message["role"] == "developer" else message["role"]
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            message["content"] = "\n".join(texts)
    if not (isinstance(message.get("content"), str) or (content is None and calls)):
        raise misfit(f"{name}.content", "text, or parts of type text", content)
    message.pop("tool_calls", None)
    try:
        return {**message, "tool_calls": [_read_tool_call(each) for each in calls]} if calls else message
    except (KeyError, TypeError, ValueError) as error:
        raise misfit(f"{name}.tool_calls", "as OpenAI gives them", calls) from error


def _read_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"] or "{}"
    arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}
