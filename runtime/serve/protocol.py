"""OpenAI's protocol: what a client asks in `generate`'s words, and answers in OpenAI's.

A field that is not served is refused by name unless it leaves the text as it is. Null counts as not given.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import orjson

from ..api.options import read_count, read_flag
from ..api.prompts import encode_conversation
from ..errors import brief, misfit
from ..step.plan import CallRules
from .calls import RefusedError, ServedCall

if TYPE_CHECKING:
    from ..api.request import Request
    from ..model import SpeculativeModel

SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "ignore_eos")
"""Fields that are options of `generate` by the same name."""
_SERVED = {*SAME_NAME, "model", "max_tokens", "n", "seed", "stream", "stream_options", "return_token_ids"}
_BY_KIND = {
    "chat": {"messages", "max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs"},
    "text": {"prompt"},
}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "request_id"}
_WITHOUT_EFFECT |= {"prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Values that ask for nothing, of fields that are refused otherwise."""
_DEFAULT_TEXT_TOKENS = 16
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Asked:
    """A call as a client asks it; ``kind``: "chat" or "text"."""

    kind: str
    model: str
    entries: list[tuple[Request, CallRules]]
    """``count`` answers of the first prompt, then those of the next."""
    count: int
    seed: int | None
    is_streamed: bool = False
    include_usage: bool = False
    return_token_ids: bool = False


