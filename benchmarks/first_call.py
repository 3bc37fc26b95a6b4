"""Time the first call of a fresh process: from its start to the first token, the whole answers, and every shape ready.

    python -m benchmarks.first_call [--rows REGEX] [--out benchmarks/results/DATE-h100-first-call.json]

A row is one process, with an empty folder for compiled kernels, or (``again``) with that of the row before. ``plain``
decodes plainly, ``auto`` lets each step choose its shape; /1 is one sequence of the built-in model, /16 twenty prompts
in 16 slots, each of 128 tokens. ``8b``: Llama-3.1-8B's dimensions, random weights made on the device and 32,000 rows.
Times are seconds since the process began, but for ``silence_s``, the longest wait between two tokens of the answer
that came first. ``ready_s``: when all kernels of all shapes are compiled, with calls going on meanwhile. The end of
imports and of loading stands beside, so that ``first_s - imported_s`` is what a user waits for beyond both libraries.
In the end all that is wanted is printed beside what was found; exit status 1 where it falls short.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.graphs import buckets_up_to
from eagle_slim.runtime.step.shapes import LARGE, shapes_for, shapes_up_to

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine

ROWS = ("plain/1", "auto/1", "again/1", "plain/16", "auto/16", "again/16", "8b/1")
NEW_TOKENS, NUM_PROMPTS = 128, {1: 1, 16: 20}
READY_AFTER_S = 120.0
"""Seconds after which a row no longer waits for all shapes."""
WANTED: Mapping[str, tuple[str, str, float]] = {
    "auto/1 answer": ("done_s", "imported_s", 20.0),
    "auto/1 silence": ("silence_s", "", 2.0),
    "auto/1 all shapes": ("ready_s", "imported_s", 35.0),
    "auto/16 answers": ("done_s", "imported_s", 25.0),
    "again/16 answers": ("done_s", "imported_s", 3.0),
    "8b/1 first token": ("first_s", "loaded_s", 15.0),
    "8b/1 all shapes": ("ready_s", "loaded_s", 40.0),
}
"""Seconds between two times of a row, at most."""
OVER_PLAIN = 1.1
"""Most seconds beyond imports of `auto`, over those of `plain`."""
_BEGAN = "EAGLE_SLIM_BENCHMARK_BEGAN"


def load(row: str, device: torch.device) -> SpeculativeModel:
    """Load the built-in model, or build one of 8B's dimensions."""
    if row != "8b/1":
        return SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device=device)
    from eagle_slim.convert.heads.taps import default_taps
    from eagle_slim.runtime.compiling.pool import pool_for
    from eagle_slim.runtime.drafter.drafter import choose_drafter
    from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head
    from eagle_slim.runtime.target.wrapper import TargetModel

    from benchmarks.shared.decoding import random_target

    compiler = pool_for(device)
    assert compiler is not None
    compiler.prepare()
    dims = MODELS["llama-3.1-8b"]
    model: Any = random_target("llama-3.1-8b", dims, torch.bfloat16, device, "bf16")
    target = TargetModel(model, default_taps(model.config.num_hidden_layers), "fused")
    head = random_head(dims, device).of_rows(slice(32000))
    return SpeculativeModel(target, choose_drafter("auto", head, LARGE), is_tree_sized=True)


@torch.inference_mode()
def is_ready(model: SpeculativeModel, slots: int) -> bool:
    """Return whether the kernels of all shapes are compiled, for every number of sequences up to ``slots``."""
    decoders = model._decoders
    decoder = decoders.get(slots, 1, decoders.tree)
    rules = next(iter(decoder.graphs.kept))
    shapes: list[TreeConfig | None] = [*shapes_up_to(decoders.tree)]
    steps = [(batch, shape) for batch in buckets_up_to(slots) for shape in shapes_for(batch, shapes)]
    # Whoever is asked has its kernels compiled, so all are.
    ready = [decoder.is_compiled(batch, rules, shape) for batch, shape in steps]
    return all(ready)


def run_row(row: str, began: float, imported: float) -> dict[str, Any]:
    """Load, call and wait; returns the row."""
    kind, slots = row.split("/")[0], int(row.split("/")[1])
    model = load(row, torch.device("cuda"))
    found: dict[str, Any] = {"imported_s": imported - began, "loaded_s": time.time() - began}
    times: list[float] = []

    def note(*_: object) -> bool:
        times.append(time.time() - began)
        return False

    prompts = [[(7 * i + j) % 900 + 20 for j in range(40)] for i in range(NUM_PROMPTS[slots])]
    options: dict[str, Any] = {"max_slots": slots, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    output = model.generate(prompts, speculative=kind != "plain", stopping_criteria=[note], **options)
    found |= {"first_s": times[0], "done_s": time.time() - began, "path": output.stats.path}
    found["silence_s"] = max((after - before for before, after in pairwise(times)), default=0.0)
    if kind in ("auto", "8b"):
        while not (ready := is_ready(model, slots)) and time.time() - began < found["done_s"] + READY_AFTER_S:
            model.generate(prompts, **options)
        found["ready_s"] = time.time() - began if ready else None
        found["graphs"] = len(list(os.scandir(os.environ["TRITON_CACHE_DIR"])))
    return found


def run_in_a_process(row: str, cache: str) -> dict[str, Any]:
    """Run a row in a fresh process."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, _BEGAN: str(time.time())}
    command = [sys.executable, "-m", "benchmarks.first_call", "--rows", f"^{row}$"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"row": row} | found


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Put what is wanted beside what was found, of the rows that ran; found is None where it did not come."""
    ran = {row["row"]: row for row in rows}
    verdicts: dict[str, dict[str, float | None]] = {}
    for name, (last, first, most) in WANTED.items():
        if row := ran.get(name.partition(" ")[0]):
            found = None if row.get(last) is None else row[last] - row.get(first, 0.0)
            verdicts[name] = {"found": found, "wanted": most}
    for slots in NUM_PROMPTS:
        auto, plain = (ran.get(f"{kind}/{slots}") for kind in ("auto", "plain"))
        if auto and plain:
            beyond = [each["done_s"] - each["imported_s"] for each in (auto, plain)]
            verdicts[f"auto/{slots} over plain"] = {"found": beyond[0] / beyond[1], "wanted": OVER_PLAIN}
    return verdicts


def main(arguments: list[str] | None = None) -> None:
    """Measure the chosen rows, or, in a process of a row, that one."""
    imported = time.time()
    command = Command("first_call", __doc__, ROWS)
    args = command.parse_args(arguments)
    rows, device = command.chosen(args), command.gpu()
    if _BEGAN in os.environ:
        print(json.dumps(run_row(rows[0], float(os.environ[_BEGAN]), imported)))
        return
    result: dict[str, Any] = {"machine": machine(device), "rows": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for row in rows:
            before = row.replace("again", "auto")
            result["rows"].append(run_in_a_process(row, os.path.join(folder, before.replace("/", "-"))))
            show(result["rows"][-1])
            write(result, args.out)
    result["judged"] = judged(result["rows"])
    for name, verdict in result["judged"].items():
        show({"what": name, **verdict})
    write(result, args.out)
    sys.exit(any(each["found"] is None or each["found"] > each["wanted"] for each in result["judged"].values()))


if __name__ == "__main__":
    main()
