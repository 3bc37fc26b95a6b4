"""Prompt files in the forms that are around."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eagle_slim.runtime.compare.prompts import Prompt, load_prompts
from eagle_slim.runtime.errors import PromptFileError
from support.raising import raises


def test_turns_and_categories(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    lines = [{"question_id": 81, "category": "writing\n", "turns": ["One?", "Two?"]}, {"turns": "Alone?"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert load_prompts(path) == [Prompt(("One?", "Two?"), "writing"), Prompt(("Alone?",), "all prompts")]
    assert load_prompts(path, limit=1) == [Prompt(("One?", "Two?"), "writing")]


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Why is the sky blue?\n\n  [1, 2] is a list  \n")
    assert load_prompts(path) == [Prompt(("Why is the sky blue?",)), Prompt(("[1, 2] is a list",))]


@pytest.mark.parametrize("line", ['["Why is the sky blue?"]', "[1]"], ids=len)
def test_text_that_looks_like_a_list(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(line + "\n")
    assert load_prompts(path) == [Prompt((line,))]


def test_byte_order_mark_and_odd_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"turns": ["a\u2028b"]}\r\n{"turns": ["c\x85"]}\r\n'.encode())
    assert load_prompts(path) == [Prompt(("a\u2028b",)), Prompt(("c\x85",))]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "no prompt"),
        ("[]", "line 1"),
        ('{"turns": ["a"]}\n{"turns": 3}', "line 2"),
        ("null", "line 1"),
        ('{"turns": ["a"]}\nplain', "line 2"),
        ('{"turns": []}', "line 1"),
        ('{"turns": [" "]}', "line 1"),
        ('{"prompt": ["Hi"]}', "line 1"),
        ('{"messages": []}', "line 1"),
        ('{"prompt": "a"}\n{"prompt": "\\ud83d"}', "line 2"),
        pytest.param("[" * 99999, "line 1", id="deep"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with raises(PromptFileError, option=place):
        load_prompts(path)
    with raises(PromptFileError):
        load_prompts(tmp_path / "missing")


def test_prompts_and_questions(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"prompt": "Why?"}\n{"question": "How?", "answer": "So."}')
    assert load_prompts(path) == [Prompt(("Why?",)), Prompt(("How?",))]
