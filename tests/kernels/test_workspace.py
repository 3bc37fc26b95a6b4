"""The table of the workspace is what is allocated and what the kernel is handed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.drafter.launch_params import choose_launch
from eagle_slim.runtime.drafter.workspace import BUFFERS, Workspace, allocate_workspace, sizes
from kernels.chips import KNOWN_CHIPS
from kernels.compiled_drafter import LLAMA_8B, SMOLLM2

FP8 = replace(LLAMA_8B, weight_dtype=torch.float8_e4m3fn)
EAGLE = replace(SMOLLM2, kind="eagle", feature_width=SMOLLM2.hidden)


def test_every_name_has_a_size() -> None:
    used = {name for buffer in BUFFERS for name in buffer.shape} - {"2"}
    assert used <= set(sizes(LLAMA_8B, choose_launch(LLAMA_8B, KNOWN_CHIPS[90])))


@pytest.mark.parametrize("cfg", [LLAMA_8B, FP8, EAGLE], ids=["bf16", "fp8", "eagle"])
def test_all_is_allocated_and_poisoned(cfg: object) -> None:
    tensors = allocate_workspace(cfg, choose_launch(cfg, KNOWN_CHIPS[90]), "cpu")  # type: ignore[arg-type]
    assert tuple(tensors) == Workspace._fields
    for buffer in BUFFERS:
        tensor = tensors[buffer.name]
        if tensor.dtype.is_floating_point:
            assert tensor.flatten()[-100:].float().isnan().all()
