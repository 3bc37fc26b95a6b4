"""The engines themselves are needed by tests that bear their marker; without them these are skipped, visibly.

`tests/engines/run.sh` sets EAGLE_SLIM_REQUIRE_ENGINES, and then a missing engine is a failure.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from engines.artifacts import OracleFiles


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    required = bool(os.environ.get("EAGLE_SLIM_REQUIRE_ENGINES"))
    for item in items:
        for marker in item.iter_markers("engine"):
            missing = [name for name in marker.args if importlib.util.find_spec(name) is None]
            if missing and required:
                raise pytest.UsageError(f"{item.nodeid} needs {', '.join(missing)}, which run.sh should have installed")
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}: make test-engines"))


@pytest.fixture(scope="session")
def oracle_files(tmp_path_factory: pytest.TempPathFactory) -> OracleFiles:
    folder: Path = tmp_path_factory.mktemp("oracle")
    return OracleFiles(folder)


_FIGURES: dict[str, str] = {}


@pytest.fixture(scope="session")
def figures() -> dict[str, str]:
    """What a test measured and does not judge; printed when all tests are done."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _FIGURES:
        terminalreporter.section("figures")
    for name, value in _FIGURES.items():
        terminalreporter.line(f"{name}: {value}")
