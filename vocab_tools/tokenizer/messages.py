"""Chats as datasets store them → the list of {"role", "content", ...} that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import EagleSlimError

Message = Mapping[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
# Some datasets use these names under `role` as well. The other names are left alone there: templates know them.
_OTHER_NAMES = {name: role for name, role in _ROLES.items() if role in ("user", "assistant")}
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatError(EagleSlimError):
    """A conversation cannot be rendered, or its assistant turns cannot be located; the message says why."""


def messages_in_text(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON, which is how string columns store them; None for other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    first = value[0] if value else None
    return value if isinstance(first, dict) and ("role" in first or "from" in first) else None


def normalise_messages(value: Any) -> list[dict[str, Any]]:
    """Turn a chat into the form that templates take: a list of {"role", "content", ...}.

    ShareGPT's {"from", "value"} with its role names is understood, and so is a list stored as JSON text. Keys without a
    value are dropped, because tables add them to every row.

    Raises:
        ChatError: it is not a chat, or a role is unknown; fact `message` is the position of the bad message.
    """
    if isinstance(value, str):
        value = messages_in_text(value) or value
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else kind_of(value)
        raise ChatError(f"expected a list of messages, found {found}", found=found)
    return [_normalise(message, position) for position, message in enumerate(value)]


def _normalise(message: Any, position: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ChatError(
            f"message {position}: expected an object with role and content, found {kind_of(message)}",
            message=position,
            expected="object",
        )
    role, content = message.get("role"), message.get("content")
    rest = {key: item for key, item in message.items() if item is not None and key not in ("role", "content")}
    if role is None and "from" in message:
        speaker = rest.pop("from", None)
        role = _ROLES.get(str(speaker).lower())
        content = rest.pop("value", None)
        if role is None:
            raise ChatError(
                f"message {position}: unknown speaker {speaker!r}; known are {', '.join(_ROLES)}",
                message=position,
                speaker=speaker,
            )
    if not isinstance(role, str):
        raise ChatError(
            f"message {position}: no role; it has {', '.join(message) or 'no keys'}", message=position, missing="role"
        )
    role = _OTHER_NAMES.get(role.lower(), role)
    if content is None and not rest:
        raise ChatError(f"message {position} ({role}): no content", message=position, missing="content")
    if isinstance(content, list):
        content = [
            {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else part
            for part in content
        ]
    return {"role": role, "content": content, **rest}


def with_reasoning(messages: Sequence[Message]) -> Sequence[Message]:
    """Repeat reasoning under every name that templates read, as transformers' apply_chat_template does."""
    if all(len(message) == 2 for message in messages):
        return messages
    aliased = []
    for message in messages:
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        aliased.append(message)
    return aliased


def with_joined_parts(messages: Sequence[Message]) -> Sequence[Message]:
    """Join contents given in parts into one text, with line ends between them as in vLLM."""
    return [
        {**message, "content": _joined(message["content"], position)}
        if isinstance(message["content"], list)
        else message
        for position, message in enumerate(messages)
    ]


def _joined(parts: Sequence[Any], position: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(
                f"message {position}: its content has a part of type {kind}, and the template takes only text",
                message=position,
                part=kind,
            )
        texts.append(text)
    return "\n".join(texts)


def with_object_arguments(messages: Sequence[Message]) -> Sequence[Message]:
    """Parse the arguments of tool calls that are JSON text, which is OpenAI's form, into objects."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def kind_of(value: Any) -> str:
    """Say what a value is, for a message."""
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
