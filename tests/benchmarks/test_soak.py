"""The soak, whole but small: what it does to calls, what it compares, what it finds and tells."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel

from benchmarks import exact, soak
from benchmarks.shared import faults

pytestmark = [
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning"),
    # An interrupt at any place may fall into a finalizer, which loses it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CPU = torch.device("cpu")


@pytest.fixture
def small(model: SpeculativeModel, pool: exact.Pool, monkeypatch: pytest.MonkeyPatch) -> soak.Soak:
    monkeypatch.setattr(soak, "EVERY", 10)
    return soak.Soak([model, model.with_tree(soak.TREES[1])], pool, 0, most=3, longest=70)


@pytest.mark.slow
def test_calls_with_faults_leave_the_others_right(small: soak.Soak) -> None:
    small.run(lambda soak: soak.calls == 50)
    result = json.loads(json.dumps(small.result()))
    assert (result["calls"], result["answers_that_differ"], result["differences"]) == (50, 0, [])
    assert result["tokens"] > 100
    counts = result["counts"]
    assert counts["no fault: calls answered"] > 25
    assert counts["streamer: calls ended"] > 0
    assert counts["memory beside: calls answered"] > 0
    assert sum(count for name, count in counts.items() if name.startswith("interrupt")) > 0
    assert sum(counts.values()) == 50
    # Each fault that ended a call has the next one checked, and of the rest every tenth answer is.
    ended = sum(count for name, count in counts.items() if name.endswith("ended"))
    assert ended / 2 < result["answers_checked"] < result["tokens"] / 5
    assert [noted["calls"] for noted in result["memory"]] == [10, 20, 30, 40, 50]
    assert all(noted["host_peak_bytes"] > 1 << 20 for noted in result["memory"])


def test_a_wrong_answer_after_a_fault_is_told(small: soak.Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = soak.generate

    def spoiled(model: SpeculativeModel, *arguments: Any, **options: Any) -> Any:
        output = generate(model, *arguments, **options)
        if small.counts["streamer: calls ended"] == 1:
            output.results[-1].token_ids[0] ^= 5
        return output

    monkeypatch.setattr(soak, "generate", spoiled)
    small.run(lambda soak: bool(soak.differences))
    assert not small.is_good
    difference = json.loads(json.dumps(small.result()["differences"]))[0]
    assert difference["found"] == [difference["plain"][0] ^ 5]
    assert difference["token"] == 0
    assert difference["prompt"]


def test_what_no_fault_explains_ends_the_run(small: soak.Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("another")

    monkeypatch.setattr(soak, "generate", fails)
    with pytest.raises(RuntimeError, match="another"):
        small.run(lambda soak: soak.calls == 99)
    assert small.calls == 0


def test_what_a_fault_explains() -> None:
    lack = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    try:
        try:
            raise lack
        finally:
            raise RuntimeError("capture_end failed")
    except RuntimeError as error:
        later = error
    for error, explained in (
        (lack, {faults.BESIDE, faults.LIMIT}), (later, {faults.BESIDE, faults.LIMIT}),
        (faults.StreamerError(), {faults.STREAMER}), (KeyboardInterrupt(), {faults.INTERRUPT}),
        (RuntimeError("another"), set()), (MemoryError("out of memory"), set()),
    ):  # fmt: skip
        assert {
            fault for fault in (None, *faults.faults_on(torch.device("cuda"))) if faults.explains(fault, error)
        } == (explained)
    assert faults.LIMIT not in faults.faults_on(CPU)


def test_faults() -> None:
    rng = random.Random(0)
    with pytest.raises(KeyboardInterrupt), faults.injected(faults.INTERRUPT, CPU, rng, 0.1):
        time.sleep(60)
    for fault in (None, faults.STREAMER, faults.BESIDE):
        with faults.injected(fault, CPU, rng, 0.1):
            pass
    streamer = faults.FaultyStreamer(2)
    streamer.put(torch.zeros(1))
    streamer.put(torch.zeros(1))
    with pytest.raises(faults.StreamerError):
        streamer.put(torch.zeros(1))


def test_the_limit_of_memory_goes_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 1 << 31))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: set_to.append(share))
    with pytest.raises(KeyError), faults.injected(faults.LIMIT, torch.device("cuda"), random.Random(0), 1.0):
        raise KeyError
    assert 0.5 < set_to[0] < 0.625
    assert set_to[1:] == [1.0]


def test_growth(small: soak.Soak) -> None:
    assert (small.growth, small.is_good) == (None, False)
    small.checked = 1
    assert small.is_good
    small.memory = [{"device_bytes": held, "host_peak_bytes": 1} for held in (50, 100, 90, 105)]
    assert (small.growth, small.is_good) == (1.05, True)
    small.memory[-1]["device_bytes"] = 106
    assert not small.is_good


@pytest.mark.slow
def test_the_built_in_head_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    few = ["--prompts", "2", "--new", "6", "--longest", "64", "--questions", "24", "--seconds", "300"]
    with pytest.raises(SystemExit) as ended:
        soak.main(["--tokens", "60", "--out", str(out), *few])
    result = json.loads(out.read_text())
    assert ended.value.code == 0
    assert result["is_good"]
    assert 60 <= result["tokens"] < 100
    assert result["memory"][-1]["tokens"] == result["tokens"]
    assert {"device", "torch", "triton", "commit"} <= set(result["machine"])
