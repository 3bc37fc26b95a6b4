"""Programs and packages that a test needs and that may be missing: it is skipped, visibly.

Where EAGLE_SLIM_REQUIRE_PROGRAMS is set, as in .ci/run, which installs them, it fails.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """End a test that lacks a program."""
    if os.environ.get("EAGLE_SLIM_REQUIRE_PROGRAMS"):
        pytest.fail(reason)
    pytest.skip(reason)


def headless_browser(profile: Path) -> list[str]:
    """Command line of a Chromium without a window, on an empty profile folder; what it is to open follows."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    chromium = next(filter(None, found), None) or skip_or_fail("needs chromium: apt-get install chromium")
    return [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}",
    ]  # fmt: skip
