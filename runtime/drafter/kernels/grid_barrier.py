"""A barrier over all programs of one cooperative launch, in global memory, that cannot hang the machine.

Every program adds 1 to a counter with release semantics and spins, with acquire loads, until the counter reaches
``round * programs``. All programs must be resident: launch with ``launch_cooperative_grid=True`` and at most
``max_resident_programs`` programs. The spin is bounded: a program that waited too long (seconds, where a barrier takes
about a microsecond) raises the error flag and goes on, every other program then leaves its spin at once, the kernel
ends with undefined results, and the host reports the flag. The last program out sets the counters back to 0, so that a
launch needs no memset before it.

Memory model: PTX ISA, *Memory Consistency Model*: ``red.release.gpu`` after a CTA barrier orders the writes of the
whole CTA; ``ld.acquire.gpu`` before a CTA barrier makes those of the others visible to the whole CTA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COUNTER, EXITED, ERROR = 0, 1, 2
"""Words of the barrier state, int32 [4], all 0 before the first launch."""

_SPIN = """{
    .reg .pred %p, %q;
    .reg .u32 %t, %v, %n;
    mov.u32 $0, 0;
    mov.u32 %t, %tid.x;
    setp.ne.u32 %p, %t, 0;
    @%p bra DONE;
    red.release.gpu.global.add.u32 [$1], 1;
    mov.u32 %n, 0;
SPIN:
    ld.acquire.gpu.global.u32 %v, [$1];
    sub.u32 %v, %v, $3;
    setp.ge.s32 %q, %v, 0;
    @%q bra DONE;
    add.u32 %n, %n, 1;
    and.b32 %v, %n, 1023;
    setp.ne.u32 %q, %v, 0;
    @%q bra SPIN;
    ld.relaxed.gpu.global.u32 %v, [$2];
    setp.ne.u32 %q, %v, 0;
    @%q bra DONE;
    setp.lt.u32 %q, %n, 4194304;
    @%q bra SPIN;
    red.relaxed.gpu.global.or.b32 [$2], 1;
DONE:
}"""
_SPIN_ASM = tl.constexpr(_SPIN)
_NOW_ASM = tl.constexpr("mov.u64 $0, %globaltimer;")
TIMED = tl.constexpr(False)
"""Whether barriers leave time stamps; ``benchmarks.draft --stages`` sets it before anything is compiled."""
STAMPS_AT = tl.constexpr(16)
"""Where stamps begin after the state, in int32. int64 [rounds + 1, programs, 2]: nanoseconds of arrival, of leaving."""


@triton.jit
def _stamp(state_ptr, round, NUM_CTAS: tl.constexpr, EDGE: tl.constexpr):
    now = tl.inline_asm_elementwise(_NOW_ASM, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    place = (round * NUM_CTAS + tl.program_id(0)) * 2 + EDGE
    tl.store((state_ptr + STAMPS_AT).to(tl.pointer_type(tl.int64)) + place, now)


@triton.jit
def grid_barrier(state_ptr, round, NUM_CTAS: tl.constexpr):
    """Wait until every program has called this ``round`` times (1, 2, ...); writes before it are visible after it."""
    tl.debug_barrier()
    if NUM_CTAS > 1:
        if TIMED:
            _stamp(state_ptr, round, NUM_CTAS, 0)
        counter = state_ptr.to(tl.int64)
        tl.inline_asm_elementwise(
            _SPIN_ASM,
            "=r,l,l,r",
            [counter, counter + 8, round * NUM_CTAS],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
        if TIMED:
            _stamp(state_ptr, round, NUM_CTAS, 1)


@triton.jit
def leave_grid(state_ptr, NUM_CTAS: tl.constexpr):
    """Set the barrier state back once every program has passed its last barrier; call once, at the end."""
    if NUM_CTAS > 1:
        tl.debug_barrier()
        if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel") == NUM_CTAS - 1:
            tl.store(state_ptr, 0)
            tl.store(state_ptr + 1, 0)


@triton.jit
def _count_rounds_kernel(state_ptr, seen_ptr, out_ptr, num_rounds, NUM_CTAS: tl.constexpr):
    """Each round every program publishes the round number and, after the barrier, checks its neighbour's."""
    pid = tl.program_id(0)
    neighbour = (pid + 1) % NUM_CTAS
    good = 0
    for i in range(num_rounds):
        tl.store(seen_ptr + pid, i + 1)
        grid_barrier(state_ptr, 2 * i + 1, NUM_CTAS)
        good += (tl.load(seen_ptr + neighbour, volatile=True) == i + 1).to(tl.int32)
        grid_barrier(state_ptr, 2 * i + 2, NUM_CTAS)
    tl.store(out_ptr + pid, good)
    leave_grid(state_ptr, NUM_CTAS)


def count_rounds_ref(num_programs: int, num_rounds: int) -> Tensor:
    """Rounds in which each program saw its neighbour's value: all of them. int32 [programs]."""
    return torch.full((num_programs,), num_rounds, dtype=torch.int32)


def count_rounds(state: Tensor, num_programs: int, num_rounds: int, num_warps: int = 8) -> Tensor:
    """Run ``2 * num_rounds`` barriers and return, per program, the rounds that were seen right: int32 [programs].

    ``state``: int32 [4] zeros, on the GPU; its ERROR word tells of a timeout afterwards.
    """
    seen = torch.zeros(num_programs, dtype=torch.int32, device=state.device)
    out = torch.full_like(seen, -1)
    cooperative = {"launch_cooperative_grid": True} if state.is_cuda else {}
    _count_rounds_kernel[(num_programs,)](
        state, seen, out, num_rounds, NUM_CTAS=num_programs, num_warps=num_warps, **cooperative
    )
    return out
