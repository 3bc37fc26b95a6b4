"""Trace a decoding step, kernel by kernel, and fail where anything waits, copies or allocates that should not.

    python -m benchmarks.trace --dims llama-3.1-8b --trace trace.json --figure step.svg [--out FILE]
    python -m benchmarks.trace --dims llama-3.1-8b --phases --trace phases.json

Runs steps as generation does, with a random target and head of known dimensions, and writes PyTorch's trace of them
(for ui.perfetto.dev or chrome://tracing), each kernel under its own name also in replayed graphs. Prints the time of
each part of a step, and ends with exit status 1 unless between the first and the last step

    the host waits for nothing but each step's record,
    no copy is made but that of the record, one a step,
    the allocator hands out nothing.

``--phases`` runs steps without graphs, in ranges named by phase and operation (``EAGLE_SLIM_RANGES``, for NVTX too);
there the waits of what is not captured are only listed. ``--figure`` draws one step as a timeline. With
``EAGLE_SLIM_STAMPS=1`` in the environment the persistent drafter's parts are timed and drawn, too. ``--counters`` has
Nsight Compute (``ncu``) count the bytes that a draft and a pass read from the GPU's memory, and does nothing else.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.drafter.kernels.grid_barrier import FIRST_STAMP, STAMPS
from eagle_slim.runtime.ops import named_range, ranges_wanted
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.decoder import Decoder

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import LAYERS, RandomModel, compile_ahead, fill, filled_phases, run_steps
from benchmarks.shared.timing import barriers_of, copy_bytes_per_s, machine

PARTS = {
    "draft": ("draft_kernel",),
    "rows and masks": ("tree_rows_kernel", "embed_kernel"),
    "QKV": ("qkv_product_kernel",),
    "attention": ("main_kernel", "tail_kernel"),
    "output and down": ("add_product_kernel",),
    "MLP": ("gated_product_kernel",),
    "LM head": ("head_product_kernel", "norm_kernel"),
    "accept": (
        "penalise_kernel",
        "best_kernel",
        "pick_kernel",
        "race_kernel",
        "draw_kernel",
        "survey_kernel",
        "narrow_kernel",
        "collect_kernel",
        "cut_kernel",
        "walk_kernel",
    ),
    "commit": ("commit_kv_kernel", "commit_features_kernel", "mark_seen_kernel", "list_active_kernel"),
}
"""Kernels of each part of a step, by the end of their names."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMalloc", "cudaFree")
STEP = "eagle-slim step"
METRICS = ("dram__bytes_read.sum", "gpu__time_duration.sum")
Event = dict[str, Any]


def draft_spans(split: Mapping[str, int], depth: int, stamps: Sequence[int], draft: Event) -> list[Event]:
    """Cut a draft's event into those of its parts; ``stamps`` ns: of its end, then of its barriers."""
    names = [*barriers_of(split, depth), "tree"]
    assert all(stamps[: len(names)]), f"not all of {len(names) - 1} barriers were passed"
    assert not any(stamps[len(names) :]), f"more than {len(names) - 1} barriers were passed"
    begin, end = float(draft["ts"]), float(draft["ts"]) + float(draft["dur"])
    stops = [end - (stamps[0] - stamp) / 1e3 for stamp in [*stamps[1 : len(names)], stamps[0]]]
    starts = [begin, *stops[:-1]]
    return [
        {**draft, "name": f"draft: {name}", "ts": start, "dur": stop - start}
        for name, start, stop in zip(names, starts, stops, strict=True)
    ]


def part_of(kernel: str) -> str:
    """Return the part of a step that a kernel belongs to; "other" for those of libraries."""
    if kernel.startswith("draft: "):
        return kernel
    return next((part for part, names in PARTS.items() if kernel.lstrip("_") in names), "other")


def steps_in(events: Sequence[Event]) -> list[Event]:
    """Return the ranges that the host has put around steps, in order."""
    found = [each for each in events if each.get("cat") == "user_annotation" and each.get("name") == STEP]
    return sorted(found, key=lambda event: float(event["ts"]))


