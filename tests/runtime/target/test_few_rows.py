"""Products of a few rows, against float64."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.target.few_rows import few_rows


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 4), (3, 4), (13,), (0,), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("size", [640, 650], ids="out-{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_are_a_linear_layers(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((*shape, 24), generator=generator).to(dtype)
    weight = torch.randn((size, 24), generator=generator).to(dtype)
    transposed = torch.randn((24, size), generator=generator).to(dtype).t()
    for matrix in (weight, transposed):
        found = few_rows(inputs, matrix)
        assert (found.shape, found.dtype) == ((*shape, size), dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            found.double(), inputs.double() @ matrix.double().t(), rtol=tolerance, atol=20 * tolerance
        )
