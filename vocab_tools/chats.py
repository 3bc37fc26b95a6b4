"""Chats → what an assistant wrote in them, through the tokenizer's own chat template.

The turn of assistant message k is found by rendering the chat twice: `messages[:k]` with the generation prompt, and
`messages[:k+1]`. It follows their longest common prefix and ends with the first special token behind the message's
last own word; what a template appends later is not counted. For ChatML and one question:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                         └──────────────┘ counted

Its tokens are those of the whole rendering that begin at or behind the prefix. A turn counts only if it holds the
message's own words, white space aside, and nothing of another message beside them. Where no form of the chat that
templates take gives such a turn, the message's own text is counted by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any

from .compat import compile_chat_template
from .errors import EagleSlimError, TokenizerError
from .tokenizer import LoadedTokenizer

Message = Mapping[str, Any]

# A template that prints today's date would change the counts every day. Llama-3's template falls back to this date.
RENDER_DATE = datetime(2024, 7, 26)
# So much of another message is no accident. A shorter message must stand before the turn.
_BORROWED_CHARS = 8
_PROBE = "\ue000probe\ue001"

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
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatError(EagleSlimError):
    """A value is no chat, or a template refuses it; the message says why."""


def kind_of(value: Any) -> str:
    """Say what a value is, for a message."""
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def messages_in_text(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON, which is how string columns store them; None for other text."""
    value = _json(text) if text.lstrip().startswith("[") else None
    first = value[0] if isinstance(value, list) and value else None
    return value if isinstance(first, dict) and ("role" in first or "from" in first) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def normalise_messages(value: Any) -> list[dict[str, Any]]:
    """Turn a chat into the form that templates take: a list of {"role", "content", ...}.

    ShareGPT's {"from", "value"} with its role names is understood, its function_call and OpenAI's old one become tool
    calls, and a list may be stored as JSON text. Keys without a value are dropped, because tables add them to every
    row. Raises ChatError for what is no chat, and for an unknown role.
    """
    if isinstance(value, str):
        value = messages_in_text(value) or value
    if not isinstance(value, list) or not value:
        raise ChatError(f"expected a list of messages, found {'an empty list' if value == [] else kind_of(value)}")
    messages = [_normalise(message, position) for position, message in enumerate(value)]
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
    if calls := _json(calls) if isinstance(calls, str) else calls:
        rest["tool_calls"] = calls
    role, content = rest.pop("role", None), rest.pop("content", None)
    if role is None and "from" in rest:
        speaker = rest.pop("from")
        role, content = _ROLES.get(str(speaker).lower()), rest.pop("value", None)
        if role is None:
            raise ChatError(f"{where}: unknown speaker {speaker!r}; known are {', '.join(_ROLES)}")
    if not isinstance(role, str):
        raise ChatError(f"{where}: no role; it has {', '.join(map(repr, message)) or 'no keys'}")
    if role.lower() not in _TEMPLATES_KNOW:
        role = _ROLES.get(role.lower(), role)
    if content is None and not rest:
        raise ChatError(f"{where} ({role!r}): no content")
    if isinstance(content, list):
        content = [
            {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else part
            for part in content
        ]
    elif not isinstance(content, str | None):
        raise ChatError(f"{where} ({role!r}): expected content as text or in parts, found {kind_of(content)}")
    return {"role": role, "content": content, **rest}


def _with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn calls in messages of their own, or under `function_call`, into `tool_calls`.

    Calls get ids of nine characters, which Mistral's templates ask for, and the results behind them name these.
    """
    found: list[dict[str, Any]] = []
    num_calls = 0
    waiting: list[tuple[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        told = _json(content) if role == _CALL and isinstance(content, str) else message.get("function_call")
        told = told if isinstance(told, list) else [told]
        calls = [call for call in told if isinstance(call, dict) and "name" in call]
        if calls:
            waiting = [(f"call{num_calls + number:05d}", str(call["name"])) for number, call in enumerate(calls)]
            num_calls += len(calls)
            tool_calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": call.get("arguments", {})}}
                for (call_id, name), call in zip(waiting, calls, strict=True)
            ]
            kept = {key: item for key, item in message.items() if key != "function_call"}
            message = {**kept, "content": None if role == _CALL else content, "tool_calls": tool_calls}
        elif role in ("tool", "function") and waiting:
            call_id, name = waiting.pop(0)
            message = {"tool_call_id": call_id, "name": name, **message}
        found.append({**message, "role": "assistant"} if calls or role == _CALL else message)
    return found


@dataclass(frozen=True)
class ChatSpec:
    """All it takes to render conversations in another process.

    Attributes:
        template: Jinja source.
        special_tokens: template variables such as bos_token.
        borders: texts of the added tokens. Tokenizers cut at them, so text on one side never changes the tokens on the
            other side.
        ends: those of them that may end a turn: the special ones.
    """

    template: str
    special_tokens: Mapping[str, str]
    borders: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def chat_spec(tokenizer: LoadedTokenizer) -> ChatSpec:
    """Collect what rendering needs of a tokenizer; raises TokenizerError where there is no template."""
    if (template := tokenizer.chat_template) is None:
        raise TokenizerError(
            f"{tokenizer.source}: this tokenizer has no chat template, but the corpus holds chats. Name the tokenizer "
            "of the chat model, or give a template with --chat-template."
        )
    added = tokenizer.backend.get_added_tokens_decoder()
    borders = {token.content for token in added.values() if token.content and not token.single_word}
    # A turn ends with a special token, or what the configuration calls eos.
    ending_ids = tokenizer.special_ids | {token_id for token_id, role in tokenizer.configured_ids if role == "eos"}
    ends = {token.content for token_id, token in added.items() if token_id in ending_ids and token.content}
    return ChatSpec(template, dict(tokenizer.special_tokens), tuple(borders), tuple(ends))


class ChatTemplate:
    """A compiled chat template: its source, and its syntax tree as Jinja parses it.

    Raises TokenizerError for a template that does not parse.
    """

    def __init__(self, spec: ChatSpec) -> None:
        from jinja2 import TemplateError

        self.source = spec.template
        self._refusal = TemplateError
        try:
            self._template = compile_chat_template(spec.template)
            self.syntax_tree = self._template.environment.parse(spec.template)
        except TemplateError as error:
            raise TokenizerError(f"the tokenizer's template, or --chat-template, does not parse: {error}.") from error
        fixed = {"strftime_now": RENDER_DATE.strftime, "tools": None, "documents": None}
        self._variables: dict[str, Any] = {**spec.special_tokens, **fixed}
        # Templates for tools alone take a list for granted.
        if not self._takes(tools=None) and self._takes(tools=[]):
            self._variables["tools"] = []

    def _takes(self, **variables: Any) -> bool:
        with suppress(ChatError):
            self.render([{"role": "user", "content": "Hi"}], **variables)
            return True
        return False

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """Render as `apply_chat_template(tokenize=False)` does; `variables` are further ones, such as `tools`.

        Raises ChatError where the template refuses the conversation.
        """
        try:
            text: str = self._template.render(
                self._variables, messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        # A template is a program: it may refuse in its own words, or trip over anything in a message.
        except (self._refusal, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatError(f"the chat template refuses this conversation: {error}") from error
        return text


@dataclass(frozen=True)
class Piece:
    """Text to tokenize, and the part of it that is counted.

    Attributes:
        text: tokenized as it is.
        header_chars: characters at the beginning that are context only.
        is_apart: whether it begins what a message says, counted by itself because no turn of the template holds it.
    """

    text: str
    header_chars: int = 0
    is_apart: bool = False


class ChatRenderer:
    """Renders conversations and finds the assistant's turns in them; raises as `ChatTemplate`."""

    def __init__(self, spec: ChatSpec) -> None:
        self._template = ChatTemplate(spec)
        self._border = _any_of(spec.borders)
        self._end = _any_of(spec.ends)
        self._longest = max(map(len, spec.borders), default=0)

    def all_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Render the conversation in the first form that loses no content; ChatError where all forms are refused."""
        rendered: list[str] = []
        for form in _forms(messages):
            with suppress(ChatError):
                text = self._template.render(form)
                if all(self._find(text, _content(message), 0) for message in messages):
                    return [Piece(text)]
                rendered.append(text)
        return [Piece(rendered[0] if rendered else self._template.render(messages))]

    def assistant_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Return each turn of the assistant, with the text before it that its tokens depend on."""
        turns: dict[int, Piece | None]
        turns = {position: None for position, message in enumerate(messages) if message["role"] == "assistant"}
        for form in _forms(messages):
            turns = {position: turn or self._turn(form, position) for position, turn in turns.items()}
            if None not in turns.values():
                break
        pieces: list[Piece] = []
        for position, turn in turns.items():
            spoken = filter(None, _own_texts(messages[position]))
            apart = [Piece(text, is_apart=number == 0) for number, text in enumerate(spoken)]
            pieces += apart if turn is None else [turn]
        return pieces

    def _turn(self, messages: Sequence[Message], position: int) -> Piece | None:
        """Return the turn of one assistant message; None where the template refuses it or it does not count."""
        try:
            before = self._template.render(messages[:position], add_generation_prompt=True)
            text = self._template.render(messages[: position + 1])
        except ChatError:
            return None
        start = self._start(before, text)
        stop = self._stop(messages, position, text, start)
        if stop is None:
            return None
        begin = self._last_border(text, start)
        return Piece(text[begin:stop], start - begin)

    @cached_property
    def _usual(self) -> tuple[str, str]:
        """Find the generation prompt and the token that ends a turn of words, by one question; "" where none shows."""
        question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": _PROBE}
        for form in _forms([question, answer]):
            with suppress(ChatError):
                asked, prompted = (self._template.render(form[:1], prompted) for prompted in (False, True))
                text = self._template.render(form)
                if _PROBE in text:
                    end = self._end.search(text, text.rindex(_PROBE))
                    prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
                    return prompt, end.group() if end else ""
        return "", ""

    def _start(self, before: str, text: str) -> int:
        """Return where the turn begins: behind the longest common prefix of the two renderings."""
        if text.startswith(before):
            return len(before)
        letters = zip(before, text, strict=False)
        start = next((place for place, (one, other) in enumerate(letters) if one != other), len(text))
        # The history spells something else than the generation prompt. It may still have the prompt, behind a shift,
        # as where a template ends the whole text and not each turn.
        prompt, _ = self._usual
        found = text.find(prompt, max(start - len(prompt), 0), start + 2 * len(prompt)) if prompt.strip() else -1
        if found >= 0:
            return found + len(prompt)
        # Letters that two added tokens share, as <think> and <tool_call> do, are no common prefix.
        cut = [token.start() for one in (before, text) if (token := self._token_around(one, start)) is not None]
        return min([start, *cut])

    def _stop(self, messages: Sequence[Message], position: int, text: str, start: int) -> int | None:
        """Return where the turn that begins at `start` ends; None unless it counts."""
        message = messages[position]
        content, reasoning, calls = _content(message), _reasoning(message), list(_call_words(message))
        prompt, usual_end = self._usual
        # What the generation prompt opens, such as a thought, may stand in the message, too.
        low = max(start - len(prompt), 0)
        own = [self._find(text, content, low)]
        if isinstance(reasoning, str) and own[0] is not None:
            own.append(self._find(text, reasoning, low, own[0][0] if content.strip() else len(text)))
        for spellings in calls:
            places = [place for words in spellings if (place := self._find(text, words, low)) is not None]
            own.append(max(places, key=lambda place: place[1], default=None))
        held = [place for place in own if place is not None]
        if len(held) < len(own):
            return None
        last = max(start, *(stop for _, stop in held))
        end = self._end.search(text, last)
        stop = len(text) if end is None else end.end()
        # Behind a tool call or a thought, closing marks may come first: the turn ends as one of words does.
        if (calls or not content.strip()) and usual_end and (found := text.find(usual_end, last)) >= 0:
            stop = found + len(usual_end)
        return stop if self._has_no_others(messages[:position], text, start, stop, held) else None

    def _has_no_others(
        self, others: Sequence[Message], text: str, start: int, stop: int, own: Sequence[tuple[int, int]]
    ) -> bool:
        """Check that a turn, apart from the message's own words, holds no text of another message."""
        rest: list[str] = []
        at = start
        for first, behind in [*sorted(own), (stop, stop)]:
            rest += map(str.strip, self._border.split(text[at : max(first, at)]))
            at = max(at, behind)
        if not any(rest):
            return True
        previous = next((words for words in map(_content, reversed(others)) if words.strip()), "").strip()
        if 0 < len(previous) < _BORROWED_CHARS and text.find(previous, 0, start) < 0:
            return False
        told = "\n".join(words for message in others for words in _own_texts(message))
        grams = (part[at : at + _BORROWED_CHARS] for part in rest for at in range(len(part) - _BORROWED_CHARS + 1))
        return not any(gram in told and gram not in self._template.source for gram in grams)

    def _find(self, text: str, words: str, low: int, high: int | None = None) -> tuple[int, int] | None:
        """Return the last place between `low` and `high` that has the words, white space aside, or None."""
        high = len(text) if high is None else high
        wanted = words.strip()
        if not wanted:
            return low, low
        at = text.rfind(wanted, low, high)
        # Letters of an added token are no words.
        while (
            at >= 0
            and len(wanted) < self._longest
            and any(self._token_around(text, place) for place in (at, at + len(wanted)))
        ):
            at = text.rfind(wanted, low, at + len(wanted) - 1)
        if at >= 0:
            return at, at + len(wanted)
        shown = [index for index in range(low, high) if not text[index].isspace()]
        wanted = "".join(words.split())
        at = "".join(text[low:high].split()).rfind(wanted)
        return None if at < 0 else (shown[at], shown[at + len(wanted) - 1] + 1)

    def _last_border(self, text: str, stop: int) -> int:
        """Return the start of the last added token before a place; 0 without one."""
        for low in (max(stop - 256, 0), 0):
            starts = [token.start() for token in self._border.finditer(text, low, stop)]
            # A token found where the search begins may be the end of a longer one.
            if starts and (low == 0 or starts[-1] >= low + self._longest):
                return starts[-1]
        return 0

    def _token_around(self, text: str, place: int) -> re.Match[str] | None:
        """Return the added token that has a place inside it, not at its ends, or None."""
        nearby = self._border.finditer(text, max(place - self._longest, 0), place + self._longest)
        return next((token for token in nearby if token.start() < place < token.end()), None)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    # Where one is the beginning of another, tokenizers take the longest.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield a chat in the forms that templates take, the usual one first.

    Contents are text, or in parts for templates that take nothing else. A missing content is empty, or None for those
    that ask for it. Arguments of tool calls are objects, since most templates write them as JSON and would quote JSON
    text (vLLM parses them, too), or JSON text.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    is_short = any(message["content"] is None for message in messages)
    for as_text, null, in_parts in product(
        (False, True) if has_calls else (False,), ("", None) if is_short else ("",), (False, True)
    ):
        with suppress(ChatError):
            yield [_formed(message, as_text, null, in_parts) for message in messages]


def _formed(message: Message, as_text: bool, null: str | None, in_parts: bool) -> Message:
    content, calls, reasoning = message["content"], message.get("tool_calls"), _reasoning(message)
    if content is None:
        message = {**message, "content": null}
    elif in_parts and isinstance(content, str):
        message = {**message, "content": [{"type": "text", "text": content}]}
    elif not in_parts and isinstance(content, list):
        if not all(isinstance(_text_of(part), str) for part in content):
            raise ChatError("a content has parts that are no text")
        message = {**message, "content": _content(message)}
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_formed_call(call, as_text) for call in calls]}
    if reasoning is not None:
        # Under every name that templates read, as transformers' apply_chat_template has it.
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _formed_call(call: Any, as_text: bool) -> Any:
    function = _function(call)
    if "arguments" not in function:
        return call
    arguments = function["arguments"]
    if not as_text:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _function(call: Any) -> Mapping[str, Any]:
    """Return the name and arguments of a tool call, which OpenAI's form has under `function`."""
    found = call.get("function", call) if isinstance(call, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _parsed(arguments: Any) -> Any:
    parsed = _json(arguments) if isinstance(arguments, str) else None
    return arguments if parsed is None else parsed


def _reasoning(message: Message) -> Any:
    return next((message[key] for key in _REASONING if message.get(key) is not None), None)


def _text_of(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part


def _content(message: Message) -> str:
    """Return the text of a message's content, parts with line ends between them as in vLLM."""
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(text for text in map(_text_of, content) if isinstance(text, str))
    return content or ""


def _calls(message: Message) -> list[tuple[str, Any]]:
    """Return name and arguments of each tool call."""
    calls = message.get("tool_calls")
    functions = [function for call in (calls if isinstance(calls, list) else []) if (function := _function(call))]
    return [(str(function.get("name")), _parsed(function.get("arguments"))) for function in functions]


def _own_texts(message: Message) -> list[str]:
    """Return what a message says: its reasoning, its content, and its tool calls as JSON."""
    reasoning = _reasoning(message)
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in _calls(message)
    ]
    return [reasoning if isinstance(reasoning, str) else "", _content(message), *calls]


def _call_words(message: Message) -> Iterator[tuple[str, ...]]:
    """Yield every word of the tool calls, each in the ways that templates spell it."""
    waiting: list[Any] = [*_calls(message)]
    for value in waiting:
        if isinstance(value, Mapping):
            waiting += [part for item in value.items() if item[1] is not None for part in item]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str):
            yield value, json.dumps(value, ensure_ascii=False)[1:-1]
