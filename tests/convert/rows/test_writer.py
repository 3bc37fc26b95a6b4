"""The writer gives the bytes of `save_file`, and refuses to write what was not planned."""

import hashlib

import numpy as np
import pytest
import torch
from eagle_slim.convert.rows.files import LONG_NAMES, all_finite, rounded
from eagle_slim.convert.rows.writer import TensorPlan, array_plan, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8]


def raw(tensor):
    rows = tensor.shape[0] if tensor.dim() else 1
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat.reshape(rows, -1).numpy() if tensor.numel() else np.empty((rows, 0), np.uint8)


def short(dtype):
    return next(name for name, long_name in LONG_NAMES.items() if f"torch.{long_name}" == str(dtype))


def plan_of(name, tensor):
    shape, pieces = tuple(tensor.shape), np.array_split(raw(tensor), 2)
    return TensorPlan(name, short(tensor.dtype), shape, tensor.nbytes, lambda: iter(pieces))


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.text("abcdefghij.é0", min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_same_bytes_as_the_reference(tmp_path_factory, layout):
    folder = tmp_path_factory.mktemp("writer")
    tensors = {name: (torch.randn(shape) * 3).to(dtype) for name, (dtype, shape) in layout.items()}
    save_file(tensors, folder / "reference", {"format": "pt"})
    plans = [plan_of(name, tensor) for name, tensor in reversed(list(tensors.items()))]
    written = write_safetensors(folder / "ours", plans)
    data = (folder / "ours").read_bytes()
    assert data == (folder / "reference").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert written["size_bytes"] == len(data)
    assert written["header_sha256"] == hashlib.sha256(data[:start]).hexdigest()
    for name, tensor in tensors.items():
        assert written["tensors"][name] == hashlib.sha256(raw(tensor).tobytes()).hexdigest()


@pytest.mark.parametrize("size", [8, 16])
def test_broken_plans(tmp_path, size):
    plan = TensorPlan("m", "F32", (size // 4,), size, lambda: iter([raw(torch.ones(3))]))
    with pytest.raises(ValueError, match=f"planned {size} bytes, got 12"):
        write_safetensors(tmp_path / "file", [plan])


def test_the_file_is_as_readable_as_any_new_one(tmp_path):
    (tmp_path / "other").touch()
    write_safetensors(tmp_path / "file", [array_plan("ids", np.arange(3))])
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite(dtype):
    limits, name = torch.finfo(dtype), short(dtype)
    fine = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, -1.5], dtype=dtype)
    assert all_finite(raw(fine), name)
    assert all_finite(raw(fine[:0]), name)
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        for position in range(len(fine)):
            spoilt = fine.clone()
            spoilt[position] = bad
            assert not all_finite(raw(spoilt), name)


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("found", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_torchs(found, wanted):
    bits = torch.randint(0, 1 << 15, (4000,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    values = torch.cat([bits.view(torch.float16).float(), bits.view(torch.bfloat16).float(), torch.randn(4000)])
    # Halfway between two numbers of bf16 and of fp16, on both sides of an even one.
    values = torch.cat([values, 1 + torch.arange(64) * 2.0**-9, 1 + torch.arange(64) * 2.0**-12]).to(found)
    values = values[torch.isfinite(values)]
    ours = rounded(raw(values), short(found), short(wanted))
    assert ours.tobytes() == raw(values.to(wanted)).tobytes()
