"""Prompt files: JSON lines or a JSON list of conversations in the usual forms, or plain text, a prompt per line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptFileError

DEFAULT_CATEGORY = "all prompts"
_HALF = re.compile("[\\ud800-\\udfff]")
_KEYS = ("turns", "messages", "prompt", "question")


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns; ``category`` groups rows of a comparison.

    ``opening``: messages before the first of the turns, as a chat template takes them.
    """

    turns: tuple[str, ...]
    category: str = DEFAULT_CATEGORY
    opening: tuple[dict[str, str], ...] = ()


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file.

    A file whose first line is a JSON object is read as JSON lines, and a JSON list of objects likewise. An object has
    ``turns`` (list of strings, or one string; MT-bench and Spec-Bench), or ``messages`` (a conversation of roles and
    contents, answered at its last user message), or ``prompt`` or ``question`` (a string), and optionally ``category``;
    other keys are ignored. In a file named ``.json`` or ``.jsonl`` the list may hold strings, and other JSON is an
    error. Anything else is plain text, a prompt per line that is not blank. ``limit`` keeps the first prompts only.
    Raises `PromptFileError`, naming file and line.
    """
    path = Path(path)
    is_json = path.suffix in (".json", ".jsonl")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: cannot be read as a prompt file ({error}).") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    listed = _json_list("\n".join(lines), is_json)
    if not numbered or listed == []:
        raise PromptFileError(f"{path}: the file holds no prompt.")
    if listed is not None:
        prompts = [_from_value(value, path, item=number) for number, value in enumerate(listed, 1)]
    elif numbered[0][1].lstrip().startswith("{") or (is_json and _is_json(numbered[0][1])):
        prompts = [_from_json(line, path, number) for number, line in numbered]
    else:
        prompts = [Prompt((line.strip(),)) for _, line in numbered]
    return prompts if limit is None else prompts[:limit]


def _json_list(text: str, is_json: bool) -> list[Any] | None:
    """Read a file that is one JSON list of prompts; None for any other, since text may begin with a bracket too."""
    value = json.loads(text) if _is_json(text) else None
    if not isinstance(value, list) or not (is_json or (value and isinstance(value[0], dict))):
        return None
    if all(isinstance(text, str) for text in value):
        return [{"prompt": text} for text in value]
    return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _from_json(line: str, path: Path, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{path}, line {number}: not a JSON object ({getattr(error, 'msg', error)}).") from error
    return _from_value(value, path, line=number)


def _from_value(value: Any, path: Path, **place: int) -> Prompt:
    where = ", ".join(f"{kind} {number}" for kind, number in place.items())
    if isinstance(value, dict):
        # A name of a row, which a line break would tear apart.
        category = " ".join(str(value.get("category") or "").split()) or DEFAULT_CATEGORY
        key = next((key for key in _KEYS if key in value), None)
        if key == "messages":
            prompt = _from_messages(value[key], category)
        else:
            prompt = _from_turns(value.get(key), category, several=key == "turns")
        if prompt is not None and _HALF.search(json.dumps(asdict(prompt), ensure_ascii=False)):
            # JSON's escapes can spell it, but no tokenizer takes it.
            raise PromptFileError(
                f"{path}, {where}: expected text, found half of a surrogate pair (one of \\ud800 to \\udfff alone).",
            )
        if prompt is not None:
            return prompt
        found = f'"{key}": {value[key]!r}' if key else f"only {', '.join(map(str, value)) or 'an empty object'}"
    else:
        found = repr(value)
    raise PromptFileError(
        f'{path}, {where}: expected "turns" (a list of texts), "messages" (with one of the user), "prompt" or '
        f'"question" (a text), found {found}.',
    )


def _from_turns(turns: Any, category: str, several: bool) -> Prompt | None:
    if isinstance(turns, str):
        turns = [turns]
    elif not several:
        return None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return None
    return Prompt(tuple(turns), category)


def _from_messages(messages: Any, category: str) -> Prompt | None:
    """Take a conversation up to its last user message; an answer after that is the one to be generated."""
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        return None
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not asked or not messages[asked[-1]]["content"].strip():
        return None
    opening = tuple({"role": message["role"], "content": message["content"]} for message in messages[: asked[-1]])
    return Prompt((messages[asked[-1]]["content"],), category, opening)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))
