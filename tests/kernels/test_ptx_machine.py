"""The machine that executes PTX notices what it is for, and computes right."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from kernels.ptx_machine import COMPILER, PtxError, execute

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs a C++ compiler ({COMPILER})"),
]

KERNEL = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
	.reg .b32 	%r<20>;
	.loc	1 7 5                        // kernel.py:7:5
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mad.wide.s32 	%rd3, %r1, 4, %rd1;
	mad.wide.s32 	%rd4, %r1, 4, %rd2;
	shl.b32 	%r3, %r1, 2;
	mov.b32 	%r9, global_smem;
	add.s32 	%r4, %r9, %r3;
	xor.b32 	%r5, %r3, 128;
	add.s32 	%r5, %r9, %r5;
{body}
	ret;
}}
"""


def run(
    body: str, first: torch.Tensor, second: torch.Tensor, threads: int = 64, programs: int = 1, seed: int = 0
) -> int:
    text = KERNEL.format(threads=threads, body=body)
    return execute(text, [first, second], programs, shared_bytes=1024, inputs=[first], seed=seed, limit=100_000)


@pytest.fixture
def numbers() -> torch.Tensor:
    return torch.arange(64, dtype=torch.int32)


EXCHANGE = """
	ld.global.b32 {{ %r6 }}, [ %rd3 + 0 ];
	st.shared.b32 [%r4], %r6;
	{between}
	ld.shared.b32 %r7, [%r5];
	st.global.b32 [ %rd4 + 0 ], {{ %r7 }};
"""


def test_warps_exchange_values_behind_a_barrier(numbers: torch.Tensor) -> None:
    result = torch.zeros_like(numbers)
    executed = run(EXCHANGE.format(between="bar.sync 0;"), numbers, result)
    assert torch.equal(result, numbers ^ 32)
    assert executed == 2 * 17


def test_a_missing_barrier_is_a_race_in_every_order(numbers: torch.Tensor) -> None:
    for seed in range(5):
        with pytest.raises(
            PtxError, match=r"race between (st|ld)\.shared\.b32 at kernel\.py:7:5, program 0, warp \d and"
        ):
            run(EXCHANGE.format(between=""), numbers, torch.zeros_like(numbers), seed=seed)


