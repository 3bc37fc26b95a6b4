"""A chat template, compiled once: renders conversations at a fixed date and knows what it can take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from ..errors import TokenizerError
from .messages import ChatError, Message, with_joined_parts, with_object_arguments, with_reasoning
from .tokenizer import LoadedTokenizer

# A template that prints today's date would change the counts every day. Llama-3's template falls back to this date.
RENDER_DATE = datetime(2024, 7, 26)
MAX_CONVERSATION_CHARS = 4 << 20
PLACEHOLDER = "\ue000{}\ue001"
"""Stands for the content of message number {} while a template is probed; no real text holds it."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatSpec:
    """All it takes to render conversations in another process.

    Attributes:
        template: Jinja source.
        special_tokens: template variables such as bos_token.
        borders: texts of the added tokens. Tokenizers cut at them, so text on one side never changes the tokens on the
            other side.
    """

    template: str
    special_tokens: Mapping[str, str]
    borders: tuple[str, ...] = ()


def chat_spec(tokenizer: LoadedTokenizer, template: str | None = None) -> ChatSpec:
    """Take from a tokenizer what rendering needs; `template` replaces its own.

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
    # Where one is the beginning of another, tokenizers take the longest.
    return ChatSpec(template, dict(tokenizer.special_tokens), tuple(sorted(borders, key=len, reverse=True)))


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        marked: whether it marks the assistant's text with `{% generation %}`.
        syntax_tree: of the template, as Jinja parses it.

    Raises:
        TokenizerError: the template does not parse.
    """

    def __init__(self, spec: ChatSpec) -> None:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            self._template = _compile_jinja_template(spec.template)
        except TemplateError as error:
            raise TokenizerError(f"The chat template does not parse: {error}", invalid="chat template") from error
        self._variables = {
            **spec.special_tokens,
            "strftime_now": RENDER_DATE.strftime,
            "tools": None,
            "documents": None,
        }
        self.syntax_tree = self._template.environment.parse(spec.template)
        self._border = re.compile("|".join(map(re.escape, spec.borders)) or "(?!)")
        self.marked = bool(_GENERATION.search(spec.template))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """Render as `apply_chat_template(tokenize=False)` does; `variables` are further ones, such as `tools`.

        Raises:
            ChatError: the template refuses the conversation, or the text is too long.
        """
        with _chat_errors():
            text: str = self._template.render(
                messages=with_reasoning(messages),
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **variables},
            )
        if len(text) > MAX_CONVERSATION_CHARS:
            raise ChatError(
                f"the conversation is too long: {len(text):,} characters, at most {MAX_CONVERSATION_CHARS:,}"
            )
        return text

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Render, and return the (start, stop) of each `{% generation %}` block in the text."""
        rendered: list[str] = []
        marks: list[tuple[int, int]] = []
        with _chat_errors(), self._template.environment.activate_tracker(rendered, marks):
            arguments = {"messages": with_reasoning(messages), "add_generation_prompt": False}
            rendered.extend(self._template.generate(**arguments, **self._variables))
        return "".join(rendered), marks

    def borders(self, text: str, start: int = 0, stop: int | None = None) -> list[re.Match[str]]:
        """Return the added tokens spelled in a stretch of text."""
        return list(self._border.finditer(text, start, len(text) if stop is None else stop))

    def ends_in_border(self, text: str, start: int, stop: int) -> bool:
        """Whether a stretch of text ends with an added token."""
        return any(found.end() == stop for found in self._border.finditer(text, start, stop))

    def border_at(self, text: str, start: int) -> re.Match[str] | None:
        """Return the added token that begins exactly at `start`, or None."""
        return self._border.match(text, start)

    def length_to_end_of_turn(self, tail: str) -> int:
        """Return the length of a text up to its end-of-turn token, without the template's white space after it."""
        borders = self.borders(tail)
        return borders[-1].end() if borders and not tail[borders[-1].end() :].strip() else len(tail)

    def readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Bring messages into the form that this template understands.

        A template that knows nothing of contents in parts would print the Python list or fail, so the parts are joined.
        Most templates write a tool call's arguments as JSON and would quote arguments that are JSON text already, so
        these are parsed first, as in vLLM.
        """
        if any(isinstance(message["content"], list) for message in messages) and not self._takes_parts:
            messages = with_joined_parts(messages)
        if any("tool_calls" in message for message in messages) and not self._takes_arguments_as_text:
            messages = with_object_arguments(messages)
        return messages

    @cached_property
    def _takes_parts(self) -> bool:
        text = PLACEHOLDER.format(0)
        rendered = self._rendered_or_empty([{"role": "user", "content": [{"type": "text", "text": text}]}])
        return rendered.count(text) == 1 and f"'{text}'" not in rendered and f'"{text}"' not in rendered

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        text = '{"probe": 1}'
        call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": text}}
        return text in self._rendered_or_empty(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )

    def _rendered_or_empty(self, messages: Sequence[Message]) -> str:
        try:
            return self.render(messages)
        except ChatError:
            return ""

    @cached_property
    def generation_prompt(self) -> str | None:
        """What the template adds when it is asked for a generation prompt; None when that cannot be told."""
        question = [{"role": "user", "content": PLACEHOLDER.format(0)}]
        try:
            plain, prompted = self.render(question), self.render(question, add_generation_prompt=True)
        except ChatError:
            return None
        return prompted[len(plain) :] or None if prompted.startswith(plain) else None


@contextmanager
def _chat_errors() -> Iterator[None]:
    """Turn whatever a template raises on a conversation into a ChatError."""
    from jinja2 import TemplateError

    try:
        yield
    # A template is a program: it may refuse in its own words, or trip over anything in a message.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ChatError(f"the chat template refuses this conversation: {error}", refused_by="template") from error
