"""The experts of a layer against their twins, their choice by hand, and each row's bits alone and in company."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from eagle_slim.runtime.target.fp8 import Fp8Weight
from eagle_slim.runtime.target.kernels import experts as module
from eagle_slim.runtime.target.kernels import products
from eagle_slim.runtime.target.kernels.experts import Biases, Clamp, Experts, Routing
from eagle_slim.runtime.target.kernels.products import Norm, NormedRows
from eagle_slim.runtime.target.mxfp4 import Mxfp4Weight
from kernels.test_products import QUANTISE
from kernels.tolerances import OP_ATOL
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

SMALL = {"hidden": 96, "width": 40, "count": 6, "top_k": 2}
QWEN3 = {"hidden": 2048, "width": 768, "count": 128, "top_k": 8}
GPT_OSS = {"hidden": 2880, "width": 2880, "count": 32, "top_k": 4}
CLAMP = Clamp(1.702, 1.5)


class Found(NamedTuple):
    """What a layer gives: its routing, and rows after it."""

    routing: Routing
    rows: NormedRows
    tap: Tensor


def experts_of(
    dtype: torch.dtype, device: str, hidden: int, width: int, count: int, top_k: int, normalises: bool = True
) -> Experts:
    torch.manual_seed(hidden + width)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)

    return Experts(draw(count, hidden), draw(count * 2 * width, hidden), draw(count * hidden, width), top_k, normalises)


def in_fp8(experts: Experts, how: str) -> Experts:
    """Each expert's matrices by themselves: a block of scales never belongs to two of them."""

    def quantise(weight: Tensor) -> Fp8Weight:
        parts = [QUANTISE[how](each) for each in weight.chunk(experts.count)]
        return Fp8Weight(torch.cat([each.words for each in parts]), torch.cat([each.scales for each in parts]))

    return replace(experts, gate_up=quantise(experts.gate_up), down=quantise(experts.down))


def as_gpt_oss(experts: Experts, is_packed: bool) -> Experts:
    """With biases and a clamp, and random matrices in MXFP4: every pair of codes, scales of 2^-10 to 2^-6."""
    device, dtype, count = experts.router.device, experts.router.dtype, experts.count
    sizes = count, *(len(each) for each in (experts.gate_up, experts.down))  # type: ignore[arg-type]
    biases = Biases(*(torch.randn(size, device=device).to(dtype) for size in sizes))
    experts = replace(experts, biases=biases, clamp=CLAMP)
    return replace(experts, gate_up=mxfp4(experts.gate_up), down=mxfp4(experts.down)) if is_packed else experts


