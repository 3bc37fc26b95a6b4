"""Prompt files: Spec-Bench / MT-bench JSON lines with ``turns``, or plain text with one prompt per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptFileError

DEFAULT_CATEGORY = "all prompts"


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns; ``category`` groups rows of a comparison."""

    turns: tuple[str, ...]
    category: str = DEFAULT_CATEGORY


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file.

    A file whose first line is a JSON object is read as JSON lines: ``turns`` (list of strings, or one string), and
    optionally ``category``; other keys are ignored. A JSON list of such objects is read too. Anything else is plain
    text, a prompt per line that is not blank. ``limit`` keeps the first prompts only. Raises `PromptFileError`, naming
    file and line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: cannot be read as a prompt file ({error}).", path=str(path)) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptFileError(f"{path}: the file holds no prompt.", path=str(path), prompts=0)
    listed = _json_list("\n".join(lines))
    if listed is not None:
        prompts = [_from_value(value, path, item=number) for number, value in enumerate(listed, 1)]
    elif numbered[0][1].lstrip().startswith("{"):
        prompts = [_from_json(line, path, number) for number, line in numbered]
    else:
        prompts = [Prompt((line.strip(),)) for _, line in numbered]
    return prompts if limit is None else prompts[:limit]


def _json_list(text: str) -> list[Any] | None:
    """Read a file that is one JSON list of objects; None for any other, since text may begin with a bracket too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and value and isinstance(value[0], dict) else None


def _from_json(line: str, path: Path, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(
            f"{path}, line {number}: not a JSON object ({getattr(error, 'msg', error)}).", path=str(path), line=number
        ) from error
    return _from_value(value, path, line=number)


def _from_value(value: Any, path: Path, **place: int) -> Prompt:
    turns = value.get("turns") if isinstance(value, dict) else None
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        where = ", ".join(f"{kind} {number}" for kind, number in place.items())
        raise PromptFileError(
            f'{path}, {where}: expected "turns", a list of texts, found {turns!r}.', path=str(path), **place
        )
    return Prompt(tuple(turns), str(value.get("category") or DEFAULT_CATEGORY))
