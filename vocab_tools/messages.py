"""Chats as datasets and APIs have them → messages as chat templates take them: role, content, reasoning, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from .errors import EagleSlimError

Message = Mapping[str, Any]

_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response", "ipython"), "tool"),
    "system": "system",
    "developer": "developer",
}
# Under the key `role`, templates know these names themselves.
_TEMPLATES_KNOW = ("tool", "function", "observation", "ipython", "tool_response")
# Templates read the first names; datasets and APIs have the others, too.
TEMPLATE_REASONING = ("reasoning_content", "thinking", "reasoning")
_REASONING = (*TEMPLATE_REASONING, "thought", "thoughts", "reasoning_text", "reasoning_details", "thinking_blocks")
_ITEMS = {"reasoning": "analysis", "function_call": "commentary"}  # of OpenAI's Responses API: the channel
_ARGUMENTS = ("arguments", "input", "args", "parameters")
# Parts of the first messages, which may hold tools alone.
_OF_HARMONY = ("system_content", "developer_content")
_MEDIA = re.compile("image|audio|video|file|document")


class ChatError(EagleSlimError):
    """A value is no chat, or a template refuses it; the message says why."""


def kind_of(value: Any) -> str:
    """Say what a value is, for a message."""
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def messages_in_text(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON, which is how string columns store them; None for other text."""
    value = json_value(text) if text.lstrip().startswith("[") else None
    first = value[0] if isinstance(value, list) and value else None
    is_message = isinstance(first, dict) and ("role" in first or "from" in first or first.get("type") in [*_ITEMS])
    return value if is_message else None


def json_value(text: Any, otherwise: Any = None) -> Any:
    """Parse JSON; give `otherwise` for other text, and for what is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return otherwise


def normalise_messages(value: Any) -> list[dict[str, Any]]:
    """Turn a chat into the form that templates take: a list of {"role", "content", ...}.

    ShareGPT's {"from", "value"} with its role names is understood, its function_call and OpenAI's old one become tool
    calls, and a list may be stored as JSON text. Keys without a value are dropped, because tables add them to every
    row. What an assistant says elsewhere is brought where templates look for it: reasoning of any name and parts that
    are thoughts become `reasoning_content`, parts that are calls `tool_calls`, a refusal and other parts text. Messages
    on harmony's channels are joined to turns.

    Raises ChatError for what is no chat, for an unknown role, and for an assistant's message without a word.
    """
    if isinstance(value, str):
        value = messages_in_text(value) or value
    if not isinstance(value, list) or not value:
        raise ChatError(f"expected a list of messages, found {'an empty list' if value == [] else kind_of(value)}")
    messages = _by_turn([_normalise(message, position) for position, message in enumerate(value)])
    if any(message["role"] == _CALL or "function_call" in message for message in messages):
        messages = _with_tool_calls(messages)
    return messages


def _normalise(message: Any, position: int) -> dict[str, Any]:
    where = f"message {position}"
    if not isinstance(message, dict):
        raise ChatError(f"{where}: expected an object with role and content, found {kind_of(message)}")
    rest = {key: item for key, item in message.items() if item is not None}
    # Tables write calls as JSON text, and a message without calls has an empty list of them.
    calls = rest.pop("tool_calls", None)
    calls = json_value(calls) if isinstance(calls, str) else calls
    role, content = rest.pop("role", None), rest.pop("content", None)
    if role is None and "from" in rest:
        speaker = rest.pop("from")
        role, content = _ROLES.get(str(speaker).lower()), rest.pop("value", None)
        if role is None:
            raise ChatError(f"{where}: unknown speaker {speaker!r}; known are {', '.join(_ROLES)}")
    kind = str(rest.get("type"))
    if role == "assistant" and kind == "message":
        rest.setdefault("channel", "final")
    elif role is None and kind in _ITEMS:
        role, rest["channel"], rest["recipient"] = "assistant", _ITEMS[kind], rest.pop("name", "all")
        content = words_of([rest.pop("summary", None), content]) or rest.pop("arguments", "")
        content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    elif role is None and kind.endswith("call_output"):
        role, content = "tool", rest.pop("output", None)
    if not isinstance(role, str):
        raise ChatError(f"{where}: no role; it has {', '.join(map(repr, message)) or 'no keys'}")
    if role.lower() not in _TEMPLATES_KNOW:
        role = _ROLES.get(role.lower(), role)
    if content is None and "parts" in rest:
        content = rest.pop("parts")
    if not isinstance(content, str | list | None):
        raise ChatError(f"{where} ({role!r}): expected content as text or in parts, found {kind_of(content)}")
    thoughts: list[str] = []
    if isinstance(content, list):
        content, thoughts, more = _sorted_parts(content, role)
        calls = [*(calls if isinstance(calls, list) else []), *more] or calls
    if role == "assistant":
        thoughts = [words for key in _REASONING if (words := words_of(rest.get(key)))] + thoughts
        for words in (words_of(rest.pop(key, None)) for key in ("refusal", "audio")):
            if words:
                text = {"type": "text", "text": words}
                content = [*content, text] if isinstance(content, list) else (content or "") + words
    if calls:
        rest["tool_calls"] = [_tool_call(call) for call in calls] if isinstance(calls, list) else calls
    if thoughts:
        rest["reasoning_content"] = "\n".join(dict.fromkeys(thoughts))
    is_silent = content is None and not {"tool_calls", "function_call", "reasoning_content"} & rest.keys()
    if is_silent and (role == "assistant" or not rest):
        raise ChatError(f"{where} ({role!r}): no content; it has {', '.join(map(repr, message))}")
    return {"role": role, "content": content, **rest}


def _by_turn(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join an assistant's messages on harmony's channels: thoughts and preambles to the answer or call behind them."""
    turns: list[dict[str, Any]] = []
    is_open = was_call = False
    for message in messages:
        channel, recipient = message.get("channel"), message.get("recipient") or "all"
        is_on_channel = message["role"] == "assistant" and channel in ("analysis", "commentary", "final")
        is_call = is_on_channel and recipient not in ("all", "user")
        if is_on_channel:
            text = content_text(message)
            call = {"name": str(recipient).removeprefix("functions."), "arguments": text}
            said = {"reasoning_content": text} if channel == "analysis" else {}
            # Calls next to each other are one turn's, whose results follow in their order.
            before = turns.pop() if is_open or (is_call and was_call) else {}
            made = {_CALL: [*before.get(_CALL, ()), call]}
            message = {**message, "content": None, **(made if is_call else said or {"content": text})}
            for key in ("content", "reasoning_content"):
                if texts := [each[key] for each in (before, message) if each.get(key)]:
                    message[key] = "\n".join(texts)
            message = {**before, **message}
        turns.append(message)
        is_open, was_call = is_on_channel and not is_call and channel != "final", is_call
    return turns


