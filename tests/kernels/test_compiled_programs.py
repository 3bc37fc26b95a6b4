"""The whole kernel compiled for sm_80 and sm_90 and executed without them, see `compiled_programs`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels.ptx_machine import COMPILER, library

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs a C++ compiler ({COMPILER})"),
]

TESTS = Path(__file__).parents[1]
CASES = {
    80: ["alone, with tails", "mixed, programs left out", "eagle", "widest", "all taps normed"],
    90: [
        "alone, with tails",
        "more parts than programs",
        "fewer rows than programs",
        "fp8",
        "eagle, fp8",
        "each tap normed, fp8",
    ],
}
WITH_FAULTS = "groups of four"
FAULTS = ["release", "acquire", "arrivals", "barriers", "waiting for copies", "waiting for products"]

Results = list[dict[str, object]]


def draft(*arguments: str) -> Results:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(TESTS)
    command = [sys.executable, "-W", "ignore", "-m", "kernels.compiled_programs", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def results() -> Iterator[dict[object, Future[Results]]]:
    """Two processes at a time."""
    library()  # built once
    with ThreadPoolExecutor(2) as pool:
        by_chip: dict[object, Future[Results]] = {
            chip: pool.submit(draft, "--chip", str(chip), *names) for chip, names in CASES.items()
        }
        yield {**by_chip, "faults": pool.submit(draft, "--chip", "90", WITH_FAULTS, "--faults")}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("chip", "name"), [(chip, name) for chip, names in CASES.items() for name in names])
def test_equals_the_reference(results: dict[object, Future[Results]], chip: int, name: str) -> None:
    (result,) = [result for result in results[chip].result() if result["case"] == name]
    assert result["agrees"], result["is"]
    assert result["different"] == []
    assert result["left"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(results: dict[object, Future[Results]], fault: str) -> None:
    sound, *faulty = results["faults"].result()
    assert sound["agrees"], sound["is"]
    noticed = {result["fault"]: result["noticed"] for result in faulty}
    assert list(noticed) == FAULTS
    assert noticed[fault]
