"""Weights as one stream per program: who owns which row, in which order, and rounding to FP8."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.kernels.packing import (
    assign_rows,
    chunk_size,
    cut_chunks,
    cut_parts,
    cut_tiles,
    quantize_rows,
    rows_per_program,
)


def test_worked_example_of_who_owns_which_row() -> None:
    rows = torch.tensor([0, 1, 2, 3, 4]) + 10
    assert assign_rows(rows, 2).tolist() == [[10, 11, 12], [13, 14, 0]]
    assert assign_rows(rows, 2, dealt=True).tolist() == [[10, 12, 14], [11, 13, 0]]
    assert assign_rows(rows, 2, dealt=True, rows=4).tolist() == [[10, 12, 14, 0], [11, 13, 0, 0]]
    assert (rows_per_program(5, 2), rows_per_program(4, 2), rows_per_program(1, 132)) == (3, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_chunks_lie_in_reading_order(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 96).to(dtype)
    assigned = assign_rows(weight, 5)
    cut = cut_chunks(assigned, 32)
    assert cut.shape == (5, 3, 8, 32)
    assert cut.is_contiguous()
    for row in range(37):
        for chunk in range(3):
            mine = cut[row // 8, chunk, row % 8]
            assert torch.equal(mine.float(), weight[row, chunk * 32 : chunk * 32 + 32].float())
    assert not cut[4, :, 5:].float().any()


def test_tiles_lie_one_after_the_other() -> None:
    weight = torch.randn(37, 64)
    """13 rows of each program: a tile of 8, then one of 5 without padding."""
    cut = cut_tiles(assign_rows(weight, 3, dealt=True), 8, 16)
    assert cut.shape == (3, 13 * 64)
    for row in range(37):
        first, rows = (0, 8) if row // 3 < 8 else (8, 5)
        tile = cut[row % 3, first * 64 : (first + rows) * 64].view(4, rows, 16)
        assert torch.equal(tile[:, row // 3 - first].flatten(), weight[row])


def test_chunk_size() -> None:
    assert [chunk_size(size, 64) for size in (4096, 576, 96, 48, 16, 24)] == [64, 64, 32, 16, 16, 0]


def test_fp8_error_is_bounded() -> None:
    """e4m3 has 3 bits of mantissa: half a step is 2^-4 of the value, or 2^-10 among the smallest, times the scale."""
    weight = torch.randn(50, 96) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0
    weight[8, 0] = 1e4
    rounded, scale = quantize_rows(weight)
    assert rounded.dtype == torch.float8_e4m3fn
    assert scale[7] == 1
    torch.testing.assert_close(scale, torch.where(weight.any(1), weight.abs().amax(1) / 448, 1.0))
    scaled = weight / scale[:, None]
    assert ((rounded.float() - scaled).abs() <= (scaled.abs() * 2**-4).clamp(min=2**-10) * 1.0001).all()
    assert torch.equal(rounded.float().abs().amax(1)[weight.any(1)], torch.full((49,), 448.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_worked_example_of_parts(dtype: torch.dtype) -> None:
    """Two rows of three chunks, one group of two parts: part 0 has the first chunk, part 1 the other two."""
    weight = (torch.arange(96).reshape(2, 48) / 8).to(dtype)
    cut = cut_parts(assign_rows(weight, 1), 2, 16, 2)
    assert cut.shape == (2, 1, 2, 2, 16)
    assert torch.equal(cut[0, 0, 0].float(), weight[:, :16].float())
    assert not cut[0, 0, 1].float().any()
    assert torch.equal(cut[1, 0, 0].float(), weight[:, 16:32].float())
    assert torch.equal(cut[1, 0, 1].float(), weight[:, 32:].float())
    # One program does both parts in turn.
    assert torch.equal(cut_parts(assign_rows(weight, 1), 2, 16, 1).float()[0], cut.float()[:, 0])
