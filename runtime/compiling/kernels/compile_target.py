"""Compiling for a GPU that is not touched: what Triton asks its driver for while it compiles, and nothing else."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class CompileTarget:
    """Takes the place of Triton's driver in a process that only compiles: launches fail, no CUDA context is created.

    ``capability``: of the GPU, as 90. The results are found in Triton's cache on disk by processes with that GPU.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream; nothing is launched."""
        return 0


def compile_only_for(capability: int) -> None:
    """Let this process compile for GPUs of a ``capability``, and launch nothing any more."""
    driver.set_active(CompileTarget(capability))
