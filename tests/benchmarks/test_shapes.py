"""What the figures of shapes side by side are taken for, and the first tokens of a fresh model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import shapes


def test_a_row_is_judged_by_its_medians() -> None:
    row = shapes.judged("x", {"plain": [10, 11, 12], "1,1,3": [20, 19, 30], "chosen": [19.7, 19.8, 1]})
    assert (row["best"], row["over_plain"], row["over_best"]) == ("1,1,3", 19.7 / 11, 19.7 / 20)
    assert row["is_good"]
    assert not shapes.judged("x", {"plain": [10], "1,1,3": [20], "chosen": [19.3]})["is_good"]


def test_first_and_second_token_are_timed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes.SpeculativeModel, "from_pretrained", lambda **_: model)
    first_s, second_s = shapes.first_tokens(torch.device("cpu"))
    assert 0 < first_s < second_s
