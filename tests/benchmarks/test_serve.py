"""The rows of `benchmarks.serve` with a tiny model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from support.tiny_models import write_pair

from benchmarks import serve

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpeculativeModel:
    for name, value in (("PROMPT", 20), ("NEW", 6), ("ROUNDS", 1)):
        monkeypatch.setattr(serve, name, value)
    monkeypatch.setitem(serve.LONG_PROMPT, "smollm2", 60)
    monkeypatch.setitem(serve.LONG_NEW, "smollm2", 120)
    monkeypatch.setattr(serve, "SETTLED_S", 0.0)
    target, head = write_pair(tmp_path)
    return SpeculativeModel.from_pretrained(target, head, tree=TreeConfig(2, 3, 9), dtype="float32", max_model_len=200)


@pytest.fixture
def server(model: SpeculativeModel) -> Iterator[serve.Server]:
    server = serve.Server(model, slots=3)
    yield server
    server.close()


def test_rows(model: SpeculativeModel, server: serve.Server) -> None:
    found = serve.run_row(model, server, clients=2, calls_each=1)
    assert found["different"] == 0
    assert found["spread"]["streamed_ratio"] == [found["streamed_ratio"]] * 2
    assert found["spread"]["whole"] == [found["whole_tokens_s"]] * 2
    assert serve.run_idle(model, server)["first_token_ms"] > 0
    assert serve.run_long(model, server, "smollm2", slots=3)["long_s"] > 0
