"""Read prompts into token ids: text, ids in any container, tokenizer output, and conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import compress
from numbers import Integral
from typing import Any

from eagle_slim.vocab_tools.messages import json_value
from torch import Tensor

from ..errors import PromptError, UsageError, brief, misfit
from .request import Request

Prompts = str | Sequence[str] | Tensor | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_USE_ENCODE_CHAT = "Use model.encode_chat(messages) to turn messages into a prompt."


def read_token_id(token: Any, name: str = "input_ids") -> int:
    """Return a token id as a plain integer. Raises `UsageError` for anything else."""
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise misfit(name, "token ids, integers in lists or in a tensor of at most two dimensions", token)
    return int(token)


def read_prompts(
    given: Prompts, attention_mask: Any, pad: tuple[int, bool] | None, tokenizer: Any | None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the token ids of each prompt as they were given, and without the padding.

    ``attention_mask`` [prompts, seq] keeps the tokens where it is not 0. Without one, ``pad``, an id and whether it
    ends sequences, tells padding in a tensor [prompts, seq]. Raises `UsageError` for what is no prompt or mask, and for
    ids that may be padding; `PromptError` for an empty list of prompts.
    """
    if isinstance(given, Mapping):
        if "input_ids" not in given:
            raise UsageError(f"input_ids: a mapping needs them, got {brief(list(given))}. {_USE_ENCODE_CHAT}")
        if others := [str(name) for name, value in given.items() if not _is_read(name, value)]:
            problem = f"a mapping of them and an attention_mask is read; {', '.join(others)} would be left out"
            advice = "Options of generate are given by name; other inputs of a model are not served."
            raise UsageError(f"input_ids: {problem}. {advice}")
        attention_mask = given.get("attention_mask") if attention_mask is None else attention_mask
        given = given["input_ids"]
    if attention_mask is None and pad is not None and getattr(given, "ndim", 0) == 2:
        attention_mask = _mask_by_id(given, *pad)
    values = [given] if isinstance(given, str) else _as_list("input_ids", "text or token ids", given)
    if not values:
        raise PromptError("No prompt was given.")
    first = values[0]
    if isinstance(first, Mapping):
        raise UsageError(f"input_ids: these are messages, not a prompt. {_USE_ENCODE_CHAT}")
    if all(isinstance(text, str) for text in values):
        if attention_mask is not None:
            raise UsageError("attention_mask goes with token ids; text has no padding.")
        values = [encode_text(tokenizer, text) for text in values]
    elif isinstance(first, (int, float)):
        values = [values]
    elif any(not hasattr(row, "__iter__") or isinstance(row, (str, bytes)) for row in values):
        raise UsageError("input_ids: a batch is token ids [prompts, seq], lists of ids, or texts; this one mixes them.")
    # Long prompts are many, and one look at all types is quick.
    rows = [row if set(map(type, row)) <= {int} else tuple(map(read_token_id, row)) for row in map(tuple, values)]
    if attention_mask is None:
        return [(row, row) for row in rows]
    mask = _as_list("attention_mask", "of the shape of input_ids", attention_mask)
    if mask and isinstance(mask[0], (int, float)):
        mask = [mask]
    if [len(keep) for keep in mask] != [len(row) for row in rows]:
        raise misfit("attention_mask", f"of the shape of input_ids, {brief([len(row) for row in rows])}", mask)
    return [(row, tuple(compress(row, keep))) for row, keep in zip(rows, mask, strict=True)]


def check_prompts(requests: Sequence[Request], vocab: int) -> None:
    """Raise `PromptError` for an empty prompt, an id outside the vocabulary, and one that leaves no room to answer."""
    for request in requests:
        index, length, limit = request.index, len(request.prompt_ids), request.context_limit
        wrong = [token for token in request.prompt_ids if not 0 <= token < vocab]
        if length == 0:
            reason = "is empty. Give at least one token, for example BOS."
        elif wrong:
            reason = f"has token id {wrong[0]}; the target's ids are 0 to {vocab - 1}."
        elif limit is not None and (length > limit or (length == limit and request.max_new_tokens > 0)):
            reason = f"has {length} tokens; the context of {limit} leaves no room for an answer. Shorten the prompt."
        else:
            continue
        raise PromptError(f"Prompt {index} {reason}", prompt=index)


