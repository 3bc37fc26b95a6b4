import pytest
import torch
from eagle_slim.runtime.drafter.tuning import problem
from eagle_slim.runtime.drafter.tuning.agreement import Agreement
from eagle_slim.runtime.drafter.tuning.timing import time_us
from support.raising import exit_code

from benchmarks import draft

TINY = problem.Dims(32, 32, 2, 1, 16, 100)
ROW = draft.Row("tiny", 60, 1, 1, 20)


@pytest.fixture
def head(monkeypatch):
    for name, size in (("TOP_K", 4), ("TOTAL_TOKENS", 12), ("CAPACITY", 20)):
        monkeypatch.setattr(draft, name, size)

    def once(variants, device, *_, **__):
        return {name: [time_us(run, device)] for name, run in variants.items()}

    # Without the runs that warm up.
    monkeypatch.setattr(draft, "interleave", once)
    monkeypatch.setattr(draft, "supported_weights", lambda device: ["bf16"])
    return problem.random_head(TINY, torch.device("cpu"), torch.float16)


def measure(head, row=ROW):
    return draft.measure(head, row, 1e9, 1, lambda run: run)


@pytest.mark.slow
def test_a_row(head):
    found = measure(head)
    assert found["faults"] == []
    assert set(found["times"]) == {"bf16", "A", "B"}
    assert found["bf16_vs_B"] == found["times"]["B"]["median_us"] / found["times"]["bf16"]["median_us"]
    assert found["floor_us"]["bf16"] == pytest.approx(found["draft_bytes"] / 1e9 * 1e6)


def test_a_row_with_a_window(head):
    row = draft.Row("tiny", 60, 1, 1, 700, window=7)
    found = measure(head, row)
    assert row.name == "tiny/v60/d1/b1/p700/w7"
    assert found["faults"] == []
    assert set(found["times"]) == {"bf16"}
    assert found["draft_bytes"] < measure(head)["draft_bytes"]


def test_a_wrong_draft_is_not_timed(head, monkeypatch):
    wrong = Agreement(1.0, 1.0, 0.0, 0.1, ("a log-probability is off by 1",))
    monkeypatch.setattr(draft, "draft_and_replay", lambda *_: wrong)
    found = measure(head)
    assert found["faults"] == ["bf16: a log-probability is off by 1"]
    assert "times" not in found


def test_rows_are_chosen_by_name(capsys):
    assert exit_code(draft.main, ["--rows", "8b/v32000/d5/b1/", "--list"]) == 0
    prefixes = ("p512", "p8192", "p131072/w4096", "p4096", "p131072")
    names = [f"llama-3.1-8b/v32000/d5/b1/{prefix}" for prefix in prefixes]
    assert capsys.readouterr().out.split() == [*names, "qwen3-8b/v32000/d5/b1/p512"]
