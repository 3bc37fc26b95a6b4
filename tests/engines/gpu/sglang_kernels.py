"""Compile the CUDA kernels that SGLang compiles at its first start, all at once: ``python sglang_kernels.py SITE``.

SGLang 0.5.16 builds several small kernels with nvcc when they are first called, one after the other; they land in
``SITE/sglang/jit-cache``, where `run.py` has the engine look for them. A kernel that is missing here is only slower.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

# By module of sglang.jit_kernel: how its kernels for our models are asked for (bytes of a row of keys, dimensions).
KERNELS = [
    "activation._jit_activation_module(torch.bfloat16)",
    "norm._jit_fused_add_rmsnorm_module(False, torch.bfloat16)",
    *(f"kvcache._jit_kvcache_module({row_bytes})" for row_bytes in (256, 384, 512, 1024)),
    "rope._jit_fused_rope_module(True, 64, torch.bfloat16)",
    "clamp_position._jit_clamp_position_module(torch.int64)",
    "resolve_future_token_ids._jit_resolve_future_token_ids_module(torch.int64)",
]


def main(site: Path) -> None:
    """Build every kernel, each in a process of its own; says what failed."""
    began = time.monotonic()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cache = site / "sglang" / "jit-cache"
    environment = os.environ | {"PYTHONPATH": str(site / "sglang"), "TVM_FFI_CACHE_DIR": str(cache), "PATH": path}
    running = {
        kernel: subprocess.Popen(
            [sys.executable, "-c", f"import torch; from sglang.jit_kernel import {kernel.partition('.')[0]}; {kernel}"],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for kernel in KERNELS
    }  # fmt: skip
    for kernel, process in running.items():
        _, errors = process.communicate()
        if process.returncode:
            print(f"{kernel}: {errors[-600:]}", flush=True)
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
