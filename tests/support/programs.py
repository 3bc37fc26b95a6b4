"""Programs and packages that a test needs and that may be missing: it is skipped, visibly.

Where EAGLE_SLIM_REQUIRE_PROGRAMS is set, as in .ci/run, which installs them, it fails.
"""

import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]


def skip_or_fail(reason: str) -> NoReturn:
    if os.environ.get("EAGLE_SLIM_REQUIRE_PROGRAMS"):
        pytest.fail(reason)
    pytest.skip(reason)


def need_processes() -> None:
    """Skip a test where Python's processes can share nothing."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        skip_or_fail(f"needs /dev/shm: {error.strerror}")


def unknown_commits(commits: Iterable[str]) -> list[str]:
    """Those that are not in the history; none where git cannot tell: no clone, a shallow one, or somebody else's."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return []
    is_shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True)
    if is_shallow.stdout != b"false\n":
        return []
    ask = ["git", "merge-base", "--is-ancestor"]
    return [each for each in commits if subprocess.run([*ask, each, "HEAD"], cwd=ROOT, capture_output=True).returncode]


def headless_browser(profile: Path) -> list[str]:
    """Command line of a Chromium without a window, on an empty profile folder; what it is to open follows."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    chromium = next(filter(None, found), None) or skip_or_fail("needs chromium: apt-get install chromium")
    flags = "headless no-sandbox disable-gpu disable-dev-shm-usage disable-quic no-first-run disable-sync"
    flags += " disable-background-networking disable-component-update"
    return [chromium, *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={profile}"]
