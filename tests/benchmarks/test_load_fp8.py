import pytest
import torch
from eagle_slim.runtime.drafter.tuning.problem import Dims
from eagle_slim.runtime.opening import target_files

from benchmarks import load_fp8

CPU = torch.device("cpu")


@pytest.mark.parametrize("published", [False, True])
def test_a_checkpoint_of_holes(tmp_path, monkeypatch, published):
    monkeypatch.setattr(target_files, "lacks_fp8", lambda device: None)
    monkeypatch.setattr(load_fp8, "SHARD_BYTES", 40_000)
    config = load_fp8.config_of(Dims(64, 96, 4, 2, 16, 48), 3)
    row = load_fp8.measure(CPU, config, published, tmp_path)
    matrices, rows = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96), 3 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    rest = 2 * (48 * 64 + 3 * 2 * 64)
    assert row["weights_GB"] == pytest.approx((matrices + 4 * rows + rest) / 1e9)
    assert row["file_GB"] == pytest.approx(
        ((matrices + 4 * rows) if published else 2 * matrices) / 1e9 + (rest + 2 * (48 + 1) * 64) / 1e9
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_what_is_quantised_is_compared(tmp_path):
    load_fp8.check(CPU, tmp_path)
