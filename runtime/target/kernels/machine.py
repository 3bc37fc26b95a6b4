"""Properties of a GPU that the target's kernels depend on, and launches that overlap.

Programmatic dependent launch (CUDA, sm_90 and later): a kernel may begin while the one before it ends, and do what does
not need its results; `wait_for_previous` returns when all of them can be read. Every program of such a kernel must call
it, also one that has nothing to do: else the kernel after it would not wait for the one before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NO_FUSION = {"enable_fp_fusion": False}
"""Launch option: products and sums are fused where the code says so (`tl.fma`), not where a compiler chooses to."""


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Let the next kernel's programs begin once all of this one's have said so."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until what the kernels before have written can be read."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the cache lines of some addresses into the L2; nothing waits for them."""
    at = pointers.to(tl.int64)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def major_capability(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability; 9 where there is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@cache
def num_processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; those of an H200 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a multiprocessor; those of an H200 where there is no GPU."""
    return (
        torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 233472
    )


@cache
def gpu_name(device: torch.device) -> str:
    """Return the name of a GPU; empty where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def programs_wait(device: torch.device) -> bool:
    """Report whether programs of a kernel can wait for one another; the interpreter runs them one after another."""
    return device.type == "cuda"


def overwrites_operands(device: torch.device) -> bool:
    """Report whether loops there may overwrite registers that matrix products still read (`product_kernels`)."""
    return device.type == "cuda" and major_capability(device) == 9


def overlapping(device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Report whether kernels overlap there; returns the options of a launch that does, too."""
    overlaps = device.type == "cuda" and major_capability(device) >= 9
    return overlaps, NO_FUSION | ({"launch_pdl": True} if overlaps else {})
