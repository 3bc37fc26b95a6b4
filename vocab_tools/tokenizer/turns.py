"""Conversations → the stretches of text whose tokens are counted, through the tokenizer's own chat template.

With roles "all" that is the rendered conversation. With roles "assistant" it is what the model itself writes: each
assistant turn from the end of the generation prompt to the end-of-turn token, that token included. For ChatML,

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                         └──────────────┘ counted

The turns are located in one of three ways, and checked against the text that the template really renders:

1. a template with `{% generation %}` marks says so itself; a mark that stops just before an end-of-turn token is
   extended over it;
2. messages of plain role and content: see skeleton.py;
3. all others: the messages before a turn, rendered with the generation prompt, must be a prefix of the whole text, and
   so must the messages up to the turn; if only the first holds, the turn ends at the next end-of-turn token.

A conversation that none of them explains is an error; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import ChatError, Message
from .skeleton import Piece, Skeletons
from .template import ChatSpec, ChatTemplate

_ADVICE = "Count with --roles all, or give a --chat-template with {% generation %} marks"


class ChatRenderer:
    """Renders conversations and finds the assistant's turns in them.

    `exact` is for tokenizers where cutting at borders changes tokens: whole conversations are tokenized.

    Raises:
        TokenizerError: the template does not parse.
    """

    def __init__(self, spec: ChatSpec, exact: bool = False) -> None:
        self._template = ChatTemplate(spec)
        self._skeletons = Skeletons(self._template)
        self._exact = exact
        self.render = self._template.render

    def all_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Return the rendered conversation."""
        return [Piece(self.render(self._template.readable(messages)))]

    def assistant_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Return what the assistant writes, each turn with the few characters before it that its tokens depend on."""
        if not any(message["role"] == "assistant" for message in messages):
            return []
        messages = self._template.readable(messages)
        if not self._template.marked and not self._exact and all(map(_is_plain, messages)):
            pieces = self._skeletons.pieces(messages)
            if pieces is not None:
                return pieces
        text, spans = self.assistant_spans(messages)
        return self._cut(text, spans)

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation and the (start, stop) of each assistant turn in it."""
        return self._marked_spans(messages) if self._template.marked else self._prefix_spans(messages)

    def _cut(self, text: str, spans: Sequence[tuple[int, int]]) -> list[Piece]:
        """Cut the turns out at the borders around them, or keep the whole text where one has no borders."""
        pieces = []
        previous = 0
        for start, stop in spans:
            borders = self._template.borders(text, previous, start)
            if self._exact or not borders or not self._template.ends_in_border(text, start, stop):
                return [Piece(text, spans=tuple(spans))]
            begin = borders[-1].start()
            pieces.append(Piece(text[begin:stop], start - begin))
            previous = stop
        return pieces

    def _marked_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        text, marks = self._template.render_marked(messages)
        if not marks:
            raise ChatError("the template's {% generation %} marks cover no turn of this conversation")
        spans = []
        for start, stop in marks:
            closed = self._template.ends_in_border(text, start, stop)
            following = None if closed else self._template.border_at(text, stop)
            spans.append((start, following.end() if following else stop))
        return text, spans

    def _prefix_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        text = self.render(messages)
        spans = []
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:position], add_generation_prompt=True)
            if not text.startswith(before):
                raise ChatError(
                    f"message {position}: cannot tell where this assistant turn begins, because the template renders "
                    f"the messages before it differently on their own. {_ADVICE}"
                )
            spans.append((len(before), self._end_of(text, len(before), messages, position)))
        return text, spans

    def _end_of(self, text: str, start: int, messages: Sequence[Message], position: int) -> int:
        with_turn = text if position == len(messages) - 1 else self.render(messages[: position + 1])
        if text.startswith(with_turn) and len(with_turn) > start:
            return start + self._template.length_to_end_of_turn(with_turn[start:])
        token = self._skeletons.end_of_turn
        found = text.find(token, start) if token else -1
        if not token or found < 0:
            raise ChatError(f"message {position}: cannot tell where this assistant turn ends. {_ADVICE}")
        return found + len(token)


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and isinstance(message["content"], str)
