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


READ = {
    "plain text": ("Why is the sky blue?\n\n  [1, 2] is a list  \n", ["Why is the sky blue?", "[1, 2] is a list"]),
    "text like a list": ('["Why is the sky blue?"]\n', ['["Why is the sky blue?"]']),
    "text like a list of numbers": ("[1]\n", ["[1]"]),
    "odd marks and ends": ('\ufeff{"turns": ["a\u2028b"]}\r\n{"turns": ["c\x85"]}\r\n', ["a\u2028b", "c\x85"]),
    "prompts and questions": ('{"prompt": "Why?"}\n{"question": "How?", "answer": "So."}', ["Why?", "How?"]),
}


@pytest.mark.parametrize("form", READ)
def test_forms(tmp_path: Path, form: str) -> None:
    text, prompts = READ[form]
    path = tmp_path / ("prompts.jsonl" if "{" in text else "prompts.txt")
    path.write_bytes(text.encode())
    assert load_prompts(path) == [Prompt((prompt,)) for prompt in prompts]


FIRST = ["[]", "null", '{"turns": []}', '{"turns": [" "]}', '{"prompt": ["Hi"]}', '{"messages": []}', "[" * 99999]
SECOND = ['{"turns": ["a"]}\n{"turns": 3}', '{"turns": ["a"]}\nplain', '{"prompt": "a"}\n{"prompt": "\\ud83d"}']
BAD = [("", "no prompt"), *((text, "line 1") for text in FIRST), *((text, "line 2") for text in SECOND)]


@pytest.mark.parametrize(("text", "place"), BAD, ids=lambda value: value[:40])
def test_bad_files(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with raises(PromptFileError, option=place):
        load_prompts(path)
    with raises(PromptFileError):
        load_prompts(tmp_path / "missing")
