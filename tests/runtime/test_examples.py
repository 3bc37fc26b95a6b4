"""The examples run as a newcomer would run them, only shorter."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.upstream_models import NEEDS_UPSTREAM, UPSTREAM

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *args: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *args],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=1800,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script of one process in this one, which has imported what takes long."""

    def call(script: str, *args: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *args])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_generate(run_here: Callable[..., str]) -> None:
    out = run_here("generate.py", "What is the capital of France?", "--max-new-tokens", "10")
    assert "Paris" in out
    assert "drafted over 8192 tokens" in out
    assert "plain greedy decoding: True" in out


@pytest.mark.slow
def test_floors(run_here: Callable[..., str]) -> None:
    out = run_here("floors.py", str(Path(__file__).parents[1] / "data" / "llama3-domain-counts.npz"))
    assert re.search(r"german .* 93\.00% .* 73\.84% +85\.36% +93\.00% holds", out)
    assert re.search(r"all sources .* 92\.86% .* 86\.89% +93\.12% ", out)
    covered, bound = (float(number) for number in re.findall(r"(\d+\.\d+)% of (?:the|it)", out))
    assert bound - 0.01 < covered <= bound


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    args = ("--out", "here", "--max-new-tokens", "6")
    slim = tmp_path / "here" / "smollm2-135m-instruct-eagle3-v32000"
    out = run("demo.py", *args, folder=tmp_path)
    assert re.search(r"rows of the LM head +49,152 → 32,000", out)
    assert re.search(r"coverage of self-chat +99\.\d\d% of [\d,]+ held-out tokens", out)
    assert "ok, 0 warning, 0 failed" in out
    assert str(slim.relative_to(tmp_path)) in out


@pytest.mark.slow
def test_accuracy_vs_speed(run_here: Callable[..., str], tmp_path: Path) -> None:
    out = run_here("accuracy_vs_speed.py", "--sizes", "1024", "--num-prompts", "1", "--max-new-tokens", "6")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["plain", "full", "1,024"]
    assert all(float(row[row.index("all") + 1]) >= 1.0 for row in rows)
    assert "plain decoding" in out
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "<!DOCTYPE html>" in page


@NEEDS_UPSTREAM
def test_safeailab_dropin(tmp_path: Path) -> None:
    out = run("safeailab_dropin.py", "--upstream", str(UPSTREAM), "--max-new-tokens", "4", folder=tmp_path)
    assert "equal to upstream: True, fully patched: True" in out
