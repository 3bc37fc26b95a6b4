"""Chats → what an assistant wrote in them, through the tokenizer's own chat template.

The turn of assistant message k is found by rendering the chat twice: `messages[:k]` with the generation prompt, and
`messages[:k+1]`. It begins behind the first and ends with the last special token that the template writes for it. For
ChatML and one question:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                         └──────────────┘ counted

Its tokens are those of the whole rendering that begin there. An end of text ends a turn, also one that comes with the
next message only, as Apertus' does. Two things are learned from a chat of invented words: the header of a turn, for a
template without a generation prompt, and what stands behind the last turn alone, such as Phi-3's `<|endoftext|>`.

Where `{% generation %}` marks the answer, exactly that is the turn. Where the first rendering is no beginning of the
second, as gpt-oss drops earlier thoughts once an answer follows, the turn is sought behind all words of the messages
before it, which are found by changing them. What a turn does not show of its message is counted by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from .compat import compile_chat_template
from .errors import TokenizerError
from .messages import TEMPLATE_REASONING, ChatError, Message, call_texts, content_text, template_forms
from .tokenizer import LoadedTokenizer

# A template that prints today's date would change the counts every day. Llama-3's template falls back to this date.
RENDER_DATE = datetime(2024, 7, 26)
# Words this long are found in a rendering by themselves; shorter ones by changing them, since "A" is in "Assistant:".
_LONG_WORDS = 12
# Characters for private use, which no chat should hold.
_PROBE = "\ue000probe\ue001"
_ASKED, _ANSWERED, _NEXT = "\ue000asked\ue001", "\ue000answered\ue001", "\ue000next\ue001"
_MARK, _UNMARK = "\ue002", "\ue003"
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Marks of thoughts and the like, between which a template may show a part of a content.
_TAG = re.compile(r"<[^\s<>]{1,24}>|\[/?[A-Z_]{1,16}\]")

_AS_JSON = re.compile(r"""["']type["']: *["'](text|thinking)["']""")

Span = tuple[int, int]


@dataclass(frozen=True)
class ChatSpec:
    """All it takes to render conversations in another process: a template, its variables, and texts of added tokens.

    Tokenizers cut at the `borders`, all of these texts, so text on one side never changes the tokens on the other.
    `ends` are those that may end a turn, the special ones; `eos` those that end a text, by the configuration.
    """

    template: str
    variables: Mapping[str, Any]
    borders: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    eos: tuple[str, ...] = ()


def chat_spec(tokenizer: LoadedTokenizer) -> ChatSpec:
    """Collect what rendering needs of a tokenizer; raises TokenizerError where there is no template."""
    if (template := tokenizer.chat_template) is None:
        problem = "this tokenizer has no chat template, but the corpus holds chats"
        advice = "Name the tokenizer of the chat model, or give a template with --chat-template."
        raise TokenizerError(f"{tokenizer.source}: {problem}. {advice}")
    added = tokenizer.backend.get_added_tokens_decoder()
    borders = {token.content for token in added.values() if token.content and not token.single_word}
    eos_ids = {token_id for token_id, role in tokenizer.configured_ids if role == "eos"}
    texts = {token_id: token.content for token_id, token in added.items() if token.content}
    ends = tuple(text for token_id, text in texts.items() if token_id in tokenizer.special_ids | eos_ids)
    eos = tuple(text for token_id, text in texts.items() if token_id in eos_ids)
    variables = {**tokenizer.special_tokens, **tokenizer.chat_template_kwargs}
    return ChatSpec(template, variables, tuple(borders), ends, eos)


