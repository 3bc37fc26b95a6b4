"""Tests marked `engine` need the packages that their marker names; without them they are skipped, visibly.

`make test-engines` sets EAGLE_SLIM_REQUIRE_PROGRAMS, and then a missing package is a failure.
"""

import importlib.util

import pytest
from engines.artifacts import OracleFiles
from engines.protocol import end_workers
from support.programs import skip_or_fail


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("engine"):
        missing = [name for name in marker.args if importlib.util.find_spec(name) is None]
        if missing:
            command = "make test-engines-all" if item.get_closest_marker("slow") else "make test-engines"
            skip_or_fail(f"needs {', '.join(missing)}: {command}")


@pytest.fixture(scope="session")
def oracle_files(tmp_path_factory: pytest.TempPathFactory) -> OracleFiles:
    return OracleFiles(tmp_path_factory.mktemp("oracle"))


def pytest_sessionfinish() -> None:
    end_workers()