def read_asked(kind: str, body: bytes, model: SpeculativeModel, names: Sequence[str], most: int) -> Asked:
    """Read the body of a call for a model that is served by ``names``; ``most``: answers that a call may ask for.

    Raises `RefusedError`, and what `SpeculativeModel.read_requests` raises.
    """
    try:
        given = orjson.loads(body)
    except ValueError as error:
        raise RefusedError(f"The body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise misfit("The body", "a JSON object", given)
    fields = {name: value for name, value in given.items() if value is not None}
    name = fields.get("model", names[0])
    if name not in names:
        raise RefusedError(f"There is no model {brief(name)} but {names[0]!r}.", 404, "model_not_found", "model")
    for field, value in fields.items():
        is_known = field in _SERVED | _BY_KIND[kind] | _WITHOUT_EFFECT
        if field in _NEUTRAL:
            # False is not 0.
            is_known = any(value == each and type(value) in (type(each), float) for each in _NEUTRAL[field])
        if not is_known:
            raise RefusedError(f"{field} = {brief(value)} is not served.", code="unsupported_parameter", param=field)
    is_streamed, return_token_ids = (
        read_flag(each, fields.get(each, False)) for each in ("stream", "return_token_ids")
    )
    stream_options = fields.get("stream_options", {})
    if not isinstance(stream_options, dict) or (stream_options and not is_streamed):
        raise misfit("stream_options", "an object, beside stream = true", stream_options)
    count = read_count("n", fields.get("n", 1), 1)
    options = {field: fields[field] for field in SAME_NAME if field in fields}
    # OpenAI's default.
    options.setdefault("temperature", 1.0)
    is_greedy = options["temperature"] == 0
    if is_greedy:
        options = {field: value for field, value in options.items() if field not in ("top_p", "top_k", "min_p")}
    length = fields.get("max_completion_tokens", fields.get("max_tokens"))
    length = _DEFAULT_TEXT_TOKENS if length is None and kind == "text" else length
    # No more than the context has room for.
    options["max_new_tokens"] = model.max_model_len if length is None else read_count("max_tokens", length, 1)
    prompts = [_encode_chat(model, fields)] if kind == "chat" else _read_prompts(fields)
    if len(prompts) * count > most:
        raise misfit("n", f"such that a call has at most {most} answers", count)
    prompts = [prompt for prompt in prompts for _ in range(count if is_greedy else 1)]
    seed = fields.get("seed")
    if not is_greedy:
        seed = secrets.randbelow(2**63) if seed is None else seed
        options |= {"seed": [seed] * len(prompts), "num_return_sequences": count}
    include_usage = read_flag("include_usage", stream_options.get("include_usage") or False)
    entries = model.read_requests(prompts, options)
    return Asked(kind, name, entries, count, None if is_greedy else seed, is_streamed, include_usage, return_token_ids)


def _read_prompts(fields: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a completion: texts, or lists of token ids."""
    given = fields.get("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    if not isinstance(given, list) or not given or not all(isinstance(each, (str, list)) for each in given):
        raise misfit("prompt", "a text, a list of token ids, or a list of either", given)
    return given


def _encode_chat(model: SpeculativeModel, fields: Mapping[str, Any]) -> list[int]:
    messages, more = fields.get("messages"), fields.get("chat_template_kwargs", {})
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise misfit("messages", 'a list such as [{"role": "user", "content": "Hi"}]', messages)
    if not isinstance(more, dict):
        raise misfit("chat_template_kwargs", "an object", more)
    known = signature(model.tokenizer.apply_chat_template).parameters if model.tokenizer else {}
    if wrong := sorted(more.keys() & known.keys()):
        raise RefusedError(f"{wrong[0]} is not served in chat_template_kwargs.", param="chat_template_kwargs")
    if fields.get("tools") and fields.get("tool_choice") != "none":
        more = {**more, "tools": fields["tools"]}
    return encode_conversation(model.tokenizer, [_read_message(each) for each in messages], more)


def _read_message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: its content one text, the arguments of its calls objects."""
    message, content = dict(given), given.get("content")
    if not isinstance(message.get("role"), str):
        raise misfit("role of one of the messages", "a text", message.get("role"))
    message["role"] = "system" if message["role"] == "developer" else message["role"]
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) == len(content) and all(part.get("type") == "text" for part in content):
            message["content"] = "\n".join(texts)
    if not (isinstance(message.get("content"), str) or (content is None and message.get("tool_calls"))):
        raise misfit("content of one of the messages", "text, or parts of type text", content)
    try:
        message["tool_calls"] = [_read_call(each) for each in given.get("tool_calls") or ()]
    except (KeyError, TypeError, ValueError) as error:
        raise misfit("tool_calls of one of the messages", "as OpenAI gives them", given["tool_calls"]) from error
    return message if message["tool_calls"] else {k: v for k, v in message.items() if k != "tool_calls"}


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class AnswerText:
    """The text of an answer as it grows, as far as no later token changes it, nor a stop string may begin in it."""

    def __init__(self, request: Request) -> None:
        self._request, self._ids = request, list[int]()
        self._first = self._last = 0
        """Beginning and end of the tokens whose text comes before the next."""
        self._held, self._num_sent = "", 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; returns the text to send."""
        request = self._request
        assert request.decode is not None
        self._ids += [token for token in token_ids if token not in request.eos_ids]
        before, now = request.decode(self._ids[self._first : self._last]), request.decode(self._ids[self._first :])
        # Half a letter.
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._first, self._last = self._last, len(self._ids)
        text = self._held + now[len(before) :]
        beginnings = (size for stop in request.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        kept = len(text) - max(beginnings, default=0)
        self._held, self._num_sent = text[kept:], self._num_sent + kept
        return text[:kept]

    def finish(self) -> str:
        """Return the rest of the whole text, once the answer has ended."""
        return (self._request.text() or "")[self._num_sent :]


class Writer:
    """Writes the answers of one call; ``exactness``: as in `GenerationStats`."""

    def __init__(self, asked: Asked, call: ServedCall, fingerprint: str, exactness: str | None) -> None:
        self._asked, self._call, is_chat = asked, call, asked.kind == "chat"
        self._is_chat = is_chat
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": fingerprint,
            "exactness": exactness,
        }
        if asked.seed is not None:
            self._head["seed"] = asked.seed
        if asked.return_token_ids and len(call.answers) == asked.count:
            self._head["prompt_token_ids"] = call.answers[0].request.prompt_ids
        self._texts = [AnswerText(answer.request) for answer in call.answers]
        self._num_sent = [0] * len(call.answers)
        self._has_ended = [False] * len(call.answers)

    def whole(self) -> dict[str, Any]:
        """Return the whole answer; all must have ended."""
        choices = []
        for index, answer in enumerate(self._call.answers):
            text = answer.request.text() or ""
            said = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self._is_chat
                else {"text": text}
            )
            ids = {"token_ids": answer.token_ids} if self._asked.return_token_ids else {}
            choices.append({**self._choice(index, answer.finish_reason), **said, **ids})
        return {**self._head, "choices": choices, "usage": self.usage()}

    def news(self) -> list[bytes]:
        """Return the chunks for what came since the last call, the first and the last ones with what these bring."""
        chunks = list[bytes]()
        for index, answer in enumerate(self._call.answers):
            done, first = answer.finish_reason is not None, self._num_sent[index] == 0
            ids = answer.token_ids[self._num_sent[index] :]
            if self._has_ended[index] or not (ids or done):
                continue
            if first and self._is_chat:
                chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
            text = self._texts[index].finish() if done else self._texts[index].push(ids)
            self._num_sent[index], self._has_ended[index] = len(answer.token_ids), done
            if text or self._asked.return_token_ids:
                chunks.append(self._chunk(index, {"content": text} if self._is_chat else text, ids=ids))
            if done:
                chunks.append(self._chunk(index, {} if self._is_chat else "", reason=answer.finish_reason))
        if self._call.is_done and self._asked.include_usage:
            chunks.append(self._join({"choices": [], "usage": self.usage()}))
        return chunks

    def _chunk(self, index: int, said: Any, reason: str | None = None, ids: Sequence[int] | None = None) -> bytes:
        choice = {**self._choice(index, reason), "delta" if self._is_chat else "text": said}
        if self._asked.return_token_ids and ids is not None:
            choice["token_ids"] = ids
        return self._join({"choices": [choice], **({"usage": None} if self._asked.include_usage else {})})

    @cached_property
    def _chunk_head(self) -> bytes:
        kind = {"object": "chat.completion.chunk"} if self._is_chat else {}
        return orjson.dumps({**self._head, **kind})[:-1] + b","

    def _join(self, fields: Mapping[str, Any]) -> bytes:
        """Return a chunk with what all have."""
        return self._chunk_head + orjson.dumps(fields)[1:]

    def _choice(self, index: int, reason: str | None) -> dict[str, Any]:
        return {"index": index, "finish_reason": None if reason is None else _REASONS[reason], "logprobs": None}

    def usage(self) -> dict[str, Any]:
        """Count tokens as OpenAI does: the prompt of several answers once."""
        requests = [answer.request for answer in self._call.answers]
        firsts = requests[:: self._asked.count]
        prompt, new = (sum(map(len, ids)) for ids in ([r.prompt_ids for r in firsts], [r.token_ids for r in requests]))
        accepted = sum(request.num_accepted for request in requests)
        drafted = sum(request.num_drafted for request in requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_reused for request in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }
