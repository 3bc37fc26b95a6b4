import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.cases import CASES
from support.programs import need_processes

pytestmark = pytest.mark.compiled
TESTS = Path(__file__).parents[1]


def test_every_case_equals_the_reference() -> None:
    """One process for all: it forks, which is safe only without other threads."""
    need_processes()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-W", "ignore", "-m", "kernels.many_programs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["case"] for result in results] == list(CASES)
    wrong = [result for result in results if not result["agrees"] or result["different"] or result["left"]]
    assert wrong == []