class ChatTemplate:
    """A compiled chat template and its syntax tree; raises TokenizerError for a template that does not parse."""

    def __init__(self, spec: ChatSpec) -> None:
        from jinja2 import TemplateError

        self._refusal = TemplateError
        self.has_marks = _GENERATION.search(spec.template) is not None
        source = _GENERATION.sub(_marked, spec.template)
        try:
            self._template = compile_chat_template(source)
            self.syntax_tree = self._template.environment.parse(source)
        except (TemplateError, RecursionError) as error:
            raise TokenizerError(f"the tokenizer's template, or --chat-template, does not parse: {error}.") from error
        fixed = {"strftime_now": RENDER_DATE.strftime, "tools": None, "documents": None}
        self._variables: dict[str, Any] = {**fixed, **spec.variables}
        # Templates for tools alone take a list for granted.
        if self._variables["tools"] is None and not self._takes(tools=None) and self._takes(tools=[]):
            self._variables["tools"] = []

    def _takes(self, **variables: Any) -> bool:
        with suppress(ChatError):
            self.render([{"role": "user", "content": "Hi"}], **variables)
            return True
        return False

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """Render as `apply_chat_template(tokenize=False)` does; ChatError where the template refuses the chat."""
        return self.render_marked(messages, add_generation_prompt, **variables)[0]

    def render_marked(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """Render, and find what `{% generation %}` marks."""
        try:
            text: str = self._template.render(
                {**self._variables, **variables}, messages=messages, add_generation_prompt=add_generation_prompt
            )
        # A template is a program: it may refuse in its own words, or trip over anything in a message.
        except (self._refusal, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatError(f"the chat template refuses this conversation: {error}") from error
        except RecursionError as error:
            raise ChatError("the chat template calls itself without an end") from error
        if _AS_JSON.search(text) and any(isinstance(message["content"], list) for message in messages):
            raise ChatError("the chat template writes parts of a content down as JSON")
        if not self.has_marks:
            return text, []
        shown, spans = "", list[Span]()
        for number, part in enumerate(re.split(f"[{_MARK}{_UNMARK}]", text)):
            if number % 2 and part:
                spans.append((len(shown), len(shown) + len(part)))
            shown += part
        return shown, spans


def _marked(tag: re.Match[str]) -> str:
    """Write a mark where a `generation` tag stands, with its rules for the white space on both sides."""
    left, is_end, right = tag.groups()
    block, mark = ("endif", _UNMARK) if is_end else ("if true", _MARK)
    return f"{{%{left} {block} %}}{mark}{{% {block} {right}%}}"


@dataclass(frozen=True)
class Piece:
    """Text to tokenize, whose first `header_chars` characters are context only and not counted.

    `is_apart`: whether it begins what a message says, counted by itself because no turn of the template holds it.
    """

    text: str
    header_chars: int = 0
    is_apart: bool = False


@dataclass(frozen=True)
class _Layout:
    """Surroundings of the words of an assistant's turn, learned from a chat of invented words.

    `closing` stands behind the words of a user, `only_last` behind the end of the last turn alone. `openings` begin a
    turn: the generation prompt first, or without one the header that the history has. `late_end` is an end of text that
    only the message of a user brings.
    """

    closing: str = ""
    openings: tuple[str, ...] = ()
    only_last: str = ""
    late_end: str = ""


@dataclass(frozen=True)
class _Turn:
    """The pieces of an assistant's turn, and the texts of its message that it does not show."""

    pieces: list[Piece]
    missing: list[str]


class ChatRenderer:
    """Renders conversations and finds the assistant's turns in them; raises as `ChatTemplate`."""

    def __init__(self, spec: ChatSpec) -> None:
        self._template = ChatTemplate(spec)
        # Others would write such a part down as JSON.
        self._takes_thoughts = re.search("[\"']thinking[\"']", spec.template) is not None
        self._border = _any_of(spec.borders)
        self._end = _any_of(spec.ends)
        self._eos = spec.eos
        self._late_eos = re.compile(rf"\s*(?:{_any_of(spec.eos).pattern})")
        self._longest = max(map(len, spec.borders), default=0)

    def all_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Render a chat in the form that shows the most, then what no form shows; ChatError where all are refused."""
        best: tuple[str, list[str]] | None = None
        for form in template_forms(messages, self._takes_thoughts):
            with suppress(ChatError):
                text = self._template.render(form)
                missing = [words for message in form for words in self._find_words(message, text, 0)[1]]
                if best is None or len(missing) < len(best[1]):
                    best = text, missing
                if not missing:
                    break
        text, missing = best or (self._template.render(messages), [])
        return [Piece(text), *_apart(missing)]

    def assistant_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Return each turn of the assistant, with the text before it that its tokens depend on."""
        positions = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
        turns = {position: _Turn([], _texts(messages[position])) for position in positions}
        for form in template_forms(messages, self._takes_thoughts):
            for position, best in turns.items():
                if best.missing or not best.pieces:
                    turn = self._turn(form, position)
                    if turn is not None and (not best.pieces or len(turn.missing) < len(best.missing)):
                        turns[position] = turn
            if all(turn.pieces and not turn.missing for turn in turns.values()):
                break
        return [piece for turn in turns.values() for piece in (*turn.pieces, *_apart(turn.missing))]

    def _turn(self, messages: Sequence[Message], position: int) -> _Turn | None:
        """Return the turn of one assistant message; None where the template refuses it, or shows none of its words."""
        try:
            before = self._template.render(messages[:position], add_generation_prompt=True)
            text, marked = self._template.render_marked(messages[: position + 1])
        except ChatError:
            return None
        start = self._start(messages, position, before, text)
        if start is None:
            return None
        marked = [span for span in marked if span[1] > start]
        visible = _only(text, marked) if marked else text
        found, missing = self._find_words(messages[position], visible, start, messages[:position])
        if missing and not found:
            return None
        if not marked:
            last = max([start, *(stop for _, stop in found)])
            whole, stop = self._stop(messages, position, text, last)
            rest = self._border.sub("", _without(whole[:stop], found)[start:]).replace("\0", "")
            # The template may have put words of other messages among those of its own.
            if rest.strip() and self._end_of_others(messages, position, text) > start:
                return None
            text, marked = whole, [(start, stop)]
        pieces = []
        for start, stop in marked:
            begin = self._last_border(text, start)
            pieces.append(Piece(text[begin:stop], start - begin))
        return _Turn(pieces, missing)

    @cached_property
    def _layout(self) -> _Layout:
        """Learn the layout from a question, an answer and another question."""
        chat = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}]
        for form in template_forms([*chat, {"role": "user", "content": _NEXT}]):
            with suppress(ChatError):
                asked, prompted = (self._template.render(form[:1], is_prompted) for is_prompted in (False, True))
                text = self._template.render(form[:2])
                if _ANSWERED in text:
                    followed = ""
                    with suppress(ChatError):
                        followed = self._template.render(form)
                    return self._learn(form[:2], asked, prompted, text, followed)
        return _Layout()

    def _learn(self, chat: Sequence[Message], asked: str, prompted: str, text: str, followed: str) -> _Layout:
        prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
        header = text[len(asked) : text.index(_ANSWERED)] if text.startswith(asked) else ""
        with suppress(ChatError):
            thought = {**chat[1], **dict.fromkeys(TEMPLATE_REASONING, _NEXT)}
            header = header[: self._common(header, self._template.render([chat[0], thought])[len(asked) :])]
        # The last space of "Assistant: " is one token with the word behind it.
        openings = [prompt, prompt[: self._common(prompt, header)]] if prompt.strip() else [header.rstrip(" ")]
        only_last = late_end = ""
        tail, between = text[text.rindex(_ANSWERED) + len(_ANSWERED) :], followed.rpartition(_NEXT)[0]
        if _ANSWERED in between:
            between = between[between.rindex(_ANSWERED) + len(_ANSWERED) :]
            # What stands before the next question is its header as far as it stands before the first, too.
            common, first = self._common(tail, between), asked.partition(_ASKED)[0]
            cut = len(between) - _common_length(between[common:][::-1], first[::-1])
            cut = token.end() if (token := self._token_around(between, cut)) else cut
            stop, _ = self._end_of_turn(between, 0, cut)
            if stop and tail.startswith(between[:stop]) and self._end.search(tail, stop):
                only_last = tail[stop:]
            elif between.startswith(tail.rstrip()) and (late := self._late_eos.match(between, len(tail.rstrip()))):
                late_end = late.group()
        known = tuple(opening for opening in openings if opening.strip())
        return _Layout(asked.rpartition(_ASKED)[2], known, only_last, late_end)

    def _end_of_turn(self, text: str, start: int, stop: int) -> tuple[int, bool]:
        """Return where the first end of text, or else the last special token ends, 0 without one; and which it is."""
        ends = list(self._end.finditer(text, start, stop))
        eos = next((end.end() for end in ends if end.group() in self._eos), 0)
        return eos or (ends[-1].end() if ends else 0), bool(eos)

    def _start(self, messages: Sequence[Message], position: int, before: str, text: str) -> int | None:
        """Return where a turn begins in the rendering up to it; None where that is not certain."""
        layout, is_whole = self._layout, text.startswith(before)
        behind = len(before) if is_whole else self._end_of_others(messages, position, text)
        # A template may have no generation prompt, or none behind the result of a tool.
        has_prompt = is_whole and before.endswith(layout.openings[:1])
        for opening in () if has_prompt else layout.openings:
            start = text.find(opening, behind)
            if start >= 0 and not (is_whole and self._border.sub("", text[behind:start]).strip()):
                return start + len(opening)
        if is_whole:
            return behind
        if messages[position - 1]["role"] == "user" and text.startswith(layout.closing, behind):
            return behind + len(layout.closing)
        start = self._common(before, text)
        return start if start >= behind else None

    def _end_of_others(self, messages: Sequence[Message], position: int, text: str) -> int:
        """Return where the words of the messages before a turn end: at the end where the template takes no others."""
        changed = [_changed(message, "content") if content_text(message).strip() else message for message in messages]
        try:
            other = self._template.render([*changed[:position], messages[position]])
        except ChatError:
            return len(text)
        return len(text) - _common_length(text[::-1], other[::-1])

    def _stop(self, messages: Sequence[Message], position: int, text: str, last: int) -> tuple[str, int]:
        """Return the rendering in which a turn is whole, and where it ends there; its words end at `last`."""
        layout, num_read = self._layout, position + 1
        stop = len(text.removesuffix(layout.only_last))
        end, is_eos = self._end_of_turn(text, last, stop)
        if not is_eos and num_read < len(messages):
            if layout.late_end and messages[num_read]["role"] == "user":
                whole = text[: max(last, len(text.rstrip()))] + layout.late_end
                return whole, len(whole)
            with suppress(ChatError):
                following = self._template.render(messages[: num_read + 1])
                late = self._late_eos.match(following, len(text))
                if late is not None and following.startswith(text):
                    return following, late.end()
        return text, end or stop

    def _find_words(
        self, message: Message, text: str, low: int, others: Sequence[Message] | None = None
    ) -> tuple[list[Span], list[str]]:
        """Find the words of a message from `low` on; return where they stand, and the texts that do not.

        Where `others`, the messages before it, are given, short words are found by changing them.
        """
        found: list[Span] = []
        missing: list[str] = []
        content = content_text(message)
        for key, words in (("content", content), ("reasoning_content", message.get("reasoning_content", ""))):
            rest = _without(text, found)
            span, is_short = self._find(rest, words, low), 0 < len(words.strip()) < _LONG_WORDS
            if is_short and others is not None:
                span = self._find_changed([*others, message], key, text, span)
            if span is not None or is_short:
                found += [span] if span and words.strip() else []
                missing += [] if span else [words]
                continue
            # A template may take thoughts out of a content, to show them elsewhere or not at all.
            *inner, behind = _TAG.split(words)
            spans = [self._find(rest, part, low) for part in (*inner, behind)]
            found += [each for each in spans if each is not None and each[0] < each[1]]
            if None in spans:
                is_cut = inner and behind.strip() and spans[-1] is not None
                missing.append(words.removesuffix(behind) if is_cut else words)
        rest = self._border.sub(lambda token: "\0" * len(token.group()), _without(text, found))
        for call, call_words in call_texts(message):
            shown = [[self._find(rest, words, low) for words in spellings] for spellings in call_words]
            spans = [max(filter(None, spellings), default=None) for spellings in shown]
            if None in spans:
                missing.append(call)
            else:
                found += filter(None, spans)
        return found, missing

    def _find_changed(self, messages: Sequence[Message], key: str, text: str, span: Span | None) -> Span | None:
        """Find where short words of the last message end, by adding to them; `span` where that cannot be told."""
        try:
            other = self._template.render([*messages[:-1], _changed(messages[-1], key)])
        except ChatError:
            return span
        if (stop := other.rfind(_PROBE)) < 0:
            return None
        words = content_text(messages[-1]) if key == "content" else messages[-1][key]
        start = other.rfind(words.strip(), 0, stop)
        stop = start + len(words.strip())
        return (start, stop) if start >= 0 and text[:stop] == other[:stop] else span

    def _find(self, text: str, words: str, low: int) -> Span | None:
        """Return the last span from `low` on that has the words, white space aside, or None."""
        wanted = words.strip()
        if not wanted:
            return low, low
        if (at := text.rfind(wanted, low)) >= 0:
            return at, at + len(wanted)
        shown = [index for index in range(low, len(text)) if not text[index].isspace()]
        wanted = "".join(words.split())
        at = "".join(text[low:].split()).rfind(wanted)
        return None if at < 0 else (shown[at], shown[at + len(wanted) - 1] + 1)

    def _last_border(self, text: str, stop: int) -> int:
        """Return the start of the last added token before `stop`; 0 without one."""
        for low in (max(stop - 256, 0), 0):
            starts = [token.start() for token in self._border.finditer(text, low, stop)]
            # A token found where the search begins may be the end of a longer one.
            if starts and (low == 0 or starts[-1] >= low + self._longest):
                return starts[-1]
        return 0

    def _common(self, one: str, other: str) -> int:
        """Return how many characters two texts begin with in common, without a part of an added token."""
        length = _common_length(one, other)
        # <think> and <tool_call> share a letter.
        tokens = (self._token_around(text, length) for text in (one, other))
        return min([length, *(token.start() for token in tokens if token is not None)])

    def _token_around(self, text: str, index: int) -> re.Match[str] | None:
        """Return the added token that has an index inside it, not at its ends, or None."""
        nearby = self._border.finditer(text, max(index - self._longest, 0), index + self._longest)
        return next((token for token in nearby if token.start() < index < token.end()), None)