def encode_text(tokenizer: Any | None, text: str, **options: Any) -> list[int]:
    """Encode text by a tokenizer. Raises `UsageError` without one, `PromptError` for what is no text."""
    if tokenizer is None:
        raise UsageError("Text prompts need a tokenizer. Give token ids, or load the model with a tokenizer.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = "half of a surrogate pair, as bytes that are no UTF-8 become"
        raise PromptError(f"input_ids: character {error.start} of a prompt is {what}.") from error
    ids: list[int] = tokenizer(text, **options).input_ids
    return ids


def encode_conversation(
    tokenizer: Any | None, messages: str | Messages, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Encode a conversation, or one user message: see `SpeculativeModel.encode_chat`; ``variables`` of the template."""
    if tokenizer is None:
        raise UsageError("A chat needs a tokenizer. Load the model with one.")
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(said, Sequence) or not said or not all(isinstance(each, Mapping) for each in said):
        raise misfit("messages", 'a list such as [{"role": "user", "content": "Hi"}]', messages)
    if not tokenizer.chat_template:
        content = said[-1].get("content")
        if not isinstance(content, str):
            raise misfit("content of the last of the messages", "text, without a chat template", content)
        if len(said) > 1 and any(each.get("role") == "system" for each in said):
            raise UsageError("messages: the tokenizer has no chat template for a system message. Leave that out.")
        return encode_text(tokenizer, content)
    if has_channels(tokenizer):
        said = [_out_of_channels(each) for each in said]
    try:
        text = tokenizer.apply_chat_template(list(said), add_generation_prompt=True, tokenize=False, **variables or {})
    except Exception as error:  # a template is a program of its own
        raise UsageError(f"The tokenizer's chat template refuses these messages: {error}") from error
    return encode_text(tokenizer, text, add_special_tokens=False)


def has_channels(tokenizer: Any) -> bool:
    """Return whether a chat's answers have channels, which special tokens open, as gpt-oss' (Harmony) have."""
    return "<|channel|>" in str(getattr(tokenizer, "chat_template", None))


def _out_of_channels(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sort an answer as generated into the fields of gpt-oss' template, which refuses channels in a text."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    if not ("<|channel|>" in content and "<|message|>" in content):
        return message
    said, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for part in re.split(r"<\|(?:end|call|return)\|>", content):
        header, _, words = part.partition("<|message|>")
        if called := re.search(r"to=functions\.([\w.-]+)", header):
            calls.append({"type": "function", "function": {"name": called[1], "arguments": json_value(words, words)}})
        else:
            (thoughts if "<|channel|>analysis" in header else said).append(words)
    if calls:
        # Beside a call the template takes thoughts or words, not both.
        thoughts, said = [*thoughts, *said], []
    more = {"thinking": "\n".join(filter(None, thoughts)), "tool_calls": calls}
    return {**message, "content": "".join(said), **{name: found for name, found in more.items() if found}}


def _mask_by_id(ids: Any, pad: int, is_end: bool) -> list[list[bool]] | None:
    """Return where padding is not; None where its id ends sequences. Raises `UsageError` where text may be padding."""
    kept = (ids != pad).tolist()
    before, behind = ([[*row[::way], True].index(True) for row in kept] for way in (1, -1))
    is_within = any(False in row[i : len(row) - j] for row, i, j in zip(kept, before, behind, strict=True))
    # A single end behind some may be text.
    is_around = len({*before}) > 1 or max([0, *before, *behind]) > 1
    if (is_end and is_around) or (is_within and not is_end):
        problem = "ends sequences and begins or ends some prompts" if is_end else "also stands within a prompt"
        raise UsageError(f"input_ids: pad_token_id {pad} {problem}. Give an attention_mask, of ones without padding.")
    return None if is_end else kept


def _is_read(name: Any, value: Any) -> bool:
    """Return whether an entry of a mapping is read, or asks nothing: None, or the zeros that a tokenizer adds."""
    if name == "token_type_ids" and value is not None:
        return not any(any(row) if isinstance(row, list) else row for row in _as_list(name, "numbers", value))
    return value is None or name in ("input_ids", "attention_mask")


def _as_list(name: str, expected: str, values: Any) -> list[Any]:
    """Turn a tensor, an array or a list of them into lists. Raises `UsageError` for a single value."""
    if isinstance(values, (bytes, str)) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise misfit(name, expected, values)
    if hasattr(values, "tolist"):
        found: list[Any] = values.tolist()
        return found
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]
