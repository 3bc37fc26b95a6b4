"""The type of a target on a CPU: by its instructions and its memory, never by the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from eagle_slim.runtime import SpeculativeModel, loading
from eagle_slim.runtime.errors import SpeedWarning
from support.tiny_models import SIZES, write_pair


@pytest.mark.parametrize(
    ("stored", "instructions", "dtype"),
    [("bfloat16", "avx512f avx512_bf16", "auto"), ("bfloat16", "avx512f avx512_fp16", torch.float32),
     ("bfloat16", "", torch.float32), ("float16", "asimd asimdhp", "auto"), ("float16", "bf16", torch.float32),
     ("float32", "", "auto"), (None, "", "auto")],
)  # fmt: skip
def test_sixteen_bits_only_where_the_processor_multiplies_in_them(
    monkeypatch: pytest.MonkeyPatch, stored: str | None, instructions: str, dtype: torch.dtype | str
) -> None:
    monkeypatch.setattr(loading, "cpu_instructions", lambda: frozenset(instructions.split()))
    config = transformers.LlamaConfig(**SIZES)
    config.dtype = None if stored is None else getattr(torch, stored)
    assert loading.dtype_on_cpu(config) == dtype


def test_a_model_is_loaded_in_it_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = write_pair(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(target)
    monkeypatch.setattr(loading, "cpu_instructions", frozenset)
    model = SpeculativeModel.from_pretrained(target, head, depth=2, top_k=4, device="cpu")
    assert model.dtype == model.drafter.weights.dtype == torch.float32
    told = SpeculativeModel.from_pretrained(target, head, depth=2, top_k=4, device="cpu", dtype="bfloat16")
    assert told.dtype == torch.bfloat16
    needed = 4 * sum(weight.numel() for weight in model.target.model.parameters())
    monkeypatch.setattr(loading, "free_memory_bytes", lambda: needed)
    with pytest.warns(SpeedWarning, match="the target stays in bfloat16"):
        kept = SpeculativeModel.from_pretrained(target, head, depth=2, top_k=4, device="cpu")
    assert kept.dtype == torch.bfloat16


def test_free_memory_is_that_of_the_control_group_where_it_is_less(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   4000 kB\n")
    assert loading.free_memory_bytes(tmp_path, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert loading.free_memory_bytes(tmp_path, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 5000\n")
    assert loading.free_memory_bytes(tmp_path, tmp_path) == 2_000_000
    assert loading.free_memory_bytes() > 0