def test_signed_loads_fill_wider_registers(numbers: torch.Tensor) -> None:
    result = torch.zeros(64, dtype=torch.int64)
    body = "ld.global.s32 %rd5, [ %rd3 + 0 ];\nmad.wide.s32 %rd6, %r1, 8, %rd2;\nst.global.b64 [ %rd6 + 0 ], { %rd5 };"
    run(body, numbers - 32, result)
    assert torch.equal(result, numbers.long() - 32)


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("redux.sync.max.s32 %r6, %r1, -1;", [31] * 32 + [63] * 32),
        ("shfl.sync.up.b32 %r6, %r1, 1, 0, -1;", [max(lane - 1, lane // 32 * 32) for lane in range(64)]),
        ("shfl.sync.idx.b32 %r6, %r1, 5, 31, -1;", [5] * 32 + [37] * 32),
        ("neg.s32 %r6, %r1;\nbfe.s32 %r6, %r6, 1, 3;", [(-lane >> 1 & 7) - 8 * (-lane >> 3 & 1) for lane in range(64)]),
        ("mov.b32 %r6, 0x80000000;\nbfe.s32 %r6, %r6, 31, 4;", [-1] * 64),
        ("mov.b32 %r6, 0x80000000;\nbfe.u32 %r6, %r6, 31, 4;", [1] * 64),
        ("mov.b32 %r6, 0x04030281;\nprmt.b32 %r6, %r6, %r1, 0x8340U;", [lane << 8 | -0xFBFF7F for lane in range(64)]),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0f43E10000, 0f3FC00000;\ncvt.u32.u16 %r6, %rs1;", [0x7E3C] * 64),
        ("neg.s32 %r6, %r1;\nshr.s32 %r6, %r6, 40;", [0] + [-1] * 63),
        ("shl.b32 %r6, %r1, 32;", [0] * 64),
        ("mov.b32 %r6, -2147483648;\nmul.hi.s32 %r6, %r6, %r1;", [-lane // 2 for lane in range(64)]),
    ],
)  # fmt: skip
def test_scalar_instructions(body: str, values: list[int], numbers: torch.Tensor) -> None:
    result = torch.zeros_like(numbers)
    run(body + "\nst.global.b32 [ %rd4 + 0 ], { %r6 };", numbers, result)
    assert result.tolist() == values


TWO_WRITERS = """
	setp.lt.s32 %p1, %r1, 32;
	selp.b32 %r6, {first}, {second}, %p1;
	st.global.b32 [ %rd2 + 0 ], {{ %r6 }};
"""


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [(7, 7, False), (1000000, 1000001, True), ("0f3F800000", "0f3F800001", False), ("0f3F800000", "0f3F900000", True)],
)
def test_two_writers_of_one_value(first: object, second: object, is_race: bool, numbers: torch.Tensor) -> None:
    """Warps may store the same value, or one that differs in a float's last bit; nothing else."""
    body = TWO_WRITERS.format(first=first, second=second)
    if is_race:
        with pytest.raises(PtxError, match=r"race between st\.global\.b32"):
            run(body, numbers, torch.zeros_like(numbers))
    else:
        run(body, numbers, torch.zeros_like(numbers))


MESSAGE = """
	setp.ne.s32 %p1, %r2, 0;
	@%p1 bra RECEIVE;
	setp.ne.s32 %p2, %r1, 0;
	@!%p2 st.global.b32 [ %rd2 + 4 ], {{ 7 }};
	@!%p2 red.{release}.gpu.global.add.u32 [%rd2], 1;
	bra.uni END;
RECEIVE:
	ld.{acquire}.gpu.global.u32 %r6, [%rd2];
	setp.eq.s32 %p2, %r6, 0;
	@%p2 bra RECEIVE;
	ld.global.b32 {{ %r7 }}, [ %rd2 + 4 ];
	setp.ne.s32 %p2, %r1, 0;
	@!%p2 st.global.b32 [ %rd2 + 8 ], {{ %r7 }};
END:
"""


def test_release_and_acquire_order_programs(numbers: torch.Tensor) -> None:
    result = torch.zeros_like(numbers)
    run(MESSAGE.format(release="release", acquire="acquire"), numbers, result, threads=32, programs=2)
    assert result[:3].tolist() == [1, 7, 7]


@pytest.mark.parametrize(("release", "acquire"), [("relaxed", "acquire"), ("release", "relaxed")])
def test_what_is_not_released_or_not_acquired_races(numbers: torch.Tensor, release: str, acquire: str) -> None:
    with pytest.raises(
        PtxError, match=r"race between st\.global\.b32 .* program 0, warp 0 and ld\.global\.b32 .* program 1"
    ):
        run(MESSAGE.format(release=release, acquire=acquire), numbers, torch.zeros_like(numbers), 32, 2)


COPY = """
	cp.async.ca.shared.global [ %r4 + 0 ], [ %rd3 + 0 ], 0x4, {bytes};
	cp.async.commit_group;
	cp.async.wait_group {left};
	ld.shared.b32 %r7, [%r4];
	st.global.b32 [ %rd4 + 0 ], {{ %r7 }};
"""


def test_copies_arrive_when_they_are_waited_for(numbers: torch.Tensor) -> None:
    result = torch.zeros_like(numbers)
    run(COPY.format(bytes=4, left=0), numbers, result)
    assert torch.equal(result, numbers)
    run(COPY.format(bytes=4, left=1), numbers, result)
    assert torch.equal(result, torch.full_like(numbers, -1))
    run(COPY.format(bytes=0, left=0), numbers, result)
    assert not result.any()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.global.b32 [ %rd4 + 256 ], { %r1 };", "outside the tensors, 256 bytes from the start of one of 256"),
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };", "a write to an input: st.global.b32 at kernel.py:7:5"),
        ("prefetch.global.L2 [%rd4];", "not known here: prefetch"),
        ("cp.async.bulk.commit_group;", "not known here: cp"),
        ("ld.global.b32 { %r6 }, [ %rd3 + 2 ];", "an address that is no multiple of 4"),
        ("st.shared.b32 [%r4+1024], %r1;", "an address outside the program's shared memory"),
        ("setp.lt.s32 %p1, %r1, 32;\n@%p1 bar.sync 0;", "predicated bar.sync"),
        ("setp.lt.s32 %p1, %r1, 32;\n@%p1 bra SKIP;\nbar.sync 0;\nSKIP:", "every warp waits: ret at kernel.py:7:5"),
        ("setp.lt.s32 %p1, %r1, 40;\n@%p1 bra SKIP;\nredux.sync.add.s32 %r6, %r1, -1;\nSKIP:", "waits: redux"),
        ("AGAIN:\nbra AGAIN;", "no end in sight: bra"),
        ("tcgen05.alloc [%r1];", r"not known here: tcgen05\.alloc"),
        ("redux.sync.min.s32 %r6, %r1, -1;", "not known here: redux"),
        ("shfl.sync.down.b32 %r6, %r1, 1, 31, -1;", "not known here: shfl"),
        ("add.f16x2 %r6, %r1, %r1;", "not known here: add"),
        ("add.sat.f32 %r6, %r1, %r1;", "not known here: add"),
        ("cvt.rni.f32.f32 %r6, %r1;", "not known here: cvt"),
        ("st.global.v4.b64 [ %rd2 + 0 ], { %rd1, %rd1, %rd1, %rd1 };", "not known here: st"),
        ("st.release.gpu.global.b32 [ %rd2 + 0 ], { %r1 };", "not known here: st"),
        ("setp.lt.s32 %p1|%p2, %r1, 32;", "not known here"),
        ("div.s32 %r6, %r1, 0;", "a division by zero"),
        ("ld.global.b8 { %r6 }, [ %rd9 + 0 ];", "outside the tensors"),
    ],
)  # fmt: skip
def test_what_a_kernel_must_not_do(body: str, said: str, numbers: torch.Tensor) -> None:
    with pytest.raises(PtxError, match=said):
        run(body, numbers, torch.zeros_like(numbers))


