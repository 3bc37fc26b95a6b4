"""The examples run as a newcomer would run them, only shorter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *args: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *args], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate(tmp_path: Path) -> None:
    out = run("generate.py", "What is the capital of France?", "--max-new-tokens", "10", folder=tmp_path)
    assert "Paris" in out
    assert "drafted over 8192 tokens" in out
    assert "plain greedy decoding: True" in out


def test_accuracy_vs_speed(tmp_path: Path) -> None:
    out = run("accuracy_vs_speed.py", "--sizes", "1024", "--num-prompts", "1", "--max-new-tokens", "6", folder=tmp_path)
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["plain", "full", "1024"]
    assert all(float(row[3]) >= 1.0 for row in rows)
    assert "recommended draft vocabulary" in out
    assert "<!DOCTYPE html>" in (tmp_path / "compare.html").read_text(encoding="utf-8")
