"""`--draft-vocab auto`: a size from a measured cost, and the manifest that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eagle_slim.convert.manifest import Manifest
from eagle_slim.vocab_tools.errors import UsageError
from support.comparisons import comparison
from support.conversion import convert
from support.raising import raises


def test_dear_rows_give_a_small_head_and_the_manifest_says_why(tmp_path: Path) -> None:
    done = convert(
        draft_vocab="auto", cost=comparison(tmp_path, 2e-6, (49152, 4096)), out=tmp_path / "slim", offline=True
    )
    assert 238 <= done.draft_vocab < 20000
    assert done.draft_vocab % 64 == 0
    why = Manifest.load(tmp_path / "slim").vocabulary["size_from_cost"]
    assert why["device"] == "here"
    assert why["measured_sizes"] == [49152, 4096]
    assert 0.5 < why["coverage"] < 1
    assert why["predicted_speed_against_all"] > 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_complete": False}, "not completed"),
        ({"remarks": ["greedy, 4,096: verifying took longer"]}, "was disturbed (greedy, 4,096"),
        ({"recommendations": [{"mode": "greedy", "batch": 1, "is_decided": False, "headline": "3 more"}]}, "(3 more)"),
    ],
)
def test_a_comparison_that_settles_nothing_is_taken_only_on_request(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = comparison(tmp_path, 2e-6, (49152, 4096))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    options: dict[str, Any] = {"draft_vocab": "auto", "cost": path, "out": tmp_path / "slim", "offline": True}
    with raises(UsageError, option="--cost") as caught:
        convert(**options)
    assert words in str(caught.value)
    done = convert(**options, accept_doubts=True)
    assert any(words in warning for warning in done.warnings)


@pytest.mark.parametrize(
    "arguments",
    [{"draft_vocab": "auto"}, {"draft_vocab": 4096, "cost": "compare.json"},
     {"draft_vocab": "auto", "coverage": 0.9, "cost": "compare.json"}, {"draft_vocab": "auto", "cost": "missing.json"}],
    ids=str,
)  # fmt: skip
def test_what_contradicts(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        convert(**arguments, out=tmp_path / "slim", offline=True)
    with raises(UsageError, option="--cost"):
        convert(draft_vocab="auto", out=tmp_path / "slim", offline=True)
