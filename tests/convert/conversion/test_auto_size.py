"""`--draft-vocab auto`: a size from a measured cost, and the manifest that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eagle_slim.convert.manifest import Manifest
from eagle_slim.vocab_tools.errors import UsageError
from support.conversion import convert
from support.raising import raises


def comparison(folder: Path, per_row_s: float) -> Path:
    rows = [
        {"category": "all", "mode": "greedy", "batch": 1, "head": "h", "depth": 5, "top_k": 10, "total_tokens": 60,
         "draft_vocab": size, "tokens_per_s": 9.0, "draft_s_per_step": 0.01 + per_row_s * size,
         "verify_s_per_step": 0.03, "host_s_per_step": 0.01, "mean_accepted_length": length}
        for size, length in ((49152, 3.0), (4096, 2.9))
    ]  # fmt: skip
    report = {
        "rows": rows, "coverage": [{"sizes": [64, 4096, 49152], "covered": [0.4, 0.9, 1.0]}],
        "setup": {"device": "a device"},
    }  # fmt: skip
    (folder / "compare.json").write_text(json.dumps(report))
    return folder / "compare.json"


def test_dear_rows_give_a_small_head_and_the_manifest_says_why(tmp_path: Path) -> None:
    done = convert(draft_vocab="auto", cost=comparison(tmp_path, 2e-6), out=tmp_path / "slim", offline=True)
    assert 238 <= done.draft_vocab < 20000
    assert done.draft_vocab % 64 == 0
    why = Manifest.load(tmp_path / "slim").vocabulary["size_from_cost"]
    assert why["device"] == "a device"
    assert why["measured_sizes"] == [49152, 4096]
    assert 0.5 < why["coverage"] < 1
    assert why["predicted_speed_against_all"] > 1


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
