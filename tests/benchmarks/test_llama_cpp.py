"""Rows of the llama.cpp benchmark: what is timed, and against what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import llama_cpp
from benchmarks.shared.llama_cpp import Answer


def test_a_round_and_its_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes 5 s, a pass 0.1 s plainly and 0.2 s or 0.15 s with two drafts accepted in each; later 1.5 times."""
    per_pass = {None: 0.1, "full.gguf": 0.2, "small.gguf": 0.15}
    calls = []

    def answer(_program, _prompt, head, *, depth, num_tokens):
        calls.append((None if head is None else head.name, num_tokens))
        accepted = 0 if head is None else depth
        passes = 1 + num_tokens // (1 + accepted)
        slower = 1.0 if len(calls) <= 12 else 1.5
        decode_s = passes * per_pass[calls[-1][0]] * slower
        text = "abc" if head is None or head.name == "full.gguf" else "abd"
        return Answer(text, 9, passes * (1 + accepted), passes * accepted, decode_s, 5 + decode_s)

    heads = {"plain": None, "full bf16": Path("full.gguf"), "64 bf16": Path("small.gguf")}
    monkeypatch.setattr(llama_cpp, "generate", answer)
    monkeypatch.setattr(llama_cpp, "build", lambda: Path("program"))
    monkeypatch.setattr(llama_cpp, "make_heads", lambda *_: heads)
    monkeypatch.setattr(llama_cpp, "chat_prompts", lambda number: ["?"] * number)
    out = tmp_path / "result.json"
    options = ["--sizes", "full,64", "--prompts", "2", "--depth", "2", "--new", "30", "--rounds", "2"]
    llama_cpp.main([*options, "--out", str(out)])
    assert [head for head, _ in calls[:6:2]] == [None, "full.gguf", "small.gguf"]
    assert [head for head, _ in calls[12:18:2]] == ["full.gguf", "small.gguf", None]
    result = json.loads(out.read_text())
    assert len(result["answers"]) == 4
    plain, full, small = result["rows"]
    assert plain["ms_per_token"] == pytest.approx(100 * 1.25)
    assert [full["ms_per_token"], full["clock_ms_per_token"]] == pytest.approx([200 / 3 * 1.25] * 2)
    assert (plain["accepted_length"], small["accepted_length"]) == (1, 3)
    assert small["speed / full"] == pytest.approx(4 / 3)
    assert small["quartiles / plain"] == pytest.approx([2, 2])
    assert (full["as_plain"], small["as_plain"]) == ("4 of 4", "0 of 4")
    assert "speed / full" not in plain
    assert "speed / full" not in full


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [["full"], ["full", "512"]])
def test_heads_of_each_size_and_type(tmp_path: Path, sizes: list[str]) -> None:
    heads = llama_cpp.make_heads(tmp_path, sizes, ["bf16", "q8_0"])
    assert list(heads) == ["plain", *(f"{size} {kind}" for kind in ("bf16", "q8_0") for size in sizes)]
    sizes_bytes = {name: head.stat().st_size for name, head in heads.items() if head is not None}
    assert len(set(sizes_bytes.values())) == len(sizes_bytes)
