"""What README.md prints, run as printed and in order; its length; the links of all pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/FORMAT.md"), *ROOT.glob("benchmarks/*.md")]
BLOCK = re.compile(r"^(<!-- not run by the tests: [^\n]*-->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every block but those that say they are not run, and the make targets."""
    found = [(match[2], match[3]) for match in BLOCK.finditer((ROOT / "README.md").read_text("utf-8")) if not match[1]]
    return [(language, text) for language, text in found if not text.startswith("make ")]


@pytest.mark.slow
def test_readme(tmp_path: Path) -> None:
    printed = []
    for language, text in blocks():
        program = {"bash": ["bash", "-e", "-u", "-o", "pipefail", "-c"], "python": [sys.executable, "-c"]}[language]
        done = subprocess.run(
            [*program, text], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=1800,
            env={**os.environ, "PYTHONUTF8": "1", "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done)
    shell, python = printed
    page = (ROOT / "README.md").read_text("utf-8")
    told = re.search(r"^```\n(  rows of the LM head.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert told is not None
    for line in told[1].splitlines():
        assert line in shell.stdout + shell.stderr
    # Sampled in bfloat16: the page's figures are those of one processor.
    assert float(python.stdout.splitlines()[-1].split()[0]) > 1.3
    assert [path.name for path in tmp_path.iterdir()] == ["slim"]


def test_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            linked = (path.parent / name) if name else path
            assert linked.exists(), link
            assert not anchor or anchor in anchors(linked), link
