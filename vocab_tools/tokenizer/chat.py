"""Conversations → the stretches of text whose tokens are counted, through the tokenizer's own chat template.

With roles "all" that is the rendered conversation. With roles "assistant" it is what the model itself writes: each
assistant turn from where the generation prompt ends to the end-of-turn token, that token included. For ChatML,

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                         └──────────────┘ counted

Where the turns lie is found in one of three ways, and checked against the text that the template really renders:

1. a template with `{% generation %}` marks says so itself; a mark that stops short of an end-of-turn token is extended;
2. messages of plain role and content: the template is rendered once per sequence of roles with markers for contents
   (the skeleton); a conversation must then be exactly the skeleton with its contents, as they are or stripped;
3. all else: rendering the messages before a turn with the generation prompt must give a beginning of the whole text,
   and so must rendering them with the turn; if only the first holds, the turn ends with the next end-of-turn token.

A conversation that none of them explains is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from ..errors import TokenizerError

if TYPE_CHECKING:
    from .tokenizer import LoadedTokenizer

# Templates that print a date would count other tokens every day; this is the one that Llama-3's falls back to.
RENDER_DATE = datetime(2024, 7, 26)
MAX_CONVERSATION_CHARS = 4 << 20

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
# Speakers that some data names so in `role` too, where templates expect user and assistant; they know the other names.
_OTHER_NAMES = {name: role for name, role in _ROLES.items() if role in ("user", "assistant")}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "\ue000{}\ue001"


class ChatError(ValueError):
    """A conversation cannot be rendered, or its assistant turns cannot be told apart; the message says why."""


@dataclass(frozen=True)
class ChatSpec:
    """All it takes to render conversations in another process.

    Attributes:
        template: Jinja source.
        special_tokens: template variables such as bos_token.
        borders: texts of the added tokens; tokenisers cut at them, so that text on one side never changes tokens on
            the other.
    """

    template: str
    special_tokens: Mapping[str, str]
    borders: tuple[str, ...]


def chat_spec(tokenizer: LoadedTokenizer, template: str | None = None) -> ChatSpec:
    """Take from a tokenizer what rendering needs.

    Args:
        tokenizer: the tokenizer.
        template: Jinja source to use in place of the tokenizer's own.

    Raises:
        TokenizerError: there is no template.
    """
    template = template if template is not None else tokenizer.chat_template
    if template is None:
        raise TokenizerError(
            f"{tokenizer.source}: this tokenizer has no chat template, but the corpus holds chats. Name the tokenizer "
            "of the chat model, or give a template with --chat-template."
        )
    added = tokenizer.backend.get_added_tokens_decoder().values()
    borders = sorted({token.content for token in added if token.content and not token.single_word})
    # Where one is the beginning of another, tokenisers take the longest.
    return ChatSpec(template, dict(tokenizer.special_tokens), tuple(sorted(borders, key=len, reverse=True)))


@dataclass(frozen=True)
class Piece:
    """Text to tokenise and the part of it that is counted.

    Attributes:
        text: tokenised as it stands.
        header_chars: characters at the beginning that are context only.
        spans: where given, only these (start, stop) stretches count; then `text` is a whole conversation.
    """

    text: str
    header_chars: int = 0
    spans: tuple[tuple[int, int], ...] | None = None


def messages_in_text(text: str) -> list[Any] | None:
    """The messages that a text holds as JSON, as tables store them whose columns are strings; None for other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    first = value[0] if value else None
    return value if isinstance(first, dict) and ("role" in first or "from" in first) else None


def normalise_messages(value: Any) -> list[dict[str, Any]]:
    """Bring a chat into the form that templates take: a list of {"role", "content", ...}.

    ShareGPT's {"from", "value"} and its names of speakers are understood, and a list told as JSON text; keys without a
    value are dropped, since tables fill them in.

    Raises:
        ChatError: it is no chat, or a role is unknown.
    """
    if isinstance(value, str):
        value = messages_in_text(value) or value
    if not isinstance(value, list) or not value:
        raise ChatError(f"expected a list of messages, found {'an empty list' if value == [] else _kind(value)}")
    messages = []
    for position, message in enumerate(value):
        if not isinstance(message, dict):
            raise ChatError(f"message {position}: expected an object with role and content, found {_kind(message)}")
        role, content = message.get("role"), message.get("content")
        rest = {key: item for key, item in message.items() if item is not None and key not in ("role", "content")}
        if role is None and "from" in message:
            found = rest.pop("from", None)
            role = _ROLES.get(str(found).lower())
            content = rest.pop("value", None)
            if role is None:
                raise ChatError(f"message {position}: unknown speaker {found!r}; known are {', '.join(_ROLES)}")
        if not isinstance(role, str):
            raise ChatError(f"message {position}: no role; it has {', '.join(message) or 'no keys'}")
        role = _OTHER_NAMES.get(role.lower(), role)
        if content is None and not rest:
            raise ChatError(f"message {position} ({role}): no content")
        if isinstance(content, list):
            content = [_without_nulls(part) for part in content]
        messages.append({"role": role, "content": content, **rest})
    return messages


