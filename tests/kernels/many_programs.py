"""The whole kernel with several programs: each a process on shared memory, barriers real, under Triton's interpreter.

The interpreter runs programs one after the other, so a kernel with barriers can have only one. Here each process is one
program of the same launch. Programs are delayed at random after barriers, so that a missing barrier shows; and every
program must count barriers alike. Run as a script, it drafts every case and prints a JSON line for each.
"""

import json
import multiprocessing
import os
import random
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from eagle_slim.runtime.drafter import launch as host
from eagle_slim.runtime.drafter.kernels import persistent
from eagle_slim.runtime.drafter.launch_params import Chip
from kernels.cases import CASES, draft
from triton.runtime.interpreter import interpreter_builder

FORK = multiprocessing.get_context("fork")
SECONDS = 1800.0
"""How long a program waits at a barrier."""


def launch(cfg: Any, features: Any, packed: Any, bufs: Any) -> None:
    """`host.launch` with every program in a process of its own."""
    params = packed.launches(cfg)[0]
    programs = params.num_programs
    meeting = FORK.Barrier(programs)
    arguments = host.kernel_arguments(cfg, features, packed, bufs)
    constants = host.kernel_constants(cfg, params, packed.draft_vocab)
    for group in arguments.values():
        for value in group if isinstance(group, tuple) else ():
            if isinstance(value, torch.Tensor):
                value.share_memory_()

    def program(pid: int) -> None:
        set_grid_dim, set_grid_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
        interpreter_builder.set_grid_dim = lambda *_: set_grid_dim(programs, 1, 1)
        interpreter_builder.set_grid_idx = lambda *_: set_grid_idx(pid, 0, 0)
        dice = random.Random(pid)
        met = 0

        def barrier(_state: Any, round: Any, _num_ctas: Any) -> None:
            nonlocal met
            met += 1
            counted = int(round.handle.data.item()) if hasattr(round, "handle") else int(round)
            assert counted == met, f"program {pid} counts {counted} barriers at its {met}th"
            meeting.wait(SECONDS)
            time.sleep(dice.choice([0, 0, 0.01]))

        persistent.grid_barrier = barrier
        persistent.draft_kernel[(1,)](**arguments, **constants)

    processes = [FORK.Process(target=program, args=(pid,)) for pid in range(programs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * programs


def main() -> None:
    host.launch = launch
    for name, case in CASES.items():
        chip = Chip("interpreter", 0, 1 << 30, case.programs)
        # The interpreter's bf16 is not to be trusted.
        result = draft(case, chip, torch.float16 if case.fp8 else torch.float32)
        print(json.dumps({"case": name, **result}), flush=True)


if __name__ == "__main__":
    main()
