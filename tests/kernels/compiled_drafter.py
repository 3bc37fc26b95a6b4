"""Compile the persistent drafter for a chip that is not there, and report what it takes of it.

    python -m kernels.compiled_drafter --chip 90 [--fp8] [--small] [--options] [--chains 16]

Builds the kernel to machine code with Triton's own compiler and assembler and prints one JSON line: shared memory,
registers, spills, and those in the inner loops of products, where there may be none. Exit status 1 where operands of
products are overwritten (`machine_code`). Must run without ``TRITON_INTERPRET``.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from eagle_slim.runtime import DrafterConfig, TreeConfig
from eagle_slim.runtime.drafter.kernels.ancestor_attention import DraftCache
from eagle_slim.runtime.drafter.kernels.persistent import Features, HeadTensors, StepInputs, draft_kernel
from eagle_slim.runtime.drafter.kernels.tree_build import TreeOutputs
from eagle_slim.runtime.drafter.launch import compile_options, kernel_constants
from eagle_slim.runtime.drafter.launch_params import Chip, choose_launch
from eagle_slim.runtime.drafter.tuning.problem import MODELS, draft_config
from eagle_slim.runtime.drafter.workspace import BUFFERS, Workspace, element_types
from kernels.chips import KNOWN_CHIPS
from kernels.machine_code import FAULTS, mixed_halves, overwritten_operands, spills_among_products
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

LLAMA_8B, SMOLLM2 = (
    draft_config(MODELS[name], 32000, TreeConfig(5, 10, 60), 1, 8192) for name in ("llama-3.1-8b", "smollm2-135m")
)
OPTIONS: dict[str, Any] = {"activation": "gelu", "tap_norms": 3, "sliding_window": 512, "window_sinks": 32}
OPTIONS |= dict.fromkeys(("has_qkv_bias", "has_o_bias", "has_mlp_bias", "has_head_norms"), True)
OPTIONS |= {"norm_before_residual": True, "norm_output": True}
"""Everything that an EAGLE-3 head may have besides."""

POINTERS = {torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv"}
POINTERS |= {torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}


def signature(cfg: DrafterConfig) -> dict[str, Any]:
    """Triton types of every argument of the kernel: of groups, a group of types."""
    model, weight = POINTERS[cfg.dtype], POINTERS[cfg.weight_dtype]
    types = element_types(cfg)
    of_head = dict.fromkeys(HeadTensors._fields, model) | dict.fromkeys(("scales", "cos", "sin"), "*fp32")
    of_head |= {"stream": weight, "row_ids": "*i32", "draft_vocab": "i32", "stride_embedding": "i32"}
    groups = {
        "features": Features(model, "i32", "i32"),
        **{"tap_offset_1": "i64", "tap_offset_2": "i64", "num_slots": "i32", "depth": "i32", "total_tokens": "i32"},
        "step": StepInputs(*["*i32"] * len(StepInputs._fields)),
        "head": HeadTensors(**of_head),
        "cache": DraftCache(model, model, "i32", "i32"),
        "ws": Workspace(*(POINTERS[types[buffer.dtype]] for buffer in BUFFERS)),
        "out": TreeOutputs("*i64", "*i64", "*i1", "*i64", "*i64", "*i64"),
    }
    return {name: groups.get(name, "constexpr") for name in draft_kernel.arg_names}


def compile_kernel(cfg: DrafterConfig, chip: Chip) -> dict[str, Any]:
    """Compile for ``chip``: a report of its PTX and what `assembler_report` says."""
    types, params = signature(cfg), choose_launch(cfg, chip)
    aligned = {
        (draft_kernel.arg_names.index(group), place): [["tt.divisibility", 16]]
        for group, fields in types.items()
        if isinstance(fields, tuple)
        for place, (name, kind) in enumerate(zip(fields._fields, fields, strict=True))
        if kind.startswith("*") or name.startswith("stride")
    }
    constants = kernel_constants(cfg, params, cfg.draft_vocab)
    by_index: Any = {(draft_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(draft_kernel, types, by_index, aligned)
    compiled = to_ptx(source, chip, {**compile_options(params), "launch_cooperative_grid": True})
    clock_reads = len(re.findall(r"%(?:globaltimer|clock)", compiled.asm["ptx"]))
    of_ptx = {"shared_bytes": compiled.metadata.shared, "num_clock_reads": clock_reads}
    return of_ptx | assembler_report(compiled.asm["ptx"], chip)


def to_ptx(source: ASTSource, chip: Chip, options: dict[str, Any]) -> CompiledKernel:
    """Compile for ``chip`` as far as ``asm["ptx"]``: `assembler_report` assembles it, and once is enough."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _without_assembling
        return triton.compile(source, target=GPUTarget("cuda", chip.capability, 32), options=options)


