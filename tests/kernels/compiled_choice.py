"""Compile the kernels of `choose_tokens` for a chip that is not there, at the vocabulary of Llama-3.1.

    python -m kernels.compiled_choice --chip 90

Prints a JSON object: for each kernel its shared memory, registers and spills. Must run without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from eagle_slim.runtime.drafter.launch_params import KNOWN_CHIPS, Chip
from eagle_slim.runtime.step.kernels import choice_kernels, cut_search
from kernels.compiled_drafter import assembler_report, to_ptx
from triton.compiler import ASTSource

POINTERS = {
    "*bf16": "logits",
    "*i32": (
        "active_slots active_count num_generated penalised suppressed eos seen best_id threshold num_tied out listed "
        "tokens counts num_listed"
    ),
    "*i64": "positions draft_tokens parents goal mass interval",
    "*fp32": "numbers best_score",
    "*fp64": "uniforms",
}
SIZES = {
    "NODES": 60,
    "VOCAB": 128256,
    "WORDS": 4008,
    "PART": 2048,
    "PARTS": 63,
    "BLOCK_P": 64,
    "WIDTH": 7,
    "BLOCK": 4096,
}
WARPS = {
    "penalise_kernel": 8, "best_kernel": 8, "pick_kernel": 1, "survey_kernel": 8, "narrow_kernel": 4,
    "collect_kernel": 8, "cut_kernel": 16, "mass_kernel": 8, "draw_kernel": 8, "mark_seen_kernel": 1,
}  # fmt: skip


def compile_report(name: str, chip: Chip) -> dict[str, int]:
    """Compile one kernel with every stage on: shared memory and what ptxas says."""
    kernel = getattr(cut_search, name, None) or getattr(choice_kernels, name)
    kinds = {f"{pointer}_ptr": kind for kind, names in POINTERS.items() for pointer in names.split()}
    constants: dict[str, Any] = {
        parameter: SIZES.get(parameter, True) for parameter in kernel.arg_names if parameter.isupper()
    }
    if "FIRST" in constants:
        constants["FIRST"] = False
    if name == "mark_seen_kernel":
        constants["BLOCK"] = 8
    types = {
        parameter: "constexpr" if parameter in constants else kinds.get(parameter, "i32")
        for parameter in kernel.arg_names
    }
    places = {parameter: (place,) for place, parameter in enumerate(kernel.arg_names)}
    aligned = {places[parameter]: [["tt.divisibility", 16]] for parameter in types if parameter.endswith("_ptr")}
    source = ASTSource(kernel, types, {places[parameter]: value for parameter, value in constants.items()}, aligned)
    compiled = to_ptx(source, chip, {"num_warps": WARPS[name]})
    report, _ = assembler_report(compiled.asm["ptx"], chip)
    return {"shared_bytes": compiled.metadata.shared, **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", type=int, choices=sorted(KNOWN_CHIPS), required=True)
    args = parser.parse_args()
    chip = KNOWN_CHIPS[args.chip]
    print(json.dumps({name: compile_report(name, chip) for name in WARPS}))


if __name__ == "__main__":
    main()
