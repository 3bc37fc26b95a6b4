"""Counting and converting, whole but small; and what stands beside every figure."""

import json

import pytest
import torch
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims
from support.small_tokenizers import byte_level_bpe

from benchmarks import offline
from benchmarks.shared import timing


@pytest.mark.slow
def test_counting(tmp_path):
    path, out = tmp_path / "tokenizer.json", tmp_path / "result.json"
    byte_level_bpe(300, ["<|im_end|>"]).save(str(path))
    arguments = ["--rows", "counting", "--tokenizer", str(path), "--megabytes", "5", "--repeats", "1"]
    offline.main([*arguments, "--workers", "0", "--out", str(out)])
    found = json.loads(out.read_text())["counting"]
    assert found["ratio"] == found["median_ours"] / found["median_bare"]


def test_converting(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "llama-3.1-8b", Dims(32, 48, 4, 2, 8, 90))
    out = tmp_path / "result.json"
    (tmp_path / "files").mkdir()
    arguments = ["--rows", "converting", "--folder", str(tmp_path / "files"), "--draft-vocab", "40", "--repeats", "1"]
    offline.main([*arguments, "--out", str(out)])
    result = json.loads(out.read_text())["converting"]
    assert result["ratio"] == result["median_convert_s"] / result["median_cp_fsync_s"]
    assert len(result["convert_s"]) == len(result["cp_fsync_s"]) == 2
    assert list((tmp_path / "files").iterdir()) == []


def test_the_commit_is_named(monkeypatch):
    monkeypatch.setenv("EAGLE_SLIM_COMMIT", "abc")
    assert timing.machine(torch.device("cpu"))["commit"] == "abc"
    monkeypatch.delenv("EAGLE_SLIM_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert timing.commit() == "unknown"
