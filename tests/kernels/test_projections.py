"""Projections cut by rows and columns: packing, products and sums over several programs, one after the other."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from eagle_slim.runtime.drafter.kernels.packing import assign_rows, cut_parts, rows_per_program
from eagle_slim.runtime.drafter.kernels.projections import (
    Parts,
    Residual,
    Share,
    finish_residual,
    finish_rows,
    stream_parts,
)
from eagle_slim.runtime.drafter.kernels.weight_stream import NextOperand, Operand, Tile
from kernels.tolerances import OP_ATOL


@triton.jit
def _stream_kernel(
    x_ptr, stream_ptr, parts, num_rows, num_chunks, region,
    PROGRAMS: tl.constexpr, K: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of x lie in two halves: columns from SEGMENT on belong to a tensor of their own after the first."""
    offs_m = tl.arange(0, 16).to(tl.int64)
    second = 16 * SEGMENT + offs_m * (K - SEGMENT)
    x = Operand(x_ptr, offs_m * SEGMENT, second, offs_m < num_rows, SEGMENT // TILE.block_k, K)
    stream_parts(x, stream_ptr + tl.program_id(0) * region, parts, num_chunks, PROGRAMS, TILE.block_k, TILE)


@triton.jit
def _finish_kernel(
    parts, out_ptr, operand_ptr, residual_ptr, norm_ptr, squares_ptr, num_rows,
    SHARE: tl.constexpr, RESIDUAL: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, 16)
    factor = tl.full([16], 2.0, tl.float32)
    if RESIDUAL:
        finish_residual(
            parts, offs_m < num_rows, out_ptr, norm_ptr, Residual(residual_ptr, 15 - offs_m, 3 * factor, norm_ptr),
            out_ptr, norm_ptr, NextOperand(operand_ptr, factor), squares_ptr, SHARE, False, OPTIONS, True, OPTIONS,
        )  # fmt: skip
    else:
        finish_rows(
            parts, offs_m < num_rows, factor, out_ptr, norm_ptr, out_ptr, NextOperand(operand_ptr, factor),
            SHARE, False, True, True,
        )  # fmt: skip


# Rows, columns, the first segment's columns, programs, programs to a group: more and fewer programs than parts, chunks
# that parts cannot share evenly, rows that groups cannot, groups that leave programs out.
CASES = [
    (50, 96, 32, 8, 4),
    (50, 96, 96, 1, 2),
    (130, 64, 16, 6, 4),
    (7, 80, 48, 12, 2),
    (33, 48, 16, 5, 1),
    (9, 64, 16, 3, 4),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("residual", [False, True])
def test_equals_the_product(case: tuple[int, int, int, int, int], residual: bool, device: str) -> None:
    rows, columns, segment, programs, split = case
    options = residual and split == 4  # the residual goes through a norm of its own, and there is a bias
    num_nodes, block_k = 10, 16
    x, weight = torch.randn(16, columns), torch.randn(rows, columns)
    groups = max(1, programs // split)
    group_rows = rows_per_program(rows, groups)
    packed = cut_parts(assign_rows(weight, groups, rows=group_rows), split, block_k, programs).to(device)
    partial = torch.full((groups * split * group_rows, 16), float("nan"), device=device)
    halves = torch.cat([x[:, :segment].flatten(), x[:, segment:].flatten()]).to(device)
    _stream_kernel[(programs,)](
        halves, packed, Parts(partial, split, group_rows), num_nodes, columns // block_k, packed[0].numel(),
        PROGRAMS=programs, K=columns, SEGMENT=segment, TILE=Tile(32, block_k, 2),
    )  # fmt: skip
    out, operand, squares = torch.zeros(16, rows), torch.zeros(16, rows), torch.zeros(programs, 16)
    out, operand, squares = out.to(device), operand.to(device), squares.to(device)
    other, norm = torch.randn(16, rows), torch.randn(rows)
    _finish_kernel[(programs,)](
        Parts(partial, split, group_rows), out, operand, other.to(device), norm.to(device), squares, num_nodes,
        SHARE=Share(rows, rows_per_program(rows, programs), 16), RESIDUAL=residual, OPTIONS=options,
    )  # fmt: skip
    product = x @ weight.T
    added = 6 * other.flip(0) * norm + norm if options else other.flip(0)
    wanted = product + added if residual else 2 * product + norm
    scaled = 2 * norm * wanted if residual else 2 * wanted
    close = {"rtol": 1e-5, "atol": OP_ATOL[torch.float32] * columns**0.5}
    torch.testing.assert_close(out.cpu()[:num_nodes], wanted[:num_nodes], **close)
    torch.testing.assert_close(operand.cpu()[:num_nodes], scaled[:num_nodes], **close)
    assert not out[num_nodes:].any()
    if residual:
        torch.testing.assert_close(squares.cpu().sum(0)[:num_nodes], (wanted**2).sum(1)[:num_nodes], **close)


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
