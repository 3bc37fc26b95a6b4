"""Commands that are gone: each names what does its work now, and exits with the code of wrong usage."""

from __future__ import annotations

import sys
from typing import NoReturn


def push() -> NoReturn:
    """Refuse eagle-push."""
    _refuse("eagle-push was removed: run `eagle-verify DIR && hf upload NAME/REPOSITORY DIR`.")


def servers() -> NoReturn:
    """Refuse eagle-servers."""
    ways = "`vllm bench serve` and `python -m sglang.bench_serving` time servers"
    _refuse(f"eagle-servers was removed: {ways}, examples/same_text.py of the repository compares their answers.")


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
