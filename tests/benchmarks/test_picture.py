import json
import re
from pathlib import Path

import pytest
from support.programs import ROOT

from benchmarks import picture

RESULT = ROOT / "benchmarks" / "results" / "2026-11-29-shapes.json"


def test_readmes_picture_is_drawn_from_the_committed_result(tmp_path: Path) -> None:
    drawn = tmp_path / "speed.svg"
    picture.main([str(RESULT), "--out", str(drawn)])
    assert drawn.read_text("utf-8") == (ROOT / "docs" / "images" / "speed.svg").read_text("utf-8")


def row(name: str, plain: float, chosen: float) -> dict[str, object]:
    return {"row": name, "tokens_per_s": {"plain": plain, "chosen": chosen}}


def test_bars_are_of_the_run_with_most_kinds(tmp_path: Path) -> None:
    two = [row(f"text/{rows}/{kind}", 100, 150) for rows in ("full", 4096) for kind in ("chat", "code")]
    runs = [
        {"machine": {"device": "NVIDIA H100 80GB"}, "rows": [row("text/full/chat", 1, 2), *two]},
        {
            "machine": {"device": "NVIDIA H200"},
            "rows": [*two[:2], *(row(f"text/4096/{kind}", 90, 1200) for kind in ("chat", "code"))],
        },
        {"machine": {"device": "NVIDIA B200"}, "rows": [row("text/full/math", 1, 2), row("slots/1", 1, 2)]},
    ]
    result, drawn = tmp_path / "result.json", tmp_path / "drawn.svg"
    result.write_text(json.dumps({"runs": runs}))
    picture.main([str(result), "--out", str(drawn)])
    text = drawn.read_text("utf-8")
    assert re.findall(r">([\d,]+)</text>", text) == ["95", "150", "1,200"] * 2
    widths = [
        float(width) for width in re.findall(r'<rect class="b\d" x="\d+" y="\d+" width="([\d.]+)" height="21"', text)
    ]
    assert [width / widths[2] for width in widths[:3]] == pytest.approx([95 / 1200, 150 / 1200, 1], abs=1e-3)
    assert "H200<" in text


def test_a_result_without_such_rows_is_refused(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"machine": {"device": "NVIDIA H200"}, "rows": [row("slots/1", 1, 2)]}))
    with pytest.raises(SystemExit) as stopped:
        picture.main([str(result), "--out", str(tmp_path / "drawn.svg")])
    assert stopped.value.code == 2
    assert not (tmp_path / "drawn.svg").exists()