def _sorted_parts(parts: list[Any], role: str) -> tuple[list[Any], list[str], list[Any]]:
    """Sort the parts of a content: text and media, thoughts of an assistant, and its tool calls."""
    kept: list[Any] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for part in parts:
        words = words_of(part)
        part = part if isinstance(part, dict) else {"type": "text", "text": part}
        part = {key: item for key, item in part.items() if item is not None}
        kind = str(part.get("type", ""))
        if role == "assistant" and (kind in ("tool_use", "tool_call", _CALL) or "functionCall" in part):
            calls.append(part.get("functionCall", part))
        elif role == "assistant" and words and re.search("think|thought|reason", kind):
            thoughts.append(words)
        else:
            is_text = (words is not None and not _MEDIA.search(kind)) or kind in _OF_HARMONY
            kept.append({"type": "text", "text": words or ""} if is_text else part)
    return kept, thoughts, calls


def words_of(value: Any) -> str | None:
    """Return the text of a string, of a part of a content, or of several parts a line each; None where there is none.

    A part has its text under `text` or the name of its type, as {"type": "thinking", "thinking": "Well"} has.
    """
    if isinstance(value, list):
        return "\n".join(filter(None, map(words_of, value))) or None
    if isinstance(value, Mapping):
        named = ("text", value.get("type"), "content", "summary", "transcript", "instructions", "model_identity")
        keys = map(str, named)
        return next((words for key in keys if (words := words_of(value.get(key)))), None)
    return value if isinstance(value, str) else None


def _tool_call(call: Any) -> Any:
    """Return a call in OpenAI's form, where others name its arguments otherwise."""
    function = _function(call)
    key = next((key for key in _ARGUMENTS if key in function), "arguments")
    if key == "arguments":
        return call
    name = function.get("name", function.get("tool_name"))
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": name, "arguments": function[key]}}