def _without_nulls(part: Any) -> Any:
    return {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else part


@dataclass(frozen=True)
class _Turn:
    """Where one assistant turn lies between the literals of a skeleton.

    Attributes:
        message: its position in the conversation.
        lead: characters of the literal before the content that the model writes itself.
        trail: characters of the literal behind the content up to and with the end-of-turn token.
        header: text from the last border before the turn to its beginning, None without a border.
        closed: whether the turn ends with a border.
    """

    message: int
    lead: int
    trail: int
    header: str | None
    closed: bool


@dataclass(frozen=True)
class _Skeleton:
    literals: tuple[str, ...]
    turns: tuple[_Turn, ...]


class ChatRenderer:
    """Renders conversations and finds the assistant's turns in them."""

    def __init__(self, spec: ChatSpec, exact: bool = False) -> None:
        """Compile the template.

        Args:
            spec: the template and its variables.
            exact: tokenise whole conversations only, for tokenizers where cutting at borders changes tokens.

        Raises:
            TokenizerError: the template does not parse.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            self._template = _compile_jinja_template(spec.template)
        except TemplateError as error:
            raise TokenizerError(f"the chat template does not parse: {error}") from error
        self._variables = {
            **spec.special_tokens,
            "strftime_now": RENDER_DATE.strftime,
            "tools": None,
            "documents": None,
        }
        self._border = re.compile("|".join(map(re.escape, spec.borders)) or "(?!)")
        self._marked = bool(_GENERATION.search(spec.template))
        self._exact = exact
        self._skeletons: dict[tuple[str, ...], _Skeleton | None] = {}
        self._end_of_turn: str | Literal[False] | None = False
        self._generation_prompt: str | Literal[False] | None = False
        self._parts: bool | None = None
        self._arguments_as_text: bool | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        """Render as `apply_chat_template(tokenize=False)` does, at a fixed date.

        Raises:
            ChatError: the template refuses the conversation.
        """
        with _template_errors():
            text: str = self._template.render(
                messages=_with_reasoning(messages), add_generation_prompt=add_generation_prompt, **self._variables
            )
        if len(text) > MAX_CONVERSATION_CHARS:
            raise ChatError(f"the conversation is too long: {len(text):,} of {MAX_CONVERSATION_CHARS:,} characters")
        return text

    def all_pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """Return the rendered conversation."""
        return [Piece(self.render(self._readable(messages)))]

    def assistant_pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """Return what the assistant writes, each turn with the few characters before it that its tokens depend on.

        Raises:
            ChatError: see the top of this module.
        """
        if not any(message["role"] == "assistant" for message in messages):
            return []
        messages = self._readable(messages)
        if not self._marked and not self._exact and all(map(_is_simple, messages)):
            skeleton = self._skeleton(tuple(message["role"] for message in messages))
            if skeleton is not None:
                pieces = self._fill(skeleton, messages)
                if pieces is not None:
                    return pieces
        text, spans = self.assistant_spans(messages)
        return self._cut(text, spans)

    def _readable(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return self._with_readable_calls(self._with_readable_parts(messages))

    def _with_readable_calls(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Give arguments that are JSON text, OpenAI's form, as objects to a template that does not write text as it is.

        Most templates write arguments as JSON, and would quote the text once more; vLLM reads it too.
        """
        if not any("tool_calls" in message for message in messages) or self._takes_arguments_as_text():
            return messages
        return [
            {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
            if isinstance(message.get("tool_calls"), list)
            else message
            for message in messages
        ]

    def _takes_arguments_as_text(self) -> bool:
        if self._arguments_as_text is None:
            text = '{"probe": 1}'
            call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": text}}
            try:
                rendered = self.render(
                    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
                )
            except ChatError:
                rendered = ""
            self._arguments_as_text = text in rendered
        return self._arguments_as_text

    def _with_readable_parts(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Join contents given in parts to one text, by line ends as vLLM does, for a template that knows no parts.

        Such a template would write the list itself into the text, or fail.
        """
        if not any(isinstance(message["content"], list) for message in messages) or self._takes_parts():
            return messages
        return [
            {**message, "content": _joined_parts(message["content"], position)}
            if isinstance(message["content"], list)
            else message
            for position, message in enumerate(messages)
        ]

    def _takes_parts(self) -> bool:
        if self._parts is None:
            text = _MARKER.format(0)
            try:
                rendered = self.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
            except ChatError:
                rendered = ""
            self._parts = rendered.count(text) == 1 and f"'{text}'" not in rendered and f'"{text}"' not in rendered
        return self._parts

    def assistant_spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation and the (start, stop) of each assistant turn in it.

        Raises:
            ChatError: see the top of this module.
        """
        return self._marked_spans(messages) if self._marked else self._prefix_spans(messages)

    def _cut(self, text: str, spans: Sequence[tuple[int, int]]) -> list[Piece]:
        pieces = []
        behind = 0
        for start, stop in spans:
            borders = list(self._border.finditer(text, behind, start))
            closed = any(found.end() == stop for found in self._border.finditer(text, start, stop))
            if self._exact or not borders or not closed:
                return [Piece(text, spans=tuple(spans))]
            begin = borders[-1].start()
            pieces.append(Piece(text[begin:stop], start - begin))
            behind = stop
        return pieces

    def _marked_spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        rendered: list[str] = []
        marks: list[tuple[int, int]] = []
        with _template_errors(), self._template.environment.activate_tracker(rendered, marks):
            arguments = {"messages": _with_reasoning(messages), "add_generation_prompt": False}
            rendered.extend(self._template.generate(**arguments, **self._variables))
        text = "".join(rendered)
        if not marks:
            raise ChatError("the template's {% generation %} marks cover no turn of this conversation")
        spans = []
        for start, stop in marks:
            closed = any(found.end() == stop for found in self._border.finditer(text, start, stop))
            following = None if closed else self._border.match(text, stop)
            spans.append((start, following.end() if following else stop))
        return text, spans

    def _prefix_spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        text = self.render(messages)
        spans = []
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:position], add_generation_prompt=True)
            if not text.startswith(before):
                raise ChatError(
                    f"message {position}: cannot tell where this assistant turn begins, because the template renders "
                    "the messages before it differently when they stand alone. Count with --roles all, or give a "
                    "--chat-template with {% generation %} marks"
                )
            spans.append((len(before), self._end_of(text, len(before), messages, position)))
        return text, spans

    def _end_of(self, text: str, start: int, messages: Sequence[Mapping[str, Any]], position: int) -> int:
        with_turn = text if position == len(messages) - 1 else self.render(messages[: position + 1])
        if text.startswith(with_turn) and len(with_turn) > start:
            return start + self._turn_length(with_turn[start:])
        token = self._usual_end_of_turn()
        found = text.find(token, start) if token else -1
        if not token or found < 0:
            raise ChatError(
                f"message {position}: cannot tell where this assistant turn ends. Count with --roles all, or give a "
                "--chat-template with {% generation %} marks"
            )
        return found + len(token)

    def _turn_length(self, tail: str) -> int:
        """Length of a text up to its end-of-turn token; white space after it is the template's, as in ChatML."""
        borders = list(self._border.finditer(tail))
        return borders[-1].end() if borders and not tail[borders[-1].end() :].strip() else len(tail)

    def _usual_end_of_turn(self) -> str | None:
        """Return the token that ends an assistant turn in a plain conversation of two, or None."""
        if self._end_of_turn is False:
            self._end_of_turn = None
            skeleton = self._skeleton(("user", "assistant"))
            if skeleton is not None and skeleton.turns[0].closed:
                turn = skeleton.turns[0]
                behind = skeleton.literals[turn.message + 1][: turn.trail]
                last = list(self._border.finditer(behind))
                self._end_of_turn = last[-1].group() if last else None
        return self._end_of_turn or None

    def _usual_generation_prompt(self) -> str | None:
        """Return what the template adds when it is asked for a generation prompt, or None."""
        if self._generation_prompt is False:
            self._generation_prompt = None
            question = [{"role": "user", "content": _MARKER.format(0)}]
            try:
                plain, prompted = self.render(question), self.render(question, add_generation_prompt=True)
            except ChatError:
                return None
            if prompted.startswith(plain):
                self._generation_prompt = prompted[len(plain) :]
        return self._generation_prompt or None

    def _skeleton(self, roles: tuple[str, ...]) -> _Skeleton | None:
        if roles not in self._skeletons:
            # Conversations have few patterns; the bound is for a corpus that has very many.
            if len(self._skeletons) >= 4096:
                self._skeletons.clear()
            self._skeletons[roles] = self._make_skeleton(roles)
        return self._skeletons[roles]

    def _make_skeleton(self, roles: tuple[str, ...]) -> _Skeleton | None:
        messages = [{"role": role, "content": _MARKER.format(position)} for position, role in enumerate(roles)]
        try:
            text = self.render(messages)
        except ChatError:
            return None
        literals = []
        behind = 0
        for message in messages:
            if text.count(message["content"]) != 1 or (at := text.find(message["content"], behind)) < 0:
                return None
            literals.append(text[behind:at])
            behind = at + len(message["content"])
        literals.append(text[behind:])
        turns = []
        at = 0
        for position, role in enumerate(roles):
            at += len(literals[position])
            if role == "assistant":
                turn = self._make_turn(messages, position, text, at, literals)
                if turn is None:
                    return None
                turns.append(turn)
            at += len(messages[position]["content"])
        return _Skeleton(tuple(literals), tuple(turns))

    def _make_turn(
        self, messages: list[dict[str, str]], position: int, text: str, content: int, literals: list[str]
    ) -> _Turn | None:
        """Place one turn; `content` is where its marker stands in the skeleton's text."""
        literal, behind = literals[position], literals[position + 1]
        lead = self._lead(messages, position, text, content, literal)
        trail = self._trail(messages, position, text, content + len(messages[position]["content"]), behind)
        if lead is None or trail is None:
            return None
        before = literal[: len(literal) - lead]
        borders = list(self._border.finditer(before))
        header = before[borders[-1].start() :] if borders else None
        closed = any(found.end() == trail for found in self._border.finditer(behind, 0, trail))
        return _Turn(position, lead, trail, header, closed)

    def _lead(self, messages: list[dict[str, str]], position: int, text: str, content: int, literal: str) -> int | None:
        try:
            before = self.render(messages[:position], add_generation_prompt=True)
        except ChatError:
            before = None
        if before is not None and text.startswith(before) and 0 <= content - len(before) <= len(literal):
            return content - len(before)
        prompt = self._usual_generation_prompt()
        return 0 if prompt and literal.endswith(prompt) else None

    def _trail(
        self, messages: list[dict[str, str]], position: int, text: str, content_end: int, behind: str
    ) -> int | None:
        with_turn = text if position == len(messages) - 1 else self.render(messages[: position + 1])
        if text.startswith(with_turn) and len(with_turn) >= content_end:
            return self._turn_length(with_turn[content_end:])
        if len(messages) == 2:
            return None
        token = self._usual_end_of_turn()
        found = behind.find(token) if token else -1
        return found + len(token) if token and found >= 0 else None

    def _fill(self, skeleton: _Skeleton, messages: Sequence[Mapping[str, Any]]) -> list[Piece] | None:
        """Put contents into a skeleton; None when the template does something else with them."""
        text = self.render(messages)
        literals = skeleton.literals
        if not text.startswith(literals[0]):
            return None
        at = len(literals[0])
        contents = []
        for message, behind in zip(messages, literals[1:], strict=True):
            content = next(
                (
                    form
                    for form in _forms(message["content"])
                    if text.startswith(form, at) and text.startswith(behind, at + len(form))
                ),
                None,
            )
            if content is None:
                return None
            contents.append((at, at + len(content)))
            at += len(content) + len(behind)
        if at != len(text):
            return None
        spans = []
        for turn in skeleton.turns:
            start, stop = contents[turn.message]
            spans.append((start - turn.lead, stop + turn.trail))
        if any(turn.header is None or not turn.closed for turn in skeleton.turns):
            return [Piece(text, spans=tuple(spans))]
        return [
            Piece(text[start - len(turn.header or "") : stop], len(turn.header or ""))
            for turn, (start, stop) in zip(skeleton.turns, spans, strict=True)
        ]


def _joined_parts(parts: Sequence[Any], position: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(
                f"message {position}: a part of its content is no text ({kind}), and the template takes none"
            )
        texts.append(text)
    return "\n".join(texts)


def _with_object(call: Any) -> Any:
    """A tool call, bare or inside "function", with arguments as an object where they are the JSON text of one."""
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


def _forms(content: str) -> Iterator[str]:
    """The content as it is, then as templates trim it."""
    yield content
    yield content.strip()
    yield content.rstrip()
    yield content.lstrip()


def _is_simple(message: Mapping[str, Any]) -> bool:
    return len(message) == 2 and isinstance(message["content"], str)


def _with_reasoning(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Give reasoning under all the names that templates read, as transformers' apply_chat_template does."""
    if all(len(message) == 2 for message in messages):
        return messages
    aliased = []
    for message in messages:
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        aliased.append(message)
    return aliased


class _template_errors:  # noqa: N801 - used as a function
    """Turn what a template raises on a conversation into a ChatError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from jinja2 import TemplateError

        if isinstance(error, TemplateError | TypeError | ValueError | KeyError | AttributeError | IndexError):
            raise ChatError(f"the chat template refuses this conversation: {error}") from error


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