def mxfp4(like: Tensor) -> Mxfp4Weight:
    (out, size), device = like.shape, like.device
    weight = Mxfp4Weight.empty(out, size, device)
    weight.put_blocks(torch.randint(256, (out, size // 32, 16), device=device).to(torch.uint8))
    weight.put_scales(torch.randint(117, 122, (out, size // 32), device=device).to(torch.uint8))
    return weight


def run_layer(experts: Experts, x: Tensor, unused: tuple[int, ...] = (), is_twin: bool = False) -> Found:
    """All operations for rows ``x`` [rows, hidden]; ``unused``: rows that nobody reads."""
    suffix = "_ref" if is_twin else ""
    count, hidden = x.shape
    device, dtype = x.device, x.dtype
    gain = (torch.arange(hidden, device=device) % 7 / 4 + 0.5).to(dtype)
    norm = Norm.of(gain, 1e-5, experts.gate_up)
    squares = torch.empty(count, products.num_groups(hidden), device=device)
    rows = NormedRows(torch.empty_like(x), torch.empty_like(x), squares)
    kv_rows = torch.arange(count, dtype=torch.int32, device=device)
    kv_rows[list(unused)] = -1
    routing = Routing.allocate(experts, count)
    for each in (routing.gated, routing.parts):
        each.fill_(float("nan"))  # what was never written must reach no result
    tap, lift = torch.zeros(count, 2 * hidden, device=device, dtype=dtype), products.lift_of(experts.down, dtype)
    tokens = torch.arange(count, dtype=torch.int32, device=device)
    getattr(products, f"embed{suffix}")(x, tokens, norm, rows)
    getattr(module, f"route{suffix}")(rows, norm, experts, kv_rows, routing)
    getattr(module, f"gated_experts{suffix}")(rows, norm, experts, routing, lift)
    getattr(module, f"add_experts{suffix}")(experts, routing, norm._replace(lift=1.0), rows, tap[:, hidden:])
    return Found(routing, rows, tap)


def check(experts: Experts, x: Tensor, unused: tuple[int, ...] = ()) -> Found:
    """Kernels give what their twins do, and choose the same experts."""
    wanted, found = run_layer(experts, x, unused, True), run_layer(experts, x, unused)
    assert torch.equal(found.routing.picks.experts, wanted.routing.picks.experts)
    atol = 2 * OP_ATOL[x.dtype]
    torch.testing.assert_close(found.routing.picks.weights, wanted.routing.picks.weights, atol=atol, rtol=0)
    for name in ("residual", "scaled", "squares"):
        mine, theirs = getattr(found.rows, name).float(), getattr(wanted.rows, name).float()
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < atol, name
    for each in (found, wanted):
        weights = each.routing.picks.weights
        assert torch.equal(weights, weights.to(x.dtype).float()), "rounded as transformers does"
    assert torch.equal(found.tap[:, x.shape[1] :], found.rows.residual)
    assert not found.routing.picks.finished.any()
    return found


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, SMALL),
        (2, SMALL),
        (19, SMALL),
        (5, {"hidden": 560, "width": 24, "count": 70, "top_k": 3}),
        # Listed, by two steps of a list's program, and more than a tile of an expert's rows.
        (520, {"hidden": 64, "width": 32, "count": 3, "top_k": 2}),
        (3, {"hidden": 32, "width": 16, "count": 2, "top_k": 2}),
        # A last product in two splits, apart.
        (2, {"hidden": 80, "width": 2064, "count": 3, "top_k": 2}),
    ],
)
def test_kernels_are_their_twins(device: str, rows: int, sizes: dict[str, int], normalises: bool) -> None:
    experts = experts_of(torch.float32, device, **sizes, normalises=normalises)
    check(experts, torch.randn(rows, sizes["hidden"], device=device))


def test_of_listed_pairs_a_program_adds_both_splits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW_PAIRS", 8)  # of hundreds it takes the interpreter long
    experts = experts_of(torch.float32, device, hidden=80, width=2064, count=3, top_k=2)
    check(experts, torch.randn(9, 80, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False], ids=["MXFP4", "plain"])
@pytest.mark.parametrize(("rows", "width"), [(1, 160), (19, 160), (270, 160), (2, 2080)])
def test_gpt_oss_is_its_twin(device: str, rows: int, width: int, is_packed: bool, dtype: torch.dtype) -> None:
    """Tails of rows and of columns: 192 and 160 of tiles of 128, the last scales not of four; two splits."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("in bfloat16 the interpreter does not multiply")
    experts = as_gpt_oss(experts_of(dtype, device, hidden=192, width=width, count=5, top_k=3), is_packed)
    check(experts, torch.randn(rows, 192, device=device).to(dtype), unused=(0,) if rows > 1 else ())


def test_mxfp4_holds_every_number_of_transformers() -> None:
    """All pairs of codes at all scales, in both types, as its own dequantising gives them."""
    blocks = torch.arange(129 * 256, dtype=torch.int32).view(1, 129, 16, 16).to(torch.uint8)
    scales = torch.arange(129).view(1, 129, 1).expand(1, 129, 16).to(torch.uint8)
    weight = Mxfp4Weight.empty(129, 512, torch.device("cpu"))
    weight.put_blocks(blocks)
    weight.put_scales(scales)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.dequantised(dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", [None, *QUANTISE])
def test_narrow_types_are_their_twins(device: str, dtype: torch.dtype, how: str | None) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("in bfloat16 the interpreter does not multiply")
    experts = experts_of(dtype, device, hidden=160, width=48, count=5, top_k=2)
    check(experts if how is None else in_fp8(experts, how), torch.randn(9, 160, device=device).to(dtype))


@pytest.mark.parametrize("width", [80, pytest.param(2064, id="splits apart", marks=pytest.mark.slow)])
def test_programs_take_experts_in_turn(device: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than there is work; some rows are read by nobody, then all of them."""
    monkeypatch.setattr(module, "num_processors", lambda _device: 1)
    experts = experts_of(torch.float32, device, hidden=160, width=width, count=40, top_k=3)
    for unused in ((), (0, 7), tuple(range(8))):
        check(experts, torch.randn(8, 160, device=device), unused=unused)


def test_one_expert_takes_all_rows_and_one_none(device: str) -> None:
    """More rows of an expert than a tile has, in either way of finding them."""
    for rows in (40, 300):
        experts = experts_of(torch.float32, device, **SMALL)
        x = torch.randn(rows, SMALL["hidden"], device=device)
        x[:, 0] = 9
        experts.router[2, 0], experts.router[4, 0] = 50, -50
        picked = check(experts, x, unused=(7,)).routing.picks.experts
        used = [row for row in range(rows) if row != 7]
        assert (picked[used, 0] == 2).all()
        assert not (picked == 4).any()
        assert (picked[7] == SMALL["count"]).all()


def test_rows_that_nobody_reads_go_to_no_expert(device: str) -> None:
    experts = experts_of(torch.float32, device, **SMALL)
    x = torch.randn(4, SMALL["hidden"], device=device)
    found = check(experts, x, unused=(0, 3))
    torch.testing.assert_close(found.rows.residual[[0, 3]], x[[0, 3]])
    none = check(experts, x, unused=(0, 1, 2, 3))
    torch.testing.assert_close(none.rows.residual, x)


def test_of_equal_logits_the_lower_id_is_taken(device: str) -> None:
    """Rounded to half precision, logits that differ in fp32 are equal, too: 1 and a bit."""
    for dtype, more in ((torch.float32, 0.0), (torch.float16, 1e-4)):
        experts = experts_of(dtype, device, hidden=64, width=16, count=9, top_k=4)
        experts.router.zero_()
        experts.router[:, 0] = torch.tensor([-1.0, 0, 1, 1, 0, 2, 0, 1, 0], device=device).to(dtype)
        experts.router[7, 1] = more
        x = torch.ones(3, 64, device=device, dtype=dtype)
        x[2] *= -1
        for is_twin in (True, False):
            picks = run_layer(experts, x, is_twin=is_twin).routing.picks
            assert picks.experts.tolist() == [[5, 2, 3, 7]] * 2 + [[0, 1, 4, 6]]
            torch.testing.assert_close(picks.weights.sum(1), torch.ones(3, device=device), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("router", "normalises"), [(Qwen3MoeTopKRouter, True), (Qwen3MoeTopKRouter, False), (GptOssTopKRouter, False)]
)
def test_a_router_chooses_as_transformers_own(device: str, router: Any, normalises: bool) -> None:
    """In half precision, of logits whose sums are exact and then rounded: the twin's weights to the last bit."""
    experts = experts_of(torch.float16, device, hidden=64, width=16, count=9, top_k=4, normalises=normalises)
    if router is GptOssTopKRouter:
        experts = as_gpt_oss(experts, False)
    sizes = {"hidden_size": 64, "num_experts": 9, "num_local_experts": 9, "num_experts_per_tok": 4}
    theirs = router(SimpleNamespace(**sizes, norm_topk_prob=normalises)).to(device, torch.float16)
    with torch.no_grad():
        for own, parameter in zip((experts.router, *(experts.biases or ())), theirs.parameters(), strict=False):
            parameter.copy_(own.random_(-256, 257) / 1024)
            own.copy_(parameter)
        x = torch.randint(2, (40, 64), device=device).half() * 2 - 1
        _, wanted, picked = theirs(x)
    logits = nn.functional.linear(x, *theirs.parameters())
    rows, routing = NormedRows(x, x, torch.full((40, 1), 48.0, device=device)), Routing.allocate(experts, 40)
    norm, ints = Norm(torch.ones_like(x[0]), 0.25, 1.0), torch.arange(40, dtype=torch.int32, device=device)
    for route, rtol in ((module.route_ref, 0), (module.route, 2**-10)):
        route(rows, norm, experts, ints, routing)
        torch.testing.assert_close(routing.picks.weights, wanted.float(), rtol=rtol, atol=0)
        # Of equal logits transformers may take either.
        assert torch.equal(logits.gather(1, routing.picks.experts.long()), logits.gather(1, picked))


def test_experts_are_added_in_the_order_of_slots(device: str) -> None:
    """Of equal logits in that of their ids: two large results cancel before small ones are added."""
    experts = experts_of(torch.float32, device, hidden=64, width=16, count=4, top_k=4)
    experts.router.zero_()
    experts.gate_up.copy_(experts.gate_up[:32].repeat(4, 1))
    experts.down.copy_(torch.tensor([2.0**24, -(2.0**24), 1, 1], device=device).repeat_interleave(64)[:, None])
    check(experts, torch.randn(2, 64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("how", [None, *QUANTISE, "gpt-oss", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [SMALL | {"hidden": 256, "width": 64}, QWEN3, GPT_OSS], ids=["small", "qwen3", "gpt-oss"]
)
def test_a_row_has_its_bits_alone_and_in_company(
    device: str, sizes: dict[str, int], dtype: torch.dtype, how: str | None
) -> None:
    if how in QUANTISE and dtype == torch.float32:
        pytest.skip("weights in FP8 go with narrow types")
    experts = experts_of(dtype, device, **sizes)
    if how is not None:
        experts = in_fp8(experts, how) if how in QUANTISE else as_gpt_oss(experts, how == "MXFP4")
    x = torch.randn(2048, sizes["hidden"], device=device).to(dtype)
    x[:700] += x[:1].clone()  # of one kind, so that they share experts
    whole = run_layer(experts, x)
    draw = torch.Generator().manual_seed(1)
    for count in (1, 2, 3, 4, 8, 16, 17, 60, 64, 65, 130, 256, 512, 1100):
        for _ in range(2):
            chosen = torch.randperm(len(x), generator=draw)[:count].to(device)
            found = run_layer(experts, x[chosen].contiguous())
            assert torch.equal(found.routing.picks.experts, whole.routing.picks.experts[chosen]), count
            assert torch.equal(found.routing.picks.weights, whole.routing.picks.weights[chosen]), count
            for name in ("residual", "scaled", "squares"):
                assert torch.equal(getattr(found.rows, name), getattr(whole.rows, name)[chosen]), (name, count)
