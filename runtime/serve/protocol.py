"""OpenAI's protocol: what a client asks in `generate`'s words, and refusals in OpenAI's form.

A field that is not served is refused by name unless it leaves the text as it is. Null counts as not given.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import orjson
from eagle_slim.vocab_tools.errors import EagleSlimError

from ..api.options import read_count, read_flag
from ..api.prompts import encode_conversation
from ..errors import PromptError, UsageError, brief, misfit
from .calls import Answer, Call

if TYPE_CHECKING:
    from ..model import SpeculativeModel

_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
_OPTIONS = _SAMPLING | {"repetition_penalty", "stop", "ignore_eos"}
"""Fields that are options of `generate` by the same name."""
_SERVED = _OPTIONS | {"model", "max_tokens", "n", "seed", "stream", "stream_options", "return_token_ids"}
_OF_KIND = {
    "chat": {"messages", "max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs"},
    "text": {"prompt"},
}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "request_id"}
_WITHOUT_EFFECT |= {"prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("logprobs", "echo"), (False,)),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "best_of": (1,),
    "suffix": ("",),
}
"""Values that ask for nothing, of fields that are refused otherwise."""


class RefusedError(EagleSlimError):
    """A call that is not served; ``status`` is HTTP's, ``param`` the field, ``headers`` of the response."""

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
    text = str(error)
    if isinstance(error, (UsageError, PromptError)):
        field = text.partition(" ")[0]
        code = "context_length_exceeded" if isinstance(error, PromptError) and "context" in text else None
        return RefusedError(text, code=code, param=field if field.isidentifier() and field.islower() else None)
    # Starlette's errors have a status.
    status = getattr(error, "status_code", 500)
    is_told = status < 500 or isinstance(error, EagleSlimError)
    return RefusedError(text if is_told else f"{type(error).__name__} in the server", status)


def read_call(kind: str, body: bytes, model: SpeculativeModel, names: Sequence[str], most: int) -> Call:
    """Read a client's call of a model that is served by ``names``; ``most``: answers that a call may ask for.

    ``kind``: as in `Call`. Raises `RefusedError`, and what `SpeculativeModel.read_requests` raises.
    """
    fields = _read_fields(kind, body, names)
    stream, with_ids = (read_flag(each, fields.get(each, False)) for each in ("stream", "return_token_ids"))
    of_stream = fields.get("stream_options", {})
    if not isinstance(of_stream, dict) or (of_stream and not stream):
        raise misfit("stream_options", "an object, beside stream = true", of_stream)
    with_usage = read_flag("include_usage", of_stream.get("include_usage") or False)
    # OpenAI's defaults.
    options = {"temperature": 1.0} | {name: fields[name] for name in _OPTIONS & fields.keys()}
    length = fields.get("max_completion_tokens", fields.get("max_tokens", None if kind == "chat" else 16))
    # No more than the context has room for.
    options["max_new_tokens"] = model.max_model_len if length is None else read_count("max_tokens", length, 1)
    count = read_count("n", fields.get("n", 1), 1)
    prompts = [_encode_chat(model, fields)] if kind == "chat" else _read_prompts(fields.get("prompt"))
    if len(prompts) * count > most:
        raise misfit("n", f"such that a call has at most {most} answers", count)
    seed = None
    if options["temperature"] == 0:
        options = {name: options[name] for name in options.keys() - _SAMPLING}
        prompts = [prompt for prompt in prompts for _ in range(count)]
    else:
        seed = fields.get("seed", secrets.randbelow(2**63))
        options |= {"seed": [seed] * len(prompts), "num_return_sequences": count}
    answers = [Answer(*each) for each in model.read_requests(prompts, options)]
    return Call(kind, fields.get("model", names[0]), answers, count, seed, stream, with_usage, with_ids)


def _read_fields(kind: str, body: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Read the fields that are given. Raises `RefusedError` for one that is not served, and another model's name."""
    try:
        given = orjson.loads(body)
    except ValueError as error:
        raise RefusedError(f"The body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise misfit("The body", "a JSON object", given)
    fields = {field: value for field, value in given.items() if value is not None}
    if (name := fields.get("model", names[0])) not in names:
        raise RefusedError(f"There is no model {brief(name)} but {names[0]!r}.", 404, "model_not_found", "model")
    for field, value in fields.items():
        is_known = field in _SERVED | _OF_KIND[kind] | _WITHOUT_EFFECT
        if field in _NEUTRAL:
            # False is not 0.
            is_known = any(value == each and type(value) in (type(each), float) for each in _NEUTRAL[field])
        if not is_known:
            raise RefusedError(f"{field} = {brief(value)} is not served.", code="unsupported_parameter", param=field)
    return fields


def _read_prompts(given: Any) -> list[Any]:
    """Return the prompts of a completion: texts, or lists of token ids."""
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
    message, content, calls = dict(given), given.get("content"), given.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise misfit("role of one of the messages", "a text", message.get("role"))
    message["role"] = "system" if message["role"] == "developer" else message["role"]
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            message["content"] = "\n".join(texts)
    if not (isinstance(message.get("content"), str) or (content is None and calls)):
        raise misfit("content of one of the messages", "text, or parts of type text", content)
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    try:
        return {**message, "tool_calls": [_read_tool_call(each) for each in calls]}
    except (KeyError, TypeError, ValueError) as error:
        raise misfit("tool_calls of one of the messages", "as OpenAI gives them", calls) from error


def _read_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}
