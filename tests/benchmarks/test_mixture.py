"""The benchmark of mixtures over tiny models on a CPU: what its routers touch, and its rows."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.tuning import problem

from benchmarks import engines, mixture
from benchmarks.mixture import Mixture, check_layer, measured_row
from benchmarks.shared import decoding
from benchmarks.shared.routing import Law, RoutedModel

# Experts in MXFP4 are slow on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.SpeedWarning")
CPU = torch.device("cpu")
SIZES = {
    "qwen3": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    "gpt-oss": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 32},
}
ROWS = ["pass/uniform/1/6", "pass/uniform/3/1", "step/uniform/1", "draft/uniform/4", "draft/uniform/4/all", "memory/90"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in SIZES.items():
        monkeypatch.setitem(problem.MODELS, name, problem.Dims(64, 48, 4, 2, 16, 90))
        monkeypatch.setitem(decoding.LAYERS, name, 4)
        monkeypatch.setitem(decoding.EXPERTS, name, sizes)
    monkeypatch.setattr(mixture, "ROWS", 40)
    monkeypatch.setattr(mixture, "PREFIX", 9)
    monkeypatch.setattr(mixture, "STEPS", 4)


def test_biased_tokens_of_a_sequence_share_experts() -> None:
    uniform, biased = (Law(name, 128, 8, 4) for name in ("uniform", "biased"))
    assert uniform.touched(6) == pytest.approx(128 * (1 - (120 / 128) ** 6), abs=1)
    assert biased.touched(6) == pytest.approx(24, abs=1)


@pytest.mark.parametrize(
    ("name", "row"), [*(("gpt-oss", row) for row in ROWS), *(("qwen3", row) for row in (*ROWS[:4], "price/biased/3/2"))]
)
def test_rows(name: str, row: str) -> None:
    kind, *rest = row.split("/")
    found = measured_row(Mixture(name, CPU, torch.float32), kind, rest, 1e9)
    if kind == "pass":
        assert 4 < found["touched"] <= 16
        assert found["pass_ms"] > 0 < found["floor_ms"]
    elif kind == "draft":
        assert found["over_plain"] > 0
    elif kind == "price":  # Other logits are an error.
        assert found["ours_ms"] > 0 < found["grouped_ms"]


def test_plain_steps_beside_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PLAIN", [("plain", 1), ("plain", 3)])
    rows = list(engines.measure(RoutedModel("qwen3", CPU, torch.float32), "fp8", 0, 9, 3, dims="qwen3"))
    told = [(row["dims"], row["case"], row["weights"], row["sequences"]) for row in rows]
    assert told == [("qwen3", "plain", "fp8", count) for count in (1, 3)]
    assert all(row["ms"] > 0 for row in rows)


def test_sequences_go_on_from_tokens_of_their_own() -> None:
    model = RoutedModel("qwen3", CPU, torch.float32)
    decoder = model.decoder(model.new_cache(3, 40), None)
    decoding.fill(decoder, 3, 9)
    assert len(decoder.state.new_tokens[:, 0].unique()) == 3


@pytest.mark.parametrize("name", SIZES)
def test_a_layer_is_checked_before_anything_is_timed(device: str, name: str) -> None:
    if device == "cpu":
        pytest.skip("in bfloat16 the interpreter does not multiply")
    assert check_layer(name, torch.device(device))["is_exact"]