def test_a_kernel_that_does_not_say_how_many_threads(numbers: torch.Tensor) -> None:
    text = KERNEL.format(threads=64, body="").replace(".reqntid 64", "")
    with pytest.raises(PtxError, match="programs of 0 threads"):
        execute(text, [numbers, numbers], 1)


PRODUCT = """
	{move}
	mov.b32 %r10, 0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r11,%r12,%r13,%r14}}, %rd5, %rd6, 0, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	{early}
	wgmma.wait_group.sync.aligned 0;
	mov.u32 %r15, %tid.x;
	mul.wide.s32 %rd7, %r15, 16;
	add.s64 %rd8, %rd2, %rd7;
	st.global.v4.b32 [ %rd8 + 0 ], {{ %r11, %r12, %r13, %r14 }};
"""


def test_asynchronous_products() -> None:
    """D = A Bᵀ of a warpgroup: A [64, 16] and B [8, 16] as 8 x 8 tiles of 128 bytes; D as its lanes hold it."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 16, generator=generator).half() for rows in (64, 8))
    tiles = [m.view(-1, 8, 2, 8).transpose(1, 2).reshape(-1) for m in (left, right)]
    first = torch.cat(tiles).view(torch.int32)
    # Without swizzle: pieces of 16 bytes, the next columns 128 bytes on, the next rows 256; B begins at 2048.
    strides = (128 >> 4) << 16 | (256 >> 4) << 32
    base = 1024  # where the machine's shared memory begins
    copies = [f"ld.global.b32 {{ %r6 }}, [ %rd3 + {512 * i} ];\nst.shared.b32 [%r4+{512 * i}], %r6;" for i in range(4)]
    copies.append(
        "setp.lt.s32 %p1, %r1, 64;\n@%p1 ld.global.b32 { %r6 }, [ %rd3 + 2048 ];\n@%p1 st.shared.b32 [%r4+2048], %r6;"
    )
    descriptors = [f"mov.b64 %rd{5 + i}, {(base + 2048 * i >> 4) | strides};" for i in range(2)]
    move = "\n".join([*copies, *descriptors, "bar.sync 0;"])
    held = torch.zeros(128, 4)

    def multiply(early: str) -> None:
        text = KERNEL.format(threads=128, body=PRODUCT.format(move=move, early=early))
        execute(text, [first, held.view(torch.int32)], 1, shared_bytes=4096, inputs=[first])

    multiply("")
    lane, register = torch.arange(128)[:, None], torch.arange(4)[None, :]
    row, column = lane // 32 * 16 + lane % 32 // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2
    torch.testing.assert_close(held, (left.float() @ right.float().T)[row, column])
    with pytest.raises(PtxError, match=re.escape("a write to what a product under way reads: st.shared.b32")):
        multiply("st.shared.b32 [%r4], %r1;")
