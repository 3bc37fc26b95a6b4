"""What a trace tells of steps: times by part, and waits, copies and allocations that should not be."""

import re

from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.kernels import acceptance
from eagle_slim.runtime.target.kernels import products

from benchmarks import trace
from benchmarks.shared.timing import barriers_of

ALONE = dict.fromkeys(("fc", "qkv", "o", "down"), 1)


def event(cat, name, ts, dur=1.0):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def steps(count=4):
    """A clean trace: every 100 us a step, its kernels, the copy of its record, and a wait for one."""
    found = []
    kernels = [("draft_kernel", 10, 20), ("_tree_rows_kernel", 30, 2), ("qkv_product_kernel", 35, 10)]
    kernels += [("main_kernel", 43, 5), ("void at::native::copy", 50, 1)]
    for ts in range(0, count * 100, 100):
        found += [event("kernel", name, ts + at, dur) for name, at, dur in kernels]
        calls = ("cudaGraphLaunch", 1), ("cudaMemcpyAsync", 3), ("cudaEventSynchronize", 6)
        found += [event("cuda_runtime", name, ts + at) for name, at in calls]
        found.append(event("user_annotation", trace.STEP, ts, 5))
        found.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", ts + 60))
    return found


def test_times_of_a_step():
    times = trace.times_of(trace.last_step(steps()))
    # Attention begins 2 us before qkv ends, and counts from there; nothing runs from 32 to 35, 48 to 50, and 51 on.
    assert times == {"draft": 20, "rows and masks": 2, "QKV": 10, "attention": 3, "other": 1, "nothing": 5}


def test_parts_of_a_draft():
    """A draft of 30 us: its first barrier is passed after 11, 17 more follow after one each, and the tree takes 2."""
    # With projections in groups 11 barriers a level, alone 8 (docs/kernels.md).
    assert len(barriers_of({"fc": 4, "qkv": 2, "o": 4, "down": 4}, 5)) == 69
    assert len(barriers_of(ALONE, 5)) == 50
    stamps = [20_000, *range(1_000, 19_000, 1_000), 0, 0]
    spans = trace.draft_spans(ALONE, 1, stamps, event("kernel", "draft_kernel", 100, 30))
    parts = {"inputs": 11, "fc": 2, "QKV": 2, "attention": 4, "output": 2, "MLP": 4, "LM head, top-k": 2}
    parts |= {"choose nodes": 1, "tree": 2}
    assert trace.times_of(spans) == {f"draft: {part}": time for part, time in parts.items()} | {"nothing": 0}
    assert (spans[0]["ts"], spans[-1]["ts"]) == (100, 128)


def test_counters_are_summed_over_the_kernels_of_draft_and_pass():
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    kernels = [("draft_kernel", "3,000,000", "2,000"), ("_tree_rows_kernel", "10", "500"), ("main_kernel", "90", "500")]
    lines = ["==PROF== Connected", header]
    for place, (name, size, time) in enumerate(kernels):
        lines.append(f'"{place}","{name}(const int *, float)","dram__bytes_read.sum","byte","{size}"')
        lines.append(f'"{place}","{name}(const int *, float)","gpu__time_duration.sum","ns","{time}"')
    assert trace.counters_of(lines) == {
        "draft": {"kernels": 1, "bytes_read": 3e6, "us": 2.0, "TB_per_s": 1.5},
        "pass": {"kernels": 2, "bytes_read": 100, "us": 1.0, "TB_per_s": 1e-4},
    }


def test_what_should_not_be_is_named():
    assert trace.faults_of(steps(), 0) == []
    assert "expected 3" in trace.faults_of(steps(2), 0)[0]
    for more, words in (
        (event("cuda_runtime", "cudaStreamSynchronize", 250), "the host calls cudaStreamSynchronize 1 times"),
        (event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 250), "1 copies are no records: Memcpy HtoD"),
        (event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 250), "1 copies are no records: Memcpy DtoD"),
    ):
        (fault,) = trace.faults_of([*steps(), more], 0)
        assert words in fault
        # Before the second step and after the last it may be.
        assert trace.faults_of([*steps(), {**more, "ts": 50}, {**more, "ts": 350}], 0) == []
    # Allocations, and too many waits.
    waits = [event("cuda_runtime", "cudaEventSynchronize", 250 + i) for i in range(4)]
    told = ["the host waits 6 times for 4 records", "the allocator hands out 3 blocks"]
    assert trace.faults_of([*steps(), *waits], 3) == told


def test_every_kernel_of_a_step_has_a_part():
    kernels = [name for module in (products.kernels, acceptance) for name in vars(module) if name.endswith("_kernel")]
    assert len(kernels) > 8
    assert [name for name in kernels if trace.part_of(name) == "other"] == []
    assert trace.part_of("some_draft_kernel") == "other"


def test_steps_are_traced_by_name(random_model, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_SLIM_RANGES", "1")
    decoder = random_model.decoder(random_model.new_cache(2, 200), TreeConfig(1, 4, 8), 60)
    events, allocated = trace.traced(decoder, 2, 20, 4, tmp_path / "trace.json")
    assert allocated == 0
    assert len(trace.steps_in(events)) == 4
    assert trace.faults_of(events, allocated) == []
    names = [each.get("name") for each in events]
    for phase in ("draft", "verify", "accept", "commit"):
        assert names.count(phase) == 4
    # By operation, of four layers.
    assert names.count("qkv_product") == names.count("tree_attention") == names.count("gated_product") == 16
    assert {"tree_rows", "head_product", "choose_tokens", "walk", "commit_kv", "list_active"} <= set(names)
    trace.draw(trace.last_step(steps()), tmp_path / "step.svg", "One step, " + "with a long title, " * 10)
    # The title is in lines that fit the picture's width.
    drawn = (tmp_path / "step.svg").read_text()
    assert "<svg" in drawn
    assert {len(line) > 100 for line in re.findall("<!-- (.*) -->", drawn)} == {False}
