"""What every test may rely on: a visible skip for GPU tests where there is no GPU, one thread, a seed, and Ctrl-C."""

import gc
import os
import signal
import sys

import pytest

# Tests set what they need of these; what a user has set for his own work is none of theirs.
USERS_OWN = ("EAGLE_SLIM_", "HF_", "HUGGING", "TRANSFORMERS_", "RAY_", "TRITON_INTERPRET", "ALL_PROXY", "all_proxy")
FOR_TESTS = ("EAGLE_SLIM_UPSTREAM", "EAGLE_SLIM_REQUIRE_PROGRAMS", "HF_HUB_OFFLINE")


def pytest_configure(config: pytest.Config) -> None:
    for name in [name for name in os.environ if name.startswith(USERS_OWN) and name not in FOR_TESTS]:
        del os.environ[name]
    # Tiny models gain nothing from more, and on a busy machine threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = f"localhost,127.0.0.1,{os.environ.get('no_proxy', '')}"
    # A shell that starts the tests in the background has them ignore it, and commands that they start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        return  # This process only hands out tests.
    # Kernels run in Triton's interpreter where there is no GPU; it must be chosen before triton is imported.
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    if config.pluginmanager.hasplugin("hypothesispytest"):  # the engines' environment has none
        from hypothesis import HealthCheck, settings

        # An example may take as long as a slow or busy machine needs, and the source tree may not be writable.
        too_slow = [HealthCheck.too_slow]
        settings.register_profile("any machine", deadline=None, suppress_health_check=too_slow, database=None)
        settings.load_profile("any machine")
    # While tests are collected, the garbage collector would look through everything that they import many times.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    if "triton.runtime.interpreter" in sys.modules:
        from support.interpreter import remember_builtins

        remember_builtins()


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def device() -> str:
    """The device that kernels are tested on: compiled on a GPU, else in Triton's interpreter on the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
