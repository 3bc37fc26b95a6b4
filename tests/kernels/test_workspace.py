"""The table of the workspace is what is allocated, what the kernel is handed, and what the documentation prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.drafter.launch_params import choose_launch
from eagle_slim.runtime.drafter.workspace import BUFFERS, Workspace, allocate_workspace, sizes
from kernels.chips import KNOWN_CHIPS
from kernels.compiled_drafter import LLAMA_8B, SMOLLM2

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
FP8 = replace(LLAMA_8B, weight_dtype=torch.float8_e4m3fn)
EAGLE = replace(SMOLLM2, kind="eagle", feature_width=SMOLLM2.hidden)

SIZES = {
    "slots": "sequences side by side", "slot rows": "16 for each slot",
    "rows": "16 for each slot, to a power of two", "programs": "one on each multiprocessor",
    "lists": "one for each program, to a multiple of 16", "places": "top_k, to a power of two",
    "candidates": "all that are drafted: top_k + depth * top_k^2", "nodes": "total_tokens",
    "chain": "16 levels", "hidden": "the head's width", "qkv": "(heads + 2 kv_heads) * head_dim",
    "input rows": "embeddings, then features", "raw rows": "the same; 1 where `x_raw` is not used",
    "operand values": "all operands together", "part rows": "groups * split * rows of a group, the largest of the four",
    "attention rows": "queries of all parts of all heads", "head block": "head_dim, to a power of two",
    "head tile": "LM-head rows multiplied at a time", "barrier": "4 words",
}  # fmt: skip
"""What the names mean, for readers."""


def table() -> str:
    """The table, in Markdown."""
    lines = ["| buffer | type | shape | written in | read in | what |", "| --- | --- | --- | --- | --- | --- |"]
    for buffer in BUFFERS:
        cells = (f"`{buffer.name}`", buffer.dtype, ", ".join(buffer.shape), buffer.written, buffer.read, buffer.holds)
        lines.append(f"| {' | '.join(cells)} |")
    meanings = "; ".join(f"*{name}*: {meaning}" for name, meaning in SIZES.items())
    return "\n".join([*lines, "", f"Sizes: {meanings}."])


def test_the_documentation_prints_it() -> None:
    expected = table()
    assert expected in DOCS.read_text(encoding="utf-8"), f"put this table into docs/kernels.md:\n{expected}"


def test_every_name_is_explained() -> None:
    used = {name for buffer in BUFFERS for name in buffer.shape} - {"2"}
    assert used <= set(SIZES)
    assert set(SIZES) | {"2"} == set(sizes(LLAMA_8B, choose_launch(LLAMA_8B, KNOWN_CHIPS[90])))


@pytest.mark.parametrize("cfg", [LLAMA_8B, FP8, EAGLE], ids=["bf16", "fp8", "eagle"])
def test_all_is_allocated_and_poisoned(cfg: object) -> None:
    tensors = allocate_workspace(cfg, choose_launch(cfg, KNOWN_CHIPS[90]), "cpu")  # type: ignore[arg-type]
    assert tuple(tensors) == Workspace._fields
    for buffer in BUFFERS:
        tensor = tensors[buffer.name]
        if tensor.dtype.is_floating_point:
            assert tensor.flatten()[-100:].float().isnan().all()
