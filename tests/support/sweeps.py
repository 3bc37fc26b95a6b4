"""Sweeps: `make test` runs a few of their cases, `make test-all` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases, all but the ``quick`` ones marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
