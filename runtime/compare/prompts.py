"""Prompt files: JSON lines of conversations in the usual forms, or plain text, a prompt per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptFileError, brief

DEFAULT_CATEGORY = "all prompts"
_KEYS = ("turns", "prompt", "question")


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns; ``category`` groups rows of a comparison."""

    turns: tuple[str, ...]
    category: str = DEFAULT_CATEGORY


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file.

    A file named ``.json`` or ``.jsonl``, or one that begins with a brace, holds JSON lines. Each is an object with
    ``turns`` (list of strings, or one string; MT-bench and Spec-Bench), or ``prompt`` or ``question`` (a string), and
    optionally ``category``; other keys are ignored. Any other file is plain text, a prompt per line that is not blank.
    ``limit`` keeps the first prompts only. Raises `PromptFileError`, naming file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: cannot be read as a prompt file ({error}).") from error
    lines = {f"{path}, line {number}": line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if path.suffix in (".json", ".jsonl") or text.lstrip().startswith("{"):
        prompts = [_read_prompt(line, where) for where, line in lines.items()]
    else:
        prompts = [Prompt((line.strip(),)) for line in lines.values()]
    if not prompts:
        raise PromptFileError(f"{path}: the file holds no prompt.")
    return prompts[:limit]


def _read_prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where}: not a JSON object on a line of its own ({error}).") from error
    record = value if isinstance(value, dict) else {}
    key = next((key for key in _KEYS if key in record), None)
    given = record.get(key)
    turns: list[Any] = given if key == "turns" and isinstance(given, list) else [given]
    if not turns or not all(isinstance(turn, str) and _as_text(turn) == turn and turn.strip() for turn in turns):
        raise PromptFileError(
            f'{where}: expected "turns" (a list of texts), "prompt" or "question" (a text), found {brief(value)}.'
        )
    # The category names a row of the table: no line breaks.
    category = " ".join(_as_text(str(record.get("category") or "")).split())
    return Prompt(tuple(turns), category or DEFAULT_CATEGORY)


def _as_text(text: str) -> str:
    # JSON can hold halves of surrogate pairs, which UTF-8 cannot.
    return text.encode(errors="ignore").decode()
