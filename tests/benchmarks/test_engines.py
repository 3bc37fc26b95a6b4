import json

import pytest
from support.raising import exit_code

from benchmarks import engines

LINES = [
    {
        "name": "vllm plain",
        "engine": "vllm",
        "job": {"case": "plain", "quantization": "fp8", "dims": "qwen3-30b-a3b"},
        "facts": {"version": "0.25.1", "gpu": "a card", "attention": None},
        "result": {"speeds": [{"batch": 4, "ms_per_step": 6.3, "accepted_length": None}], "touched": {"4": 29.1}},
    },
    {"name": "sglang plain", "engine": "sglang", "job": {"case": "plain"}, "facts": None, "error": "out of time"},
]


@pytest.mark.slow
def test_ours(random_model, monkeypatch):
    cases = [("plain", 1), ("chain of 3", 1), ("plain", 2), ("tree of 16", 2)]
    monkeypatch.setitem(engines.MEASURED, "bf16", cases)
    rows = list(engines.measure(random_model, "bf16", 60, 20, 8))
    assert [(row["case"], row["sequences"]) for row in rows] == cases
    assert all(row["ms"] > 0 for row in rows)
    assert [row["accepted_length"] for row in rows if row["case"] == "plain"] == [1.0, 1.0]
    assert all(1.5 < row["accepted_length"] < 3.5 for row in rows if row["case"] != "plain")


def test_lines_beside_ours(tmp_path):
    same = {"case": "plain", "sequences": 4}
    ours = {**same, "engine": "eagle-slim", "dims": engines.DIMS, "weights": "bf16", "ms": 5.6, "accepted_length": 1.0}
    result, fp8, lines = (tmp_path / name for name in ("result.json", "fp8.json", "lines.jsonl"))
    for path, weights in ((result, "bf16"), (fp8, "fp8")):
        path.write_text(json.dumps({"machine": {"device": "a card"}, "rows": [ours | {"weights": weights}]}))
    lines.write_text("\n".join(map(json.dumps, LINES)))
    command = ["--add", str(result), str(fp8), "--lines", str(lines), "--out", str(result)]
    engines.main([*command, "--chart", str(tmp_path / "chart.svg")])
    done = json.loads(result.read_text())
    theirs = {**same, "engine": "vLLM 0.25.1", "weights": "fp8", "ms": 6.3, "attention": None, "accepted_length": None}
    theirs |= {"dims": "qwen3-30b-a3b", "touched": 29.1}
    assert done["rows"] == [ours, ours | {"weights": "fp8"}, theirs]
    assert done["failed"] == {"sglang plain": "out of time"}
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    # Another card is refused.
    result.write_text(json.dumps({"machine": {"device": "another card"}, "rows": []}))
    assert exit_code(engines.main, ["--add", str(result), "--lines", str(lines)]) == 2
