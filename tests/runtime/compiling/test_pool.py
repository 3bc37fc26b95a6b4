"""Kernels compiled in processes of their own: recorded without a launch, kept by Triton, whatever ends early."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[2]
# No GPU, and two small kernels of a step. Not in this process, where Triton's interpreter replaces its compiler.
BEGIN = """
import json, logging, os, sys, time
import pytest
import torch
from eagle_slim.runtime.compiling.kernels.compile_target import compile_only_for
from eagle_slim.runtime.compiling.kernels.jobs import recording
from eagle_slim.runtime.compiling.pool import CompilePool
from eagle_slim.runtime.step.kernels import prompt_chunks
from eagle_slim.runtime.step.kernels.acceptance import list_active
from eagle_slim.runtime.step.kernels.slot_state import SlotState

logging.basicConfig(format="%(message)s")
compile_only_for(90)
state, box, jobs = SlotState.allocate(2, 4, "cpu"), prompt_chunks.PromptBox.allocate(64, torch.device("cpu")), {}
state.running.fill_(1)
with recording(jobs):
    prompt_chunks.begin_prompt(box, state)
    list_active(state)
    list_active(state)
pool = CompilePool(90)
pool.max_processes = 2
"""


def start(cache: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    options |= {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], **options)


def run(script: str, cache: Path, *flags: str, begin: str = BEGIN, **options: Any) -> subprocess.Popen[str]:
    return start(cache, *flags, "-c", begin + textwrap.dedent(script), **options)


def printed(script: str, cache: Path, *flags: str, begin: str = BEGIN) -> tuple[Any, str]:
    """Return what a script prints as JSON, and its standard error."""
    out, err = run(script, cache, *flags, begin=begin).communicate(timeout=240)
    return json.loads(out.splitlines()[-1]), err


def compiled(cache: Path) -> set[str]:
    return {path.stem for path in cache.glob("*/*.cubin")}


def ended(process_id: int) -> bool:
    """Whether a process that is not ours ends within a minute."""
    for _ in range(600):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_what_was_recorded_is_compiled_and_nothing_launched(tmp_path: Path) -> None:
    script = """
    before = [job.is_cached() for job in jobs]
    pool.submit(jobs)
    done = pool.wait(jobs)
    again = CompilePool(90)
    again.submit(jobs)
    print(json.dumps({
        "names": [job.name for job in jobs], "before": before, "done": done, "after": [job.is_cached() for job in jobs],
        # Launches did nothing: the slot that runs is not listed.
        "listed": state.active_count.tolist(), "gpu": torch.cuda.is_initialized(),
        "again": again.are_done(jobs), "processes": again._worker is None,
    }))
    """
    found, err = printed(script, tmp_path)
    assert found["names"] == ["_begin_prompt_kernel", "_list_active_kernel"] == sorted(compiled(tmp_path))
    assert (found["before"], found["done"], found["after"]) == ([False] * 2, True, [True] * 2)
    assert (found["listed"], found["gpu"]) == ([0], False)
    # What the cache has needs no process.
    assert (found["again"], found["processes"]) == (True, True)
    assert "compiled where" not in err


def test_what_compiles_imports_no_library_for_it(tmp_path: Path) -> None:
    """PyTorch and transformers take longer than most kernels, and all jobs wait while one is read."""
    record = """
    import pickle
    from eagle_slim.runtime.drafter.launch_params import choose_launch
    from eagle_slim.runtime.drafter.tuning import precompile, problem
    from eagle_slim.runtime.settings import TreeConfig
    from kernels.chips import KNOWN_CHIPS

    dims = problem.MODELS["smollm2-135m"]
    cfg = problem.draft_config(dims, 4096, TreeConfig(2, 4, 8), 1, 1024)
    case = precompile.LaunchCase(dims, cfg, choose_launch(cfg, KNOWN_CHIPS[90]))
    jobs |= dict.fromkeys(precompile.record_launch(case))
    print(json.dumps([pickle.dumps(job).hex() for job in jobs]))
    """
    read = f"""
    import json, pickle, sys
    from eagle_slim.runtime.compiling import worker

    worker.begin(90)
    names = [pickle.loads(bytes.fromhex(job)).name for job in {printed(record, tmp_path)[0]!r}]
    libraries = [name for name in ("torch._C", "transformers", "numpy") if name in sys.modules]
    print(json.dumps([names, libraries]))
    """
    found, _ = printed(read, tmp_path, begin="")
    assert found == [["_begin_prompt_kernel", "_list_active_kernel", "draft_kernel"], []]


def test_kernels_are_shared_by_numbers_of_nodes(tmp_path: Path) -> None:
    """Sixteen is a number that Triton would compile another kernel for."""
    script = """
    from eagle_slim.runtime.step.kernels.acceptance import commit_features, walk
    from eagle_slim.runtime.target.kernels.attention import AttentionParams, AttentionScratch, tree_attention
    from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows
    from eagle_slim.runtime.tree import Trees
    from kernels.choosing import RULES, random_case

    bf16 = {"dtype": torch.bfloat16}
    keys = torch.zeros(2, 3, 64, 64, **bf16)
    scratch = AttentionScratch.allocate(2, 16, [(9, 3, 64)], 64, keys.device)

    def record(nodes, batch):
        found = {}
        with recording(found):
            rows = ForwardRows.allocate(batch, nodes, state.lengths, is_path=True).attention
            query, out = torch.zeros(batch * nodes, 960, **bf16), torch.zeros(batch * nodes, 576, **bf16)
            tree_attention(query, keys, keys, rows, AttentionParams(0.125), out, scratch)
            random_case(300, parents=[-1, *range(nodes - 1)], dtype=torch.bfloat16).choose(RULES["top-p"], tile=256)
            commit_features(state, torch.zeros(16, 64), nodes, state.active_count, torch.zeros(2, 8, 64))
        return {(job.name, job.key) for job in found}

    def record_walk(batch):
        found, trees = {}, Trees(state.active_slots, state.active_count, *[torch.zeros(2, 3, dtype=torch.int64)] * 3)
        with recording(found):
            walk(torch.zeros(batch, 3, dtype=torch.int32), trees, 3, state, state.active_count)
        return [job.key for job in found]

    several = record(3, 2)
    others = [each for nodes, batch in ((2, 1), (16, 1)) for each in record(nodes, batch) - several]
    print(json.dumps([len(several), others, record_walk(1) == record_walk(2)]))
    """
    found, _ = printed(script, tmp_path)
    assert found == [12, [], True]


def test_no_recording_begins_while_triton_makes_its_driver(tmp_path: Path) -> None:
    """It would take the recorder's place, and launches that did nothing would be kept for the GPU."""
    script = """
    from threading import Thread
    from eagle_slim.runtime.compiling.kernels import jobs as file

    told = []
    file.triton_key = lambda: (told.append("begun"), time.sleep(1), told.append("prepared"))
    Thread(target=file.prepare).start()
    while not told:
        time.sleep(0.01)
    with recording({}):
        told.append("recorded")
    print(json.dumps(told))
    """
    found, _ = printed(script, tmp_path)
    assert found == ["begun", "prepared", "recorded"]


