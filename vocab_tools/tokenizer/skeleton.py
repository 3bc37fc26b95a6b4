"""The fixed text of a template around the contents, for conversations of plain role and content.

A skeleton is the template rendered once for a sequence of roles, with placeholders for the contents. For ChatML and the
roles (user, assistant) its literals are

    "<|im_start|>user\\n"   "<|im_end|>\\n<|im_start|>assistant\\n"   "<|im_end|>\\n"

A conversation with these roles must render to exactly the literals with its contents between them, as they are or
stripped; then its turns are where the skeleton has them. Otherwise the skeleton is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .messages import ChatError, Message
from .template import PLACEHOLDER, ChatTemplate


@dataclass(frozen=True)
class Piece:
    """Text to tokenize, and the part of it that is counted.

    Attributes:
        text: tokenized as it is.
        header_chars: characters at the beginning that are context only.
        spans: where given, only these (start, stop) stretches count; then `text` is a whole conversation.
    """

    text: str
    header_chars: int = 0
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Turn:
    """Where one assistant turn lies between the literals of a skeleton.

    Attributes:
        message: its position in the conversation.
        lead: characters of the literal before the content that the model writes itself.
        trail: characters of the literal after the content, up to and including the end-of-turn token.
        header: text from the last border before the turn to its beginning; None without a border.
        closed: whether the turn ends with a border.
    """

    message: int
    lead: int
    trail: int
    header: str | None
    closed: bool


@dataclass(frozen=True)
class Skeleton:
    """Literals before, between and after the contents, one more than there are messages; and the assistant's turns."""

    literals: tuple[str, ...]
    turns: tuple[Turn, ...]


class Skeletons:
    """The skeletons of one template, made when they are first needed."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # Conversations follow few patterns; the bound is for a corpus that has very many.
        self._of_roles = lru_cache(4096)(self._make)

    def pieces(self, messages: Sequence[Message]) -> list[Piece] | None:
        """Return the assistant's turns of a plain conversation; None where no skeleton explains its text."""
        skeleton = self._of_roles(tuple(message["role"] for message in messages))
        return None if skeleton is None else self._fill(skeleton, messages)

    @cached_property
    def end_of_turn(self) -> str | None:
        """The token that ends the assistant's turn in a plain conversation of two messages, or None."""
        skeleton = self._of_roles(("user", "assistant"))
        if skeleton is None or not skeleton.turns[0].closed:
            return None
        turn = skeleton.turns[0]
        borders = self._template.borders(skeleton.literals[turn.message + 1][: turn.trail])
        return borders[-1].group() if borders else None

    def _fill(self, skeleton: Skeleton, messages: Sequence[Message]) -> list[Piece] | None:
        text = self._template.render(messages)
        contents = _place_contents(text, skeleton.literals, messages)
        if contents is None:
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

    def _make(self, roles: tuple[str, ...]) -> Skeleton | None:
        messages = [{"role": role, "content": PLACEHOLDER.format(position)} for position, role in enumerate(roles)]
        try:
            text = self._template.render(messages)
        except ChatError:
            return None
        literals = []
        starts = []
        position = 0
        for message in messages:
            if text.count(message["content"]) != 1 or (start := text.find(message["content"], position)) < 0:
                return None
            literals.append(text[position:start])
            starts.append(start)
            position = start + len(message["content"])
        literals.append(text[position:])
        turns = []
        for number, role in enumerate(roles):
            if role == "assistant":
                turn = self._make_turn(messages, number, text, starts[number], literals)
                if turn is None:
                    return None
                turns.append(turn)
        return Skeleton(tuple(literals), tuple(turns))

    def _make_turn(
        self, messages: list[dict[str, str]], number: int, text: str, content_start: int, literals: list[str]
    ) -> Turn | None:
        before, after = literals[number], literals[number + 1]
        lead = self._lead(messages[:number], text, content_start, before)
        content_stop = content_start + len(messages[number]["content"])
        trail = self._trail(messages, number, text, content_stop, after)
        if lead is None or trail is None:
            return None
        header = before[: len(before) - lead]
        borders = self._template.borders(header)
        return Turn(
            number,
            lead,
            trail,
            header[borders[-1].start() :] if borders else None,
            self._template.ends_in_border(after, 0, trail),
        )

    def _lead(self, earlier: list[dict[str, str]], text: str, content_start: int, literal: str) -> int | None:
        try:
            before = self._template.render(earlier, add_generation_prompt=True)
        except ChatError:
            before = None
        if before is not None and text.startswith(before) and 0 <= content_start - len(before) <= len(literal):
            return content_start - len(before)
        prompt = self._template.generation_prompt
        return 0 if prompt and literal.endswith(prompt) else None

    def _trail(
        self, messages: list[dict[str, str]], number: int, text: str, content_stop: int, literal: str
    ) -> int | None:
        with_turn = text if number == len(messages) - 1 else self._template.render(messages[: number + 1])
        if text.startswith(with_turn) and len(with_turn) >= content_stop:
            return self._template.length_to_end_of_turn(with_turn[content_stop:])
        if len(messages) == 2:
            # The usual end of a turn is read off such a conversation: it cannot help here.
            return None
        token = self.end_of_turn
        found = literal.find(token) if token else -1
        return found + len(token) if token and found >= 0 else None


def _place_contents(text: str, literals: Sequence[str], messages: Sequence[Message]) -> list[tuple[int, int]] | None:
    """Return the (start, stop) of each content in the text; None unless literals and contents make up the text."""
    if not text.startswith(literals[0]):
        return None
    position = len(literals[0])
    contents = []
    for message, literal in zip(messages, literals[1:], strict=True):
        for content in _forms(message["content"]):
            stop = position + len(content)
            if text.startswith(content, position) and text.startswith(literal, stop):
                break
        else:
            return None
        contents.append((position, stop))
        position = stop + len(literal)
    return contents if position == len(text) else None


def _forms(content: str) -> Iterator[str]:
    """Yield the content as it is, then in the ways templates trim it."""
    yield content
    yield content.strip()
    yield content.rstrip()
    yield content.lstrip()
