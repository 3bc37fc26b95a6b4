"""The whole kernel with several programs: each a process on shared memory, barriers real, under Triton's interpreter.

The interpreter runs programs one after the other, so a kernel with barriers can have only one. Here each process is one
program of the same launch. Programs are held up at random after barriers, so that a missing barrier shows; and every
program must count barriers alike. Run as a script: drafts the cases named and prints a JSON line for each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.kernels import drafter, persistent
from eagle_slim.runtime.kernels.drafter import allocate_workspace, pack_head
from eagle_slim.runtime.kernels.launch_params import Chip, LaunchParams, choose_launch
from eagle_slim.runtime.launch import Weights
from kernels.replaying import FIELDS, run
from support.drafting import problem, random_head
from triton.runtime.interpreter import interpreter_builder

FORK = multiprocessing.get_context("fork")
SECONDS = 60.0
"""For which a program waits at a barrier."""


@dataclass(frozen=True)
class Case:
    programs: int
    tree: tuple[int, int, int]
    prefixes: list[int]
    num_new: list[int]
    active: list[int] | None = None
    head: dict[str, Any] = field(default_factory=dict)
    fp8: bool = False
    change: Callable[[LaunchParams], LaunchParams] = lambda params: params


def groups_of(**split: int) -> Callable[[LaunchParams], LaunchParams]:
    return lambda params: replace(params, split=split)


CASES = {
    "groups of four": Case(8, (3, 4, 20), [5], [3], change=groups_of(fc=4, qkv=4, o=4, down=4)),
    "alone": Case(5, (2, 3, 15), [4, 30, 1, 12], [16, 2, 1, 5], [3, 0]),
    "mixed, programs left out": Case(
        5, (2, 3, 15), [200, 3], [2, 7], head={"qkv_bias": True}, change=groups_of(fc=2, qkv=1, o=4, down=2)
    ),
    "more parts than programs": Case(3, (2, 3, 15), [70], [2], change=groups_of(fc=4, qkv=4, o=4, down=4)),
    "eagle": Case(6, (2, 4, 20), [7], [2], head={"kind": "eagle"}, change=groups_of(fc=2, qkv=1, o=2, down=4)),
    "fewer rows than programs": Case(7, (2, 5, 25), [5], [1], head={"draft_vocab": 5}),
    "widest": Case(4, (2, 16, 128), [5], [2], head={"draft_vocab": 61}),
    "fp8": Case(4, (2, 3, 15), [9, 4], [2, 5], [1], fp8=True, change=groups_of(fc=4, qkv=2, o=4, down=4)),
    "eagle, fp8": Case(4, (2, 3, 15), [9, 4], [2, 5], head={"kind": "eagle"}, fp8=True),
}


def launch(cfg: Any, features: Any, packed: Any, bufs: Any) -> None:
    """`drafter.launch` with every program in a process of its own."""
    programs = packed.params.num_programs
    meeting = FORK.Barrier(programs)
    arguments = drafter.kernel_arguments(cfg, features, packed, bufs)
    constants = drafter.kernel_constants(cfg, packed.params, packed.draft_vocab)
    for value in arguments.values():
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


def draft(case: Case) -> dict[str, Any]:
    """Draft on poisoned memory, then compare with the replay and, in fp32, with the reference's tree."""
    head = random_head(dtype=torch.float16 if case.fp8 else torch.float32, **case.head)
    weight_dtype = torch.float8_e4m3fn if case.fp8 else None
    tree = TreeConfig(*case.tree)
    cfg, features, _, bufs = problem(head, tree, case.prefixes, case.num_new, case.active, weight_dtype)
    params = case.change(choose_launch(cfg, Chip("interpreter", 0, 1 << 30, case.programs)))
    weights = Weights(head, pack_head(head, cfg, params))
    bufs.workspace.update(allocate_workspace(cfg, params, "cpu"))
    drafted = run(cfg, features, weights, bufs)
    left = [name for name in ("barrier", "node_arrivals") if bufs.workspace[name].any()]
    reference = drafted.tree if case.fp8 else drafted.reference_tree()
    different = [name for name in FIELDS if not torch.equal(getattr(drafted.tree, name), getattr(reference, name))]
    return {"agrees": drafted.agreement.agrees, "is": str(drafted.agreement), "different": different, "left": left}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    drafter.launch = launch
    for name in names or CASES:
        print(json.dumps({"case": name, **draft(CASES[name])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
