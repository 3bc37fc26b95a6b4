"""A barrier over all programs of one cooperative launch, in global memory, that cannot hang the machine.

Every program adds 1 to a counter with release semantics and spins, with acquire loads, until the counter reaches
``round * programs``. All programs must be resident: launch with ``launch_cooperative_grid=True`` and at most as many
programs as the GPU holds at once. The spin is bounded: a program that waited too long (seconds, where a barrier takes
about a microsecond) raises the error flag and goes on, every other program then leaves its spin at once, the kernel
ends with undefined results, and the host reports the flag. The last program out sets the counters back to 0, so that a
launch needs no memset before it.

With ``EAGLE_SLIM_STAMPS=1`` in the environment when this is imported, program 0 notes the GPU's clock as it passes each
barrier, and the last program out as it ends: what is between barriers is one bar to a profiler (`benchmarks.trace`).

Memory model: PTX ISA, *Memory Consistency Model*: ``red.release.gpu`` after a CTA barrier orders the writes of the
whole CTA; ``ld.acquire.gpu`` before a CTA barrier makes those of the others visible to the whole CTA.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import cuda

COUNTER, EXITED, ERROR = 0, 1, 2
"""Words of the barrier state, int32 [`STATE_WORDS`], all 0 before the first launch."""
STAMPS = tl.constexpr(os.environ.get("EAGLE_SLIM_STAMPS", "0") not in ("", "0"))
FIRST_STAMP = 4
"""Word from which the state holds stamps, int64 ns: of the end, then of each barrier of the last launch."""
STATE_WORDS = FIRST_STAMP + 2 * 256 * STAMPS.value

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
_FIRST_STAMP = tl.constexpr(FIRST_STAMP)


@triton.jit
def grid_barrier(state_ptr, round, NUM_CTAS: tl.constexpr):
    """Wait until every program has called this ``round`` times (1, 2, ...); writes before it are visible after it."""
    tl.debug_barrier()
    if NUM_CTAS > 1:
        counter = state_ptr.to(tl.int64)
        tl.inline_asm_elementwise(
            _SPIN_ASM, "=r,l,l,r", [counter, counter + 8, round * NUM_CTAS], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        if STAMPS:  # noqa: SIM102 - this one is decided by the compiler
            if tl.program_id(0) == 0:
                _stamp(state_ptr, round)


@triton.jit
def _stamp(state_ptr, index):
    tl.store((state_ptr + _FIRST_STAMP).to(tl.pointer_type(tl.int64)) + index, cuda.globaltimer())


@triton.jit
def leave_grid(state_ptr, NUM_CTAS: tl.constexpr):
    """Set the barrier state back once every program has passed its last barrier; call once, at the end."""
    if NUM_CTAS > 1:
        tl.debug_barrier()
        if tl.atomic_add(state_ptr + 1, 1, sem="acq_rel") == NUM_CTAS - 1:
            tl.store(state_ptr, 0)
            tl.store(state_ptr + 1, 0)
            if STAMPS:
                _stamp(state_ptr, 0)
