"""The whole kernel as compiled for a chip, executed without it by `ptx_machine`: several programs of eight warps.

    python -m kernels.compiled_programs --chip 90 ["groups of four" ...] [--faults]

Drafts `cases.CASES` and prints a JSON line for each; with ``--faults`` also with instructions left out or weakened, one
kind at a time, which must be noticed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from eagle_slim.runtime.kernels import host
from eagle_slim.runtime.kernels.compile_check import compile_to_ptx, flatten
from eagle_slim.runtime.kernels.launch_params import KNOWN_CHIPS, Chip
from kernels.cases import CASES, draft
from kernels.ptx_machine import PtxError, execute

INPUTS = ("features", "step", "head")
"""Groups of tensors that the kernel may only read."""
FAULTS: dict[str, Callable[[str], str]] = {
    "release": lambda ptx: ptx.replace("red.release", "red.relaxed"),
    "acquire": lambda ptx: ptx.replace("ld.acquire", "ld.relaxed"),
    "arrivals": lambda ptx: ptx.replace("atom.global.gpu.acq_rel", "atom.global.gpu.relaxed"),
    "barriers": lambda ptx: ptx.replace("bar.sync", "// bar.sync"),
    "waiting for copies": lambda ptx: ptx.replace("cp.async.wait_group", "// cp.async.wait_group"),
    "waiting for products": lambda ptx: ptx.replace("wgmma.wait_group", "// wgmma.wait_group"),
}


def launcher(
    chip: Chip, fault: Callable[[str], str] = lambda ptx: ptx, checks_races: bool = True
) -> Callable[..., None]:
    """`host.launch` for a chip that is not there."""

    def launch(cfg: Any, features: Any, packed: Any, bufs: Any) -> None:
        params = packed.launches.get(cfg)
        compiled = compile_to_ptx(cfg, chip, params)
        ptx = fault(compiled.asm["ptx"])
        arguments = flatten(host.kernel_arguments(cfg, features, packed, bufs))
        ordered = [value for _, value in arguments]
        inputs = [value for name, value in arguments if name.split(".")[0] in INPUTS and torch.is_tensor(value)]
        # Triton adds two pointers to scratch memory, which this kernel does not use.
        execute(
            ptx,
            [*ordered, 0, 0],
            params.num_programs,
            shared_bytes=compiled.metadata.shared,
            inputs=inputs,
            checks_races=checks_races,
        )

    return launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", type=int, choices=(80, 90), required=True)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    real = KNOWN_CHIPS[args.chip]
    for name in args.cases or CASES:
        case = CASES[name]
        chip = Chip(real.name, real.capability, real.shared_bytes, case.programs)
        dtype = torch.float32 if case.exact else torch.bfloat16  # which matrix units multiply
        host.launch = launcher(chip)
        print(json.dumps({"case": name, **draft(case, chip, dtype)}), flush=True)
        for fault, change in FAULTS.items() if args.faults else ():
            host.launch = launcher(chip, change)
            try:
                noticed = not draft(case, chip, dtype)["agrees"] and "wrong trees"
            except PtxError as error:
                noticed = str(error).splitlines()[0]
            print(json.dumps({"case": name, "fault": fault, "noticed": noticed}), flush=True)


if __name__ == "__main__":
    main()
