"""Compile the persistent drafter for a chip that is not there, and report what it takes of it.

    python -m eagle_slim.runtime.kernels.compile_check --chip 90 [--fp8] [--slots 1] [--small]

Builds the kernel to machine code with Triton's own compiler and assembler and prints one JSON line: shared memory,
registers, spills. Must run without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..drafter_config import DrafterConfig
from .drafter import OPERANDS, kernel_constants, operand_dtype
from .launch_params import KNOWN_CHIPS, Chip, LaunchParams, choose_launch
from .persistent import draft_kernel

LLAMA_8B = DrafterConfig(
    kind="eagle3", hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128, feature_width=12288,
    target_vocab=128256, draft_vocab=32000, depth=5, top_k=10, total_tokens=60, norm_eps=1e-5, num_slots=1,
    max_positions=8192,
)  # fmt: skip
SMOLLM2 = replace(
    LLAMA_8B, hidden=576, intermediate=1536, num_heads=9, num_kv_heads=3, head_dim=64, feature_width=1728,
    target_vocab=49152,
)  # fmt: skip


def signature(cfg: DrafterConfig, constants: dict[str, Any]) -> dict[str, str]:
    """Triton types of every argument of the kernel."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}
    model, weight = "*" + short[cfg.dtype], "*" + short[cfg.weight_dtype]
    groups = [
        (model, "tap embed norm_in norm_hidden norm_post norm_out fc_bias qkv_bias key value"),
        *(("*" + short[operand_dtype(cfg, name)], name) for name in OPERANDS),
        (weight, "stream"),
        ("*fp32", "scale cos sin hidden middle qkv squares_post squares_out scratch best_value best_max best_sum score "
        "frontier_score part_stat part_acc factor"),
        ("*i64", "draft_tokens parents position retrieve num_leaves"),
        ("*i1", "tree_mask"),
    ]  # fmt: skip
    types = {f"{name}_ptr": kind for kind, names in groups for name in names.split()}
    result = {}
    for name in draft_kernel.arg_names:
        if name in constants:
            result[name] = "constexpr"
        else:
            result[name] = types.get(name, "*i32" if name.endswith("_ptr") else "i32")
    return result


def compile_kernel(cfg: DrafterConfig, chip: Chip, params: LaunchParams | None = None) -> dict[str, int]:
    """Compile for ``chip``: ``shared_bytes``, ``registers`` per thread, ``spill_bytes`` and ``stack_bytes``."""
    params = params or choose_launch(cfg, chip)
    constants = kernel_constants(cfg, params, cfg.draft_vocab)
    types = signature(cfg, constants)
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(draft_kernel.arg_names)
        if types[name].startswith("*") or name.startswith(("stride", "tap_offset"))
    }
    by_index = {(draft_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(draft_kernel, types, by_index, aligned)
    target = GPUTarget("cuda", chip.capability, 32)
    options = {"num_warps": params.num_warps, "launch_cooperative_grid": True}
    compiled = triton.compile(source, target=target, options=options)
    return {"shared_bytes": compiled.metadata.shared, **assembler_report(compiled.asm["ptx"], chip)}


def assembler_report(ptx: str, chip: Chip) -> dict[str, int]:
    """Assemble PTX and read ptxas' own account of registers, spills and stack."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = get_ptxas(chip.capability)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        suffix = "a" if chip.capability >= 90 else ""
        command = [
            getattr(found, "path", found),
            "-v",
            f"-arch=sm_{chip.capability}{suffix}",
            str(path),
            "-o",
            "/dev/null",
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill_bytes": r"(\d+) bytes spill stores",
        "stack_bytes": r"(\d+) bytes stack frame",
    }
    return {name: max(int(value) for value in re.findall(pattern, report)) for name, pattern in numbers.items()}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", type=int, choices=sorted(KNOWN_CHIPS), required=True)
    parser.add_argument("--fp8", action="store_true", help="FP8 weights")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="SmolLM2-135M dimensions instead of Llama-3.1-8B's")
    parser.add_argument("--eagle", action="store_true", help="an EAGLE-1/2 head")
    args = parser.parse_args()
    cfg = replace(SMOLLM2 if args.small else LLAMA_8B, num_slots=args.slots)
    if args.fp8:
        cfg = replace(cfg, weight_dtype=torch.float8_e4m3fn)
    if args.eagle:
        cfg = replace(cfg, kind="eagle", feature_width=cfg.hidden)
    chip = KNOWN_CHIPS[args.chip]
    report = compile_kernel(cfg, chip)
    print(json.dumps({"chip": chip.name, "limit_bytes": chip.shared_bytes, **report}))


if __name__ == "__main__":
    main()