def faults_of(events: Sequence[Event], num_allocated: int) -> list[str]:
    """Name waits, copies and allocations between the first and the last step, beside the records'.

    ``events`` of a PyTorch trace: "ph" X, "cat", "name", "ts" and "dur" in microseconds. ``num_allocated``: blocks that
    the allocator has handed out meanwhile.
    """
    steps = steps_in(events)
    if len(steps) < 3:
        return [f"the trace holds {len(steps)} steps, expected 3 at least"]
    first, last = steps[1]["ts"], steps[-1]["ts"]
    inside = [each for each in events if each.get("ph") == "X" and first < each["ts"] < last]
    host = [each["name"] for each in inside if each["cat"] in ("cuda_runtime", "cuda_driver")]
    faults = [f"the host calls {name} {host.count(name)} times" for name in WAITS if name in host]
    num_steps = len(steps)
    if host.count("cudaEventSynchronize") > num_steps:
        faults.append(f"the host waits {host.count('cudaEventSynchronize')} times for {num_steps} records")
    copies = [each["name"] for each in inside if each["cat"] == "gpu_memcpy"]
    others = sorted({name for name in copies if "DtoH" not in name or "Pageable" in name})
    faults += [f"{copies.count(name)} copies are no records: {name}" for name in others]
    if len(copies) > num_steps:
        faults.append(f"{len(copies)} copies in {num_steps} steps, expected one each")
    if num_allocated:
        faults.append(f"the allocator hands out {num_allocated} blocks")
    return faults


def last_step(events: Sequence[Event]) -> list[Event]:
    """Return the kernels of the last whole step, from its draft to the next one's; all where there is no draft."""
    kernels = sorted((each for each in events if each.get("cat") == "kernel"), key=lambda event: float(event["ts"]))
    drafts = [place for place, kernel in enumerate(kernels) if part_of(kernel["name"]) == "draft"]
    return kernels[drafts[-2] : drafts[-1]] if len(drafts) > 1 else kernels


def times_of(kernels: Sequence[Event]) -> dict[str, float]:
    """Sum a step's microseconds by part, "other" and "nothing" (idle time); kernels that overlap count once."""
    times, end = defaultdict[str, float](float), None
    for kernel in kernels:
        begin, stop = float(kernel["ts"]), float(kernel["ts"]) + float(kernel["dur"])
        if end is not None:
            times["nothing"] += max(0.0, begin - end)
            begin = max(begin, end)
        times[part_of(kernel["name"])] += max(0.0, stop - begin)
        end = stop if end is None else max(end, stop)
    return times


@torch.inference_mode()
def traced(decoder: Decoder, num_active: int, prefix: int, steps: int, path: Path) -> tuple[list[Event], int]:
    """Run steps and write their trace; returns its events, and the blocks allocated between first and last step."""
    from torch.profiler import ProfilerActivity, profile, record_function

    allocated: list[int] = []
    step = decoder.step

    def marked(*given: Any) -> None:
        allocated.append(_num_allocated(decoder.target.device))
        with record_function(STEP):
            if not ranges_wanted():
                step(*given)
                return
            for phase in decoder.timed_step(*given):
                with named_range(phase.name):
                    phase.run()

    decoder.step = marked  # type: ignore[assignment, method-assign]
    fill(decoder, num_active, prefix)
    run_steps(decoder, num_active, 3)
    allocated.clear()
    on_gpu = [ProfilerActivity.CUDA] if decoder.target.device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as found:
        run_steps(decoder, num_active, steps)
    decoder.step = step  # type: ignore[method-assign]
    found.export_chrome_trace(str(path))
    return json.loads(path.read_text())["traceEvents"], allocated[-1] - allocated[1]


def _num_allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"]) if device.type == "cuda" else 0


def draw(kernels: Sequence[Event], path: Path, title: str) -> None:
    """Draw the kernels of one step as a timeline, a row for each part."""
    from matplotlib.figure import Figure

    start = float(kernels[0]["ts"])
    parts = list(dict.fromkeys(part_of(kernel["name"]) for kernel in kernels))
    figure = Figure(figsize=(10, 1.0 + 0.25 * len(parts)), layout="constrained")
    axes = figure.subplots()
    for row, part in enumerate(parts):
        launches = [kernel for kernel in kernels if part_of(kernel["name"]) == part]
        spans = [((float(kernel["ts"]) - start) / 1e3, float(kernel["dur"]) / 1e3) for kernel in launches]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=f"C{row}")
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.suptitle(textwrap.fill(title, 100), fontsize="medium")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def new_decoder(dims: str, draft_vocab: int, prefix: int, batch: int, nodes: int, steps: int) -> Decoder:
    """Build a random model and its decoder, with room for ``steps`` after ``prefix`` tokens; kernels are compiled."""
    device = torch.device("cuda", torch.cuda.current_device())
    model, tree = RandomModel(dims, device), TreeConfig(5, 10, nodes)
    rows = min(draft_vocab, model.dims.vocab)
    compile_ahead(dims, [(tree, batch, rows)], device)
    room = prefix + (steps + 4) * tree.new_tokens_width + nodes
    return model.decoder(model.new_cache(batch, room), tree, rows)


