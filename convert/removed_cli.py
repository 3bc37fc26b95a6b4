"""Commands that are gone: each names what does its work now, and exits with the code of wrong usage."""

from __future__ import annotations

import sys
from typing import NoReturn


def push() -> NoReturn:
    """Refuse eagle-push."""
    _refuse("eagle-push was removed: run `eagle-verify DIR && hf upload NAME/REPOSITORY DIR`.")


def servers() -> NoReturn:
    """Refuse eagle-servers."""
    ways = "examples/same_text.py compares two servers' answers, docs/serving.md names the engines' own benchmarks"
    _refuse(f"eagle-servers was removed: {ways}.")


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
