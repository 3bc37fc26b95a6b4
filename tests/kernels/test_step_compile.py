"""The kernels of a step compiled for chips that are not here: they fit and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.chips import KNOWN_CHIPS

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_fits_and_does_not_spill(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "kernels.compiled_step", "--chip", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) >= 30
    for name, report in reports.items():
        assert report["shared_bytes"] <= KNOWN_CHIPS[capability].shared_bytes, name
        assert report["spill_bytes"] == report["stack_bytes"] == 0, (name, report)
        assert report["registers"] * 32 * report["num_warps"] <= 65536, name
