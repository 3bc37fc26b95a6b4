"""Reading ahead: the start of the next product's weights is asked into the L2 while the memory has nothing to do.

Between two matrix products of a layer stand kernels that read little (norms, rotation, attention over a short prefix).
One of them names the weights that come next: its programs ask for them, line by line, and go on. Nothing waits for the
lines, and no result depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .weight_stream import INTERPRETED

LINE_BYTES = 128
_LINE_BYTES = tl.constexpr(LINE_BYTES)
# The instruction has no result; one is needed here.
_ASK_ASM = tl.constexpr("{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }")


@dataclass(frozen=True)
class ReadAhead:
    """What to ask for: the first ``lines`` lines of 128 bytes of every row of ``weight`` [out, in], row-major.

    A product's programs all begin with the first columns of their rows.
    """

    weight: Tensor
    lines: int

    @classmethod
    def of(cls, weight: Tensor, size_bytes: int) -> ReadAhead | None:
        """At most ``size_bytes`` of a weight, the same share of every row; None if that is not a line each."""
        rows, columns = weight.shape
        lines = min(size_bytes // rows, columns * weight.element_size()) // LINE_BYTES
        return cls(weight, lines) if lines else None


def ahead_arguments(ahead: ReadAhead | None, other: Tensor) -> dict[str, Any]:
    """Arguments of `ask_ahead` for a launch; ``other``: any tensor, where there is nothing to ask for."""
    if ahead is None:
        return {"ahead_ptr": other, "ahead_stride": 0, "ahead_rows": 0, "AHEAD_LINES": 0}
    stride = ahead.weight.stride(0) * ahead.weight.element_size()
    return {
        "ahead_ptr": ahead.weight, "ahead_stride": stride, "ahead_rows": ahead.weight.shape[0],
        "AHEAD_LINES": ahead.lines,
    }  # fmt: skip


@triton.jit
def ask_ahead(
    ahead_ptr, ahead_stride, ahead_rows, program, programs, AHEAD_LINES: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Ask for a program's share of the lines; ``LANES``: threads of a program."""
    if AHEAD_LINES > 0 and not INTERPRETED:
        lines = ahead_rows * AHEAD_LINES
        for first in range(program * LANES, lines, programs * LANES):
            # The last line is asked for more than once.
            line = tl.minimum(first + tl.arange(0, LANES), lines - 1)
            row = (line // AHEAD_LINES).to(tl.int64)
            address = ahead_ptr.to(tl.int64) + row * ahead_stride + (line % AHEAD_LINES) * _LINE_BYTES
            tl.inline_asm_elementwise(_ASK_ASM, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)
