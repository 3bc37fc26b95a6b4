"""Gate, up and SiLU over several programs, one after the other, against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from eagle_slim.runtime.drafter.kernels.gated_mlp import gated_mlp_ref
from kernels.parts import gated_mlp_on_device
from kernels.tolerances import OP_ATOL


def test_by_hand(device: str) -> None:
    """x = (1, 0, ...) with factor 2: gate 2 * 1, up 2 * 3, so silu(2) * 6; a row of zeros gives 0."""
    x = torch.zeros(2, 16, device=device)
    x[0, 0] = 1
    gate, up = torch.zeros(1, 16, device=device), torch.zeros(1, 16, device=device)
    gate[0, 0], up[0, 0] = 1, 3
    out = gated_mlp_on_device(x, torch.full((2,), 2.0, device=device), gate, up)
    assert out[:, 0].tolist() == pytest.approx([2 / (1 + math.exp(-2)) * 6, 0], rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "hidden", "intermediate", "programs", "block_n"),
    [
        (1, 16, 1, 1, 16),
        (10, 48, 112, 3, 16),
        (16, 64, 63, 5, 64),
        pytest.param(17, 80, 65, 70, 16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_the_definition(
    rows: int, hidden: int, intermediate: int, programs: int, block_n: int, dtype: torch.dtype, device: str
) -> None:
    x, gate, up = (torch.randn(size, hidden).to(device, dtype) for size in (rows, intermediate, intermediate))
    factor = (torch.rand(rows, device=device) + 0.5) / hidden**0.5
    found = gated_mlp_on_device(x, factor, gate, up, programs, block_n)
    torch.testing.assert_close(found.float(), gated_mlp_ref(x, factor, gate, up), rtol=2e-3, atol=OP_ATOL[dtype])


@pytest.mark.parametrize(("activation", "biased"), [("silu", True), ("gelu", False), ("gelu_tanh", True)])
def test_activations_and_biases(activation: str, biased: bool, device: str) -> None:
    x, gate, up = (torch.randn(size, 32, device=device) for size in (3, 40, 40))
    if activation != "silu":
        gate[0] *= 30  # far out, where the tanh form must not overflow
    bias = torch.randn(2, 40, device=device) if biased else None
    factor = torch.rand(3, device=device) + 0.5
    found = gated_mlp_on_device(x, factor, gate, up, 2, 16, activation, bias)
    wanted = gated_mlp_ref(x, factor, gate, up, activation, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
