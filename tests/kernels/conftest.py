"""The device that kernels are tested on: compiled on a GPU, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