def _common_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    # Where one is the beginning of another, tokenizers take the longest.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _texts(message: Message) -> list[str]:
    """Return what a message says: its reasoning, its content, and its tool calls as JSON."""
    texts = [message.get("reasoning_content", ""), content_text(message), *(call for call, _ in call_texts(message))]
    return [text for text in texts if text.strip()]


def _apart(texts: Sequence[str]) -> list[Piece]:
    return [Piece(text, is_apart=number == 0) for number, text in enumerate(texts)]


def _changed(message: Message, key: str) -> Message:
    """Add letters that stand nowhere else to a message's content, or to its reasoning under every name."""
    content = message["content"]
    if key == "content":
        if isinstance(content, list):
            last = max(index for index, part in enumerate(content) if part.get("type") == "text")
            part = {**content[last], "text": content[last]["text"] + _PROBE}
            return {**message, "content": [*content[:last], part, *content[last + 1 :]]}
        return {**message, "content": f"{content}{_PROBE}"}
    thought = message[key] + _PROBE
    if isinstance(content, list):
        content = [{**part, "thinking": thought} if part.get("type") == "thinking" else part for part in content]
    return {**message, "content": content, **dict.fromkeys(TEMPLATE_REASONING, thought)}


def _without(text: str, spans: Sequence[Span]) -> str:
    for start, stop in spans:
        text = f"{text[:start]}{chr(0) * (stop - start)}{text[stop:]}"
    return text


def _only(text: str, spans: Sequence[Span]) -> str:
    borders = [0, *(border for span in spans for border in span), len(text)]
    return _without(text, list(zip(borders[::2], borders[1::2], strict=True)))
