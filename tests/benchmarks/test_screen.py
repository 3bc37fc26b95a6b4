"""`benchmarks.screen`: its figures by hand, and a run over a toy head."""

import json

import numpy as np
import pytest
import torch
from eagle_slim.convert import ConvertOptions, convert_head
from eagle_slim.convert.conversion.vocab_choice import VocabRequest
from eagle_slim.runtime.compare.answers import Answer, AnswerKey
from eagle_slim.runtime.compare.prompt_file import Prompt
from eagle_slim.runtime.screening.make import ScreenOptions, make_screen
from eagle_slim.vocab_tools.corpus.source import CorpusSource
from support.tiny_models import write_pair

from benchmarks import screen


def test_a_row_weighs_prompts_alike() -> None:
    found = screen.row(np.array([1.0, 0.5, 0.0]), ["code", "chat", "code"])
    assert found["share"] == pytest.approx(0.5)
    assert found["by_category"] == {"chat": 0.5, "code": 0.5}
    assert 0.0 <= found["range"][0] < 0.5 < found["range"][1] <= 1.0


def test_what_frequent_rows_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "TOP", 2)
    lm_head = torch.tensor([[3.0], [2.0], [0.0]])
    best = torch.tensor([3.0, 2.0]).softmax(0)
    # Row 1 is the most frequent, then row 2, then row 0.
    kept = screen.kept_by_frequency(lm_head, torch.ones(1, 1), torch.tensor([2, 0, 1]), (1, 2, 3))
    assert kept == pytest.approx([float(best[1]), float(best[1]), 1.0])


def answer(candidate: str, prompt: int, lengths: dict[int, int]) -> Answer:
    key = AnswerKey(0, 1, prompt, "greedy", 0, candidate)
    return Answer(key, "chat", 1, 5, lengths, 0.0, 1.0, (), ((1,),), ("",))


def test_accepted_lengths_of_a_comparison(tmp_path) -> None:
    """Two prompts of 10 tokens: 4 and 5 passes with the screen, 4 and 2 without; answers come in any order."""
    answers = [
        answer("9 + screen", 1, {2: 5}), answer("9", 0, {2: 2, 3: 2}), answer("plain", 0, {1: 10}),
        answer("9 + screen", 0, {2: 2, 3: 2}), answer("9", 1, {5: 2}),
    ]  # fmt: skip
    (tmp_path / "compare.json").write_text(json.dumps({"setup": {}, "rows": []}))
    lines = [{"plan": {}}, *(each.to_json() for each in answers)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    screen.main([str(tmp_path), "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tokens_and_passes"] == {"with": [[10, 4], [10, 5]], "without": [[10, 4], [10, 2]]}
    assert found["accepted_length"] == pytest.approx({"with": 20 / 9, "without": 20 / 6})
    assert found["ratio"] == pytest.approx(6 / 9)
    # The same prompt twice: 2 / 5 and 1.
    assert found["range"] == pytest.approx([2 / 5, 1.0])


def test_a_run(tmp_path, monkeypatch) -> None:
    _, head = write_pair(tmp_path)
    by_id = VocabRequest(order="ids")
    slim = tmp_path / "slim"
    convert_head(head, ConvertOptions(draft_vocab=300, target=tmp_path / "target", vocabulary=by_id, out=slim))
    text = "the quick brown fox jumps over the lazy dog, and then it sleeps, and so does the dog, which is lazier still"
    lines = [json.dumps({"text": f"{text} {place} hours"}) for place in range(20)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    source = CorpusSource(str(tmp_path / "texts.jsonl"))
    make_screen(slim, ScreenOptions(rank=32, states=300, sources=(source,)), device="cpu")
    monkeypatch.setattr(screen, "FREQUENT", (280, 300))
    prompts = [Prompt(("what is this",), "chat"), Prompt(("and that",), "code")]
    result = screen.run(slim, prompts, 8, "cpu", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == result
    by_rank = {(row["rank"], row["candidates"]): row["share"] for row in result["rows"] if "rank" in row}
    # A screen of the whole width misses only what is third in its group.
    assert by_rank == {(32, 256): pytest.approx(1.0, abs=0.1)}
    assert [row["frequent"] for row in result["rows"] if "frequent" in row] == [280]
    assert result["prompts"] == 2
    assert result["states"] == 2 * screen.PLACES * 51
