"""Streaming LM-head top-k: a case by hand, ties, -inf, odd sizes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.kernels.lm_topk import lm_head_topk_ref
from kernels.parts import lm_head_topk
from kernels.tolerances import OP_ATOL


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "top_k", "programs", "block_n"),
    [
        (1, 16, 1, 1, 1, 256),
        (1, 64, 37, 1, 2, 16),
        (10, 48, 301, 10, 3, 64),
        (16, 64, 1000, 16, 5, 128),
        pytest.param(17, 32, 65, 4, 70, 16, marks=pytest.mark.slow),
        (3, 16, 16, 16, 4, 16),
        (33, 80, 63, 7, 1, 16),
    ],
)
def test_equals_the_definition(
    rows: int, hidden: int, vocab: int, top_k: int, programs: int, block_n: int, device: str
) -> None:
    x, weight = torch.randn(rows, hidden, device=device), torch.randn(vocab, hidden, device=device)
    values, ids, lse = lm_head_topk(x, weight, top_k, programs, block_n)
    wanted, _, wanted_lse = lm_head_topk_ref(x, weight, top_k)
    atol = OP_ATOL[torch.float32] * hidden**0.5
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=atol)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=atol)
    # Each id names a row of that value, and none comes twice.
    torch.testing.assert_close((x @ weight.T).gather(1, ids.long()), values, rtol=1e-6, atol=atol)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize(("programs", "block_n"), [(1, 16), (3, 32), (7, 256)])
def test_ties_go_to_the_smaller_id(programs: int, block_n: int, device: str) -> None:
    """Small integers add up exactly, so equal logits abound and the order is fully promised."""
    x = torch.randint(-2, 3, (9, 16), device=device).float()
    weight = torch.randint(-1, 2, (97, 16), device=device).float()
    values, ids, _ = lm_head_topk(x, weight, 8, programs, block_n)
    wanted, wanted_ids, _ = lm_head_topk_ref(x, weight, 8)
    assert torch.equal(values, wanted)
    assert torch.equal(ids, wanted_ids)


# Rows of x that pad the tile are 0, and 0 * -inf is NaN there; nothing reads those. log(0) is the right answer.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("finite", [0, 2, 30])
def test_minus_infinity_is_a_value(finite: int, device: str) -> None:
    x = torch.rand(2, 16, device=device) + 0.5
    weight = torch.zeros(40, 16, device=device)
    weight[:, 0] = float("-inf")
    kept = torch.randperm(40)[:finite]
    weight[kept] = torch.rand(finite, 16).to(device)
    values, ids, lse = lm_head_topk(x, weight, 5, num_programs=3, block_n=16)
    wanted, wanted_ids, wanted_lse = lm_head_topk_ref(x, weight, 5)
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=OP_ATOL[torch.float32])
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=OP_ATOL[torch.float32])
