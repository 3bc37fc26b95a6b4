"""What tests of the runtime may rely on: no clock decides how their calls decode, unless a test sets one."""

import pytest


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_slim.runtime.step.pace.SHARE", 0.0)
