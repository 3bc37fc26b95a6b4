"""Counting and converting, whole but small; and what stands beside every figure."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims
from support.small_tokenizers import byte_level_bpe

from benchmarks import convert, count
from benchmarks.shared import timing


def test_texts() -> None:
    first = list(itertools.islice(count.texts(1, 1 << 20), 3))
    assert first == list(itertools.islice(count.texts(1, 1 << 20), 3))
    assert first[0] != next(count.texts(2, 1 << 20))
    sizes = [len(text) for text in count.texts(3, 20_000)]
    assert sum(sizes) >= 20_000 > sum(sizes[:-1])


def test_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baselines count the same tokens."""
    path = tmp_path / "tokenizer.json"
    byte_level_bpe(300, ["<|im_end|>"]).save(str(path))
    tokenizer = count.load_tokenizer(str(path))
    plain = count.encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    documents = list(count.texts(0, 5_000))
    numbers = {name: baseline(plain)(documents) for name, baseline in count.BASELINES.items()}
    assert len(set(numbers.values())) == 1
    rates = {"bare": iter([2.0, 3.0, 5.0]), "FR-Spec loop": iter([1.0, 2.0, 1.0]), "ours": iter([4.0, 6.0, 9.0])}
    monkeypatch.setattr(count, "in_new_process", lambda name, *_: next(rates[name]))
    monkeypatch.setattr(count, "our_rate", lambda *_: next(rates["ours"]))
    found = count.measure(tokenizer, "tokenizers", 1, 3, 2_000)
    assert found["tokens_per_s"] == {"ours": 6.0, "bare": 3.0, "FR-Spec loop": 1.0}
    assert (found["ours / bare"], found["ours / FR-Spec loop"]) == (2.0, 6.0)


def test_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "llama-3.1-8b", Dims(32, 48, 4, 2, 8, 90))
    out = tmp_path / "result.json"
    arguments = ["--folder", str(tmp_path / "files"), "--draft-vocab", "40", "--repeats", "2", "--out", str(out)]
    convert.main(arguments)
    result = json.loads(out.read_text())
    assert result["ratio"] == result["median_convert_s"] / result["median_cp_fsync_s"]
    assert len(result["convert_s"]) == len(result["cp_fsync_s"]) == 3
    assert list((tmp_path / "files").iterdir()) == []


def test_the_commit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_COMMIT", "abc")
    assert timing.machine(torch.device("cpu"))["commit"] == "abc"
    monkeypatch.delenv("EAGLE_SLIM_COMMIT")
    assert timing.commit()
