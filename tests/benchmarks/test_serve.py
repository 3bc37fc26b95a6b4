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


def test_servers_beside_ours(server: serve.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PROMPT_IDS", (3, 300))
    dead, *rows = serve.run_beside({"eagle-slim": server.port, "other": server.port, "dead": 1})
    assert dead["server"] == "dead"
    assert "port 1" in dead["not_run"]
    assert [(row["server"], row["clients"]) for row in rows] == [
        (n, k) for k in (1, 16) for n in ("eagle-slim", "other")
    ]
    assert all(0 < row["token_ms"] < row["first_token_ms"] * 1e3 and row["tokens_s"] > 0 for row in rows)
