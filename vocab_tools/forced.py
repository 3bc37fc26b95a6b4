"""The ids that every draft vocabulary must hold, each with the reason.

A drafter that cannot propose the end of a turn, a tool marker or a single byte stalls there on every request, however
rare the token was in the corpus. Reserved and unused added tokens are not forced unless asked: Gemma-3 has 6,415.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .chats import ChatSpec, ChatTemplate
from .errors import UsageError, check_choice
from .messages import ChatError
from .tokenizer import LoadedTokenizer

# Spellings of "end of turn" and "end of text" that models emit to stop, for tokenizers without generation settings. The
# same list as llama.cpp's end-of-generation detection, without its fill-in-the-middle markers.
_END_OF_TURN = re.compile(
    r"<\|(eot_id|eom_id|im_end|end|eos|return|call|calls|flush|endoftext|end_of_(text|turn|sentence)|END_OF_TURN_TOKEN)\|>"
    r"|<(end_of_turn|turn\||end_of_utterance|eos|EOT|EOD)>|_<EOT>|</s>|<｜end▁of▁sentence｜>"
)
# Markers that models emit inside a turn and that a template may never spell (Llama-3.1's code calls, gpt-oss's
# channels, reasoning and tool calls of unknown templates).
_IN_TURN = re.compile(
    r"<\|(python_tag|start|channel|message|constrain)\|>|</?(tool_call|think)>|\[(TOOL_CALLS|ARGS|/?THINK)\]"
)

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"name": "get_weather", "description": "Weather at a place.", "parameters": _CITY}
_TOOL = {"type": "function", "function": _WEATHER}
_CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
_USER = {"role": "user", "content": "What is the weather?"}
_ASSISTANT = {"role": "assistant", "content": "Sunny."}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ROLES = ("system", "developer", "user", "assistant", "model", "tool", "ipython", "function", "observation", "context")


@dataclass(frozen=True)
class ForcedIds:
    """Target ids that are forced into a draft vocabulary, ascending, int64 [forced], with the reasons by id."""

    ids: NDArray[np.int64]
    reasons: Mapping[int, str]
    warnings: tuple[str, ...] = ()


def forced_ids(
    tokenizer: LoadedTokenizer, force_added: Literal["chat", "all"] = "chat", extra: Iterable[int] = ()
) -> ForcedIds:
    """List the ids that must be in any draft vocabulary for this tokenizer.

    They are: eos (one or several), bos and pad of generation_config.json and tokenizer_config.json; end-of-turn, tool
    and reasoning markers of well-known names; every added token that a chat template can emit; single-byte tokens; what
    the caller adds. `force_added` "all" forces every added token, reserved ones too.

    Raises UsageError for an `extra` id that no token has.
    """
    check_choice("force_added", force_added, ("chat", "all"))
    # Of each id its reasons, each once.
    reasons: dict[int, dict[str, None]] = {}
    warnings: list[str] = []
    real = set(tokenizer.real_ids.tolist())

    def force(token_id: int, reason: str) -> None:
        reasons.setdefault(token_id, {}).setdefault(reason)

    for token_id, reason in tokenizer.configured_ids:
        if token_id in real:
            force(token_id, reason)
        elif token_id >= 0:
            warnings.append(f"{reason} is id {token_id}, but no token of {tokenizer.source} has it; it is not forced")
    for token_id, text in tokenizer.added_tokens.items():
        # Gemma-3 has the HTML tag </s> among its tokens; only a special one ends a turn.
        if _END_OF_TURN.fullmatch(text) and token_id in tokenizer.special_ids:
            force(token_id, "end of turn")
        if _IN_TURN.fullmatch(text):
            force(token_id, "tool or reasoning marker")
        if force_added == "all":
            force(token_id, "added token")
    if not tokenizer.chat_templates:
        advice = "(--force-added all forces every added token, --force-id single ones)"
        unknown = "role and tool markers are unknown and not forced"
        warnings.append(f"{tokenizer.source} has no chat template: {unknown} {advice}")
    for name, template in tokenizer.chat_templates.items():
        label = "chat template" if name == "default" else f"chat template '{name}'"
        for token_id in sorted(_template_tokens(tokenizer, template)):
            force(token_id, label)
    for token_id, byte in tokenizer.byte_of_id.items():
        force(token_id, f"byte 0x{byte:02X}")
    for token_id in extra:
        if token_id not in real:
            raise UsageError(f"--force-id {token_id}: {tokenizer.source} has no such token.")
        force(token_id, "by request")
    joined = {token_id: ", ".join(reasons[token_id]) for token_id in sorted(reasons)}
    return ForcedIds(np.array([*joined], np.int64), joined, tuple(warnings))


def _template_tokens(tokenizer: LoadedTokenizer, template: str) -> set[int]:
    """Return the added tokens that a chat template can emit.

    Its source alone misses markers put together from a role (`'<|' + message.role + '|>'`); probes alone miss branches
    that no probe enters.
    """
    added = tokenizer.added_tokens.keys()
    compiled = ChatTemplate(ChatSpec(template, tokenizer.special_tokens))
    texts = [*_literals(compiled, tokenizer.special_tokens), *_probe(compiled)]
    encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    return {token_id for encoding in encodings for token_id in encoding.ids if token_id in added}


def _literals(template: ChatTemplate, special_tokens: Mapping[str, str]) -> list[str]:
    """Return every text that a template's source spells: literal strings, constant concatenations, known variables."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Named(NodeTransformer):
        def visit_Name(self, node: nodes.Name) -> nodes.Expr:  # noqa: N802  # jinja2 calls it by this name
            text = special_tokens.get(node.name)
            return node if text is None else nodes.Const(text, environment=node.environment)

    texts: set[str] = set()
    for node in Named().visit(template.syntax_tree).find_all(nodes.Expr):
        with contextlib.suppress(nodes.Impossible):
            if isinstance(text := node.as_const(), str):
                texts.add(text)
    return list(texts)


def _probe(template: ChatTemplate) -> Iterator[str]:
    """Render conversations that reach a template's branches; conversations that it refuses are left out."""
    reasoning = {**_ASSISTANT, "reasoning_content": "Thinking.", "thinking": "Thinking."}
    result = {"content": "22 C", "tool_call_id": "call12345", "name": "get_weather"}
    parts: list[dict[str, str]] = [{"type": "text", "text": "Hello"}, {"type": "image"}]
    conversations: list[list[dict[str, Any]]] = [
        [_USER],
        [{"role": "system", "content": "Be brief."}, _USER, _ASSISTANT],
        [_USER, _ASSISTANT, _USER, reasoning],
        [{"role": "user", "content": parts}, _ASSISTANT],
        [_USER, {**_CALLING, "content": None}],
    ]
    for role in _ROLES:
        hello = {"role": role, "content": "Hello"}
        conversations += [[_USER, _CALLING, {"role": role, **result}, _ASSISTANT], [_USER, hello], [hello]]
    variables: Sequence[dict[str, Any]] = ({}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True})
    for messages, tools, extra in product(conversations, (None, [_TOOL]), variables):
        with contextlib.suppress(ChatError):
            yield template.render(messages, add_generation_prompt=True, tools=tools, **extra)
