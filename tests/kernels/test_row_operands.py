"""Rows that become operands, and the factors of their RMSNorm."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.kernels.row_operands import norm_factors_ref, tap_operands_ref
from kernels.parts import norm_factors, tap_operands


def test_taps_by_hand(device: str) -> None:
    """Pieces lie side by side; scaled, the largest becomes 256; a row of zeros stays."""
    taps = tuple(torch.tensor([[1.0 + tap, -2.0 * tap], [0.0, 0.0]], device=device) for tap in range(3))
    joined, divisor = tap_operands(taps, scaled=False)
    assert joined.tolist() == [[1, 0, 2, -2, 3, -4], [0] * 6]
    assert divisor.tolist() == [1, 1]
    joined, divisor = tap_operands(taps, scaled=True)
    assert divisor.tolist() == [4 / 256, 1]
    assert joined[0].tolist() == [64, 0, 128, -128, 192, -256]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rows", "size", "taps"), [(1, 1, 1), (3, 63, 3), (5, 128, 1), (2, 200, 3)])
def test_taps_equal_the_definition(rows: int, size: int, taps: int, scaled: bool, device: str) -> None:
    given = tuple((300 * torch.randn(rows, size)).half().to(device) for _ in range(taps))
    for found, wanted in zip(tap_operands(given, scaled), tap_operands_ref(given, scaled), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("size", "taps", "norms"), [(63, 3, 1), (16384, 3, 3), (60, 1, 1), (60, 1, 4), (60, 1, 3)])
def test_normed_taps_equal_the_definition(size: int, taps: int, norms: int, scaled: bool, device: str) -> None:
    given = tuple((30 * torch.randn(2, size)).to(device) for _ in range(taps))
    norm = torch.rand(taps * size, device=device) + 0.5
    options = {"norm": norm, "norms": norms, "eps": 1e-5}
    for found, wanted in zip(
        tap_operands(given, scaled, **options), tap_operands_ref(given, scaled, **options), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_factors_by_hand(device: str) -> None:
    """Two programs saw 2 and 4 of a row of two values: 1 / sqrt(6 / 2 + 1)."""
    assert norm_factors(torch.tensor([[2.0], [4.0]], device=device), 2, 1.0).tolist() == [0.5]


@pytest.mark.parametrize(("programs", "rows"), [(1, 1), (132, 10), (300, 16), (7, 200)])
def test_factors_equal_the_definition(programs: int, rows: int, device: str) -> None:
    """300 programs at 16 rows take two chunks, 7 at 256 rows one of 16."""
    squares = torch.rand(programs, rows, device=device)
    torch.testing.assert_close(norm_factors(squares, 64, 1e-5), norm_factors_ref(squares, 64, 1e-5), rtol=1e-5, atol=0)
