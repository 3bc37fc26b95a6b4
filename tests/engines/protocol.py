"""How tests talk to engines: one worker process per engine, JSON jobs on stdin, one ``RESULT `` line of JSON per job.

An engine lives in a process of its own because engines patch each other's libraries at import (SGLang patches
transformers), and because whatever they leave behind goes with the process.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

Json = dict[str, Any]


def serve(run: Callable[[Json], Json]) -> None:
    """Worker side: answer every job on stdin; an exception of the engine is a result, ``{"error": "Type: text"}``."""
    for line in sys.stdin:
        try:
            result = run(json.loads(line))
        except Exception as error:  # the engine's refusal is what some tests look for
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)


_opened = contextlib.ExitStack()
_workers: dict[tuple[object, ...], tuple[subprocess.Popen[str], IO[str]]] = {}


def ask(worker: str, jobs: Sequence[Json], *arguments: object, timeout_s: float = 3600) -> list[Json]:
    """Test side: let ``tests/engines/<worker>`` do ``jobs``; returns its results in order.

    Its process stays for whoever asks next with the same arguments, until `end_workers`: to import an engine takes
    longer than most jobs.
    """
    key = (worker, *arguments)
    if key not in _workers:
        errors = _opened.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (`end_workers` closes it)
        line = [sys.executable, str(Path(__file__).with_name(worker)), *map(str, arguments)]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        _workers[key] = _opened.enter_context(process), errors
    process, errors = _workers[key]
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    answers: list[Json] = []
    try:
        for job in jobs:
            print(json.dumps(job), file=process.stdin, flush=True)
            answers.append(next(json.loads(line[7:]) for line in process.stdout if line.startswith("RESULT ")))
    except (BrokenPipeError, StopIteration):
        del _workers[key]
        code = process.wait()
        errors.seek(0)
        how = f"{worker} ended with {code} after {len(answers)} of {len(jobs)} jobs"
        raise RuntimeError(f"{how}:\n{errors.read()[-4000:]}") from None
    finally:
        timer.cancel()
    return answers


def end_workers() -> None:
    """End what `ask` has started, whether it answers or not."""
    for process, _ in _workers.values():
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    _workers.clear()
    _opened.close()