def _with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn calls in messages of their own, or under `function_call`, into `tool_calls`."""
    normalised: list[dict[str, Any]] = []
    num_calls = 0
    waiting: list[tuple[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        given = json_value(content) if role == _CALL and isinstance(content, str) else message.get("function_call")
        given = given if isinstance(given, list) else [given]
        calls = [call for call in given if isinstance(call, dict) and "name" in call]
        if calls:
            # Mistral's templates ask for ids of nine characters, which the results behind a call name.
            waiting = [(f"call{num_calls + number:05d}", str(call["name"])) for number, call in enumerate(calls)]
            num_calls += len(calls)
            tool_calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": call.get("arguments", {})}}
                for (call_id, name), call in zip(waiting, calls, strict=True)
            ]
            message = {**message, "content": None if role == _CALL else content, "tool_calls": tool_calls}
            message.pop("function_call", None)
        elif role in ("tool", "function") and waiting:
            call_id, name = waiting.pop(0)
            message = {"tool_call_id": call_id, "name": name, **message}
        normalised.append({**message, "role": "assistant"} if calls or role == _CALL else message)
    return normalised


def template_forms(messages: Sequence[Message], has_thoughts: bool = False) -> Iterator[Sequence[Message]]:
    """Yield a chat in the forms that templates take, the usual one first.

    Contents are text, or in parts, with `has_thoughts` those of a thought, too, as Mistral's templates have them. A
    missing content is empty, or None for those that ask for it. Arguments of tool calls are objects, since most
    templates write them as JSON and would quote JSON text (vLLM parses them, too), or JSON text.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    is_short = any(message["content"] is None for message in messages)
    is_crowded = any(message.get("tool_calls") and _says_and_thinks(message) for message in messages)
    for is_joined, as_text, null, parts in product(
        (False, True) if is_crowded else (False,),
        (False, True) if has_calls else (False,),
        ("", None) if is_short else ("",),
        ("no", "text", "all") if has_thoughts else ("no", "text"),
    ):
        with suppress(ChatError):
            form = [_joined(message) for message in messages] if is_joined else messages
            yield [_formed(message, as_text, null, parts) for message in form]


def _says_and_thinks(message: Message) -> bool:
    return bool(content_text(message) and message.get("reasoning_content"))


def _joined(message: Message) -> Message:
    """Put what is said before a call behind the thoughts: gpt-oss' template takes one of the two."""
    if not (message.get("tool_calls") and _says_and_thinks(message)):
        return message
    thoughts = f"{message['reasoning_content']}\n{content_text(message)}"
    return {**message, "content": None, "reasoning_content": thoughts}


def _formed(source: Message, as_text: bool, null: str | None, parts: str) -> Message:
    content, calls, reasoning = source["content"], source.get("tool_calls"), source.get("reasoning_content")
    if parts == "no" and isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ChatError("a content has parts that are no text")
        content = content_text(source)
    elif parts != "no":
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if parts == "all" and reasoning is not None:
            content = [{"type": "thinking", "thinking": reasoning}, *(content or ())]
    message = {**source, "content": null if content is None else content}
    if isinstance(calls, list):
        message["tool_calls"] = [_formed_call(call, as_text) for call in calls]
    if reasoning is not None:
        message.update(dict.fromkeys(TEMPLATE_REASONING, reasoning))
    return message


def _formed_call(call: Any, as_text: bool) -> Any:
    function = _function(call)
    if "arguments" not in function:
        return call
    arguments = function["arguments"]
    if not as_text:
        arguments = json_value(arguments, arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _function(call: Any) -> Mapping[str, Any]:
    """Return the name and arguments of a tool call, which OpenAI's form has under `function`."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def content_text(message: Message) -> str:
    """Return the text of a message's content, parts with line ends between them as in vLLM."""
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and part.get("type") == "text")
    return content or ""


def call_texts(message: Message) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return each tool call as JSON, and all its words, each in the ways that templates spell it."""
    calls = message.get("tool_calls")
    texts = []
    for call in calls if isinstance(calls, list) else []:
        function = _function(call)
        name, arguments = str(function.get("name")), function.get("arguments")
        arguments = json_value(arguments, arguments)
        text = json.dumps({"name": name, "arguments": arguments} if "name" in function else call, ensure_ascii=False)
        texts.append((text, list(_words([name, arguments]))))
    return texts


def _words(values: list[Any]) -> Iterator[tuple[str, ...]]:
    for value in values:
        if isinstance(value, Mapping):
            values += [part for item in value.items() if item[1] is not None for part in item]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, str):
            yield value, json.dumps(value, ensure_ascii=False)[1:-1]
