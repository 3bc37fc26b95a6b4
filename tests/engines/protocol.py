"""How tests talk to engines: one worker process per engine, JSON jobs on stdin, one ``RESULT `` line of JSON per job.

An engine lives in a process of its own because engines patch each other's libraries at import (SGLang patches
transformers), and because whatever they leave behind goes with the process.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def serve(run: Callable[[Json], Json]) -> None:
    """Worker side: answer every job on stdin; an exception of the engine is a result, ``{"error": "Type: text"}``."""
    for line in sys.stdin:
        try:
            result = run(json.loads(line))
        except Exception as error:  # the engine's refusal is what some tests look for
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)


def ask(worker: str, jobs: Sequence[Json], *arguments: object, timeout_s: float = 3600) -> list[Json]:
    """Test side: run ``tests/engines/<worker>`` on ``jobs`` and return its results in order."""
    return ask_together(worker, jobs, [arguments], timeout_s)[0]


def ask_together(
    worker: str, jobs: Sequence[Json], arguments: Sequence[Sequence[object]], timeout_s: float = 3600
) -> list[list[Json]]:
    """Like `ask` with one process per item of ``arguments``, all at once: the ranks of a tensor-parallel group."""
    script = Path(__file__).with_name(worker)
    stdin = "".join(json.dumps(job) + "\n" for job in jobs)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments_of_one)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments_of_one in arguments
    ]
    try:
        # Every process needs its input before any of them can finish: ranks wait for each other.
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.flush()
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    results = []
    for process, (out, err) in zip(processes, outputs, strict=True):
        answers = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
        if process.returncode or len(answers) != len(jobs):
            raise RuntimeError(
                f"{worker} ended with {process.returncode} after {len(answers)} of {len(jobs)} jobs:\n{err[-4000:]}"
            )
        results.append(answers)
    return results