def test_the_process_starts_early_where_nothing_is_compiled(tmp_path: Path) -> None:
    """Else only when something is missing."""
    script = """
    pool.prepare()
    early = pool._worker is not None
    pool.submit(jobs)
    again = CompilePool(90)
    pool.wait(jobs)
    again.prepare()
    again.submit(jobs)
    print(json.dumps([early, again._worker is not None]))
    """
    found, err = printed(script, tmp_path, "-Wdefault::ResourceWarning")
    assert found == [True, False]
    # It goes on for a while after the end of this one.
    assert "ResourceWarning" not in err


def test_kernels_of_a_killed_process_are_left_to_their_launch(tmp_path: Path) -> None:
    script = """
    pool.submit(jobs)
    os.kill(pool._worker.pid, 9)
    lost = pool.wait(jobs)
    more = {}
    with recording(more):
        prompt_chunks.end_chunk(box, 64, state)
    pool.submit(more)
    print(json.dumps([lost, pool.wait(more), [job.is_cached() for job in more]]))
    """
    found, err = printed(script, tmp_path)
    # The next ones have a new process.
    assert found == [True, True, [True]]
    assert "compiled where they are launched" in err


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Kernels are kept for as long as the process runs."""
    (tmp_path / "file").touch()
    script = """
    pool.submit(jobs)
    print(json.dumps([pool.wait(jobs), [job.is_cached() for job in jobs], triton.knobs.cache.dir]))
    """
    (done, cached, folder), err = printed(f"import triton\n{textwrap.dedent(script)}", tmp_path / "file" / "cache")
    assert (done, cached) == (True, [True, True])
    assert "Compiled kernels cannot be kept" in err
    assert not Path(folder).exists()


def test_what_has_begun_is_finished_after_the_end(tmp_path: Path) -> None:
    """So that many short runs do not compile the same again and again."""
    script = """
    pool = CompilePool(90)
    pool.max_processes = 1
    first, second = jobs
    pool.submit(jobs)
    pool.wait([first])
    print(json.dumps([pool._worker.pid, second.is_cached()]), flush=True)
    os._exit(0)
    """
    (worker, cached), _ = printed(script, tmp_path)
    assert ended(worker)
    assert not cached
    assert compiled(tmp_path) == {"_begin_prompt_kernel", "_list_active_kernel"}


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    """A terminal sends it to the whole group."""
    script = """
    pool.submit(jobs)
    print(pool._worker.pid, flush=True)
    time.sleep(200)
    """
    with run(script, tmp_path, start_new_session=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    assert ended(worker)


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    script = "pool.submit(jobs)\nprint(json.dumps([pool.wait(jobs), [job.is_cached() for job in jobs]]))"
    both = [run(script, tmp_path) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=240)
        assert json.loads(out) == [True, [True, True]], err


@pytest.mark.slow
def test_a_script_is_not_run_again(tmp_path: Path) -> None:
    """Whatever it does where it is imported."""
    file = tmp_path / "script.py"
    file.write_text(f"{BEGIN}\nprint('once')\npool.submit(jobs)\nassert pool.wait(jobs)\n", encoding="utf-8")
    process = start(tmp_path / "cache", str(file))
    assert (process.communicate(timeout=240)[0], process.returncode) == ("once\n", 0)
