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


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, object]]:
    """One process for all: it forks, which is safe only without other threads."""
    need_processes()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-W", "ignore", "-m", "kernels.many_programs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {line.pop("case"): line for line in lines}
    assert list(found) == list(CASES)
    return found


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(results: dict[str, dict[str, object]], name: str) -> None:
    result = results[name]
    assert result["agrees"], result["is"]
    assert result["different"] == []
    assert result["left"] == []