@torch.inference_mode()
def run_counted(dims: str, draft_vocab: int, prefix: int, batch: int, nodes: int) -> None:
    """Run a draft and a pass between the marks that Nsight Compute heeds, once each has run without."""
    for phase in filled_phases(new_decoder(dims, draft_vocab, prefix, batch, nodes, 4), batch, prefix):
        phase.run()
        if phase.name in ("draft", "verify"):
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            phase.run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def count_bytes(*given: object) -> dict[str, dict[str, float]]:
    """Have ncu run `run_counted` with what is ``given``; returns `counters_of` it."""
    child = [sys.executable, "-c", f"from benchmarks.trace import run_counted; run_counted{given}"]
    options = ["--csv", "--print-units", "base", "--profile-from-start", "off", "--clock-control", "none"]
    command = ["ncu", *options, "--target-processes", "application-only", "--metrics", ",".join(METRICS), *child]
    # Without graphs, so that ncu sees launches.
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "EAGLE_SLIM_RANGES": "1"}
    )
    return counters_of(done.stdout.splitlines())


def counters_of(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """Sum ncu's CSV over the kernels of the draft and of the pass: their number, bytes read, us, and TB/s."""
    sums = {"draft": Counter[str](), "pass": Counter[str]()}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        counted = sums["draft" if part_of(row["Kernel Name"].partition("(")[0]) == "draft" else "pass"]
        counted[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))  # type: ignore[assignment]
        counted["kernels"] += row["Metric Name"] == METRICS[0]
    return {
        name: {
            "kernels": own["kernels"],
            "bytes_read": own[METRICS[0]],
            "us": own[METRICS[1]] / 1e3,
            "TB_per_s": own[METRICS[0]] / own[METRICS[1]] / 1e3,
        }
        for name, own in sums.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("trace", __doc__)
    command.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    command.add_argument("--draft-vocab", type=int, default=32000)
    command.add_argument("--prefix", type=int, default=512)
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--nodes", type=int, default=60)
    command.add_argument("--steps", type=int, default=12)
    command.add_argument("--trace", type=Path, help="write PyTorch's trace here")
    command.add_argument("--figure", type=Path, help="draw one step here: .svg, .png or .pdf")
    command.add_argument("--phases", action="store_true", help="without graphs, in ranges named by operation")
    command.add_argument("--counters", action="store_true", help="have ncu count bytes, and nothing else")
    args = command.parse_args(argv)
    device = command.gpu()
    shape = (args.dims, args.draft_vocab, args.prefix, args.batch, args.nodes)
    ran = {name: getattr(args, name) for name in ("dims", "draft_vocab", "prefix", "batch", "nodes", "steps", "phases")}
    if args.counters:
        counted = count_bytes(*shape)
        copied = copy_bytes_per_s(device) / 1e12
        show(counted)
        write({"machine": machine(device), **ran, "copy_TB_per_s": copied, "counters": counted}, args.out)
        return
    if args.phases:
        os.environ["EAGLE_SLIM_RANGES"] = "1"
    decoder = new_decoder(*shape, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        events, num_allocated = traced(
            decoder, args.batch, args.prefix, args.steps, args.trace or Path(folder) / "trace.json"
        )
    kernels, faults = last_step(events), faults_of(events, num_allocated)
    if STAMPS.value:
        assert decoder.drafts.drafter is not None
        words, params = decoder.drafts.drafter.bufs.workspace["barrier"], decoder.drafts.drafter.bufs.params
        assert params is not None
        stamps, depth = words[FIRST_STAMP:].view(torch.int64).tolist(), decoder.drafts.drafter.tree.depth
        spans = draft_spans(params.layout.split, depth, stamps, kernels[0])
        kernels = [*spans, *kernels[1:]]
    times = times_of(kernels)
    show({"us": "of one step", **times})
    if args.figure is not None:
        found = machine(device)
        title = f"One step, {args.dims}, {args.nodes} nodes after {args.prefix} tokens, {found['device']}"
        title += f", {date.today()}, {found['commit']}"
        draw(kernels, args.figure, title)
    for fault in faults:
        print(f"fault: {fault}", flush=True)
    is_good = args.phases or not faults
    write({"machine": machine(device), **ran, "us": times, "faults": faults, "is_good": is_good}, args.out)
    print("nothing waits, copies or allocates but for the records" if not faults else f"{len(faults)} faults")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