def _without_assembling(_backend: Any = None, stages: dict[str, Any] | None = None, *_: Any) -> tuple[str, str]:
    """Triton calls it with its stages, and with nothing for a key under which the result is kept."""
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: b""
    return "without assembling", "without assembling"


@cache
def assembler_report(ptx: str, chip: Chip, always_lists: bool = True) -> dict[str, Any]:
    """Assemble PTX: ptxas' own account, and what `machine_code` finds.

    Unless ``always_lists``, machine code that has no local memory, so no spill to look for, is not disassembled.

    ``registers``, ``spill_bytes`` and ``stack_bytes`` of a thread; ``serialized_products``: how often ptxas warns that
    it makes asynchronous matrix products wait for each other.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(chip.capability)
    ptxas = Path(getattr(tool, "path", tool))
    with tempfile.TemporaryDirectory() as folder:
        path, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        path.write_text(ptx)
        suffix = "a" if chip.capability >= 90 else ""
        command = [str(ptxas), "-v", f"-arch=sm_{chip.capability}{suffix}", str(path), "-o", str(binary)]
        report = _run(command).stderr
        numbers = {"registers": r"Used (\d+) registers", "spill_bytes": r"(\d+) bytes spill stores"}
        numbers["stack_bytes"] = r"(\d+) bytes stack frame"
        found = {name: max(int(value) for value in re.findall(pattern, report)) for name, pattern in numbers.items()}
        is_listed = always_lists or found["spill_bytes"] + found["stack_bytes"] > 0
        sass = _run([str(ptxas.with_name("nvdisasm")), "-c", str(binary)]).stdout if is_listed else ""
    listed = {"spills_among_products": spills_among_products(sass), "overwritten_operands": overwritten_operands(sass)}
    return {**found, "serialized_products": report.count("C7514"), **listed, "mixed_halves": mixed_halves(ptx)}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", type=int, choices=sorted(KNOWN_CHIPS), required=True)
    parser.add_argument("--fp8", action="store_true", help="FP8 weights")
    parser.add_argument("--small", action="store_true", help="SmolLM2-135M dimensions instead of Llama-3.1-8B's")
    parser.add_argument("--options", action="store_true", help="norms before fc, biases, a window, GELU ...")
    parser.add_argument("--chains", type=int, default=0, help="so many chains of 7 instead of one tree")
    args = parser.parse_args()
    cfg = SMOLLM2 if args.small else LLAMA_8B
    if args.chains:
        cfg = replace(cfg, num_slots=args.chains, depth=6, top_k=1, total_tokens=8)
    if args.fp8:
        cfg = replace(cfg, weight_dtype=torch.float8_e4m3fn)
    if args.options:
        cfg = replace(cfg, **OPTIONS)
    chip = KNOWN_CHIPS[args.chip]
    report = compile_kernel(cfg, chip) | {"chip": chip.name, "limit_bytes": chip.shared_bytes}
    print(json.dumps(report))
    if wrong := {fault: report[fault] for fault in FAULTS if report[fault]}:
        sys.exit(f"the drafter may compute wrongly: {wrong}")


if __name__ == "__main__":
    main()
