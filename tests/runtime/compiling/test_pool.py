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
pool = CompilePool(90, 2)
"""


def run(script: str, cache: Path, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(TESTS.parent)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + textwrap.dedent(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def printed(script: str, cache: Path) -> tuple[Any, str]:
    """What a script prints as JSON, and its standard error."""
    out, err = run(script, cache).communicate(timeout=240)
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


def test_kernels_of_a_killed_process_are_left_to_their_launch(tmp_path: Path) -> None:
    script = """
    pool.start()
    os.kill(pool._worker.pid, 9)
    pool.submit(jobs)
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
    pool = CompilePool(90, 1)
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


def test_a_script_is_not_run_again(tmp_path: Path) -> None:
    """Whatever it does where it is imported."""
    file = tmp_path / "script.py"
    file.write_text(f"{BEGIN}\nprint('once')\npool.submit(jobs)\nassert pool.wait(jobs)\n", encoding="utf-8")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(TESTS.parent)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.returncode) == ("once\n", 0), done.stderr
