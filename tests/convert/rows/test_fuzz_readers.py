"""Whatever the bytes of a weights file: tensors no larger than it, or our own error; no crash."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.convert.errors import CheckpointError
from eagle_slim.convert.rows.checkpoint import open_checkpoint
from eagle_slim.convert.rows.paths import read_index
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

TENSORS = {
    "a": torch.arange(12.0).reshape(4, 3),
    "b": torch.arange(6),
    "c": torch.tensor([True, False]),
    "d": torch.ones(2, 2, 2, dtype=torch.bfloat16),
    "e": torch.tensor(1.0),
}


def torch_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer)
    return buffer.getvalue()


SOURCES = {".safetensors": save(TENSORS), ".bin": torch_bytes()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_everything(path: Path) -> None:
    """Open a file and read all of it, or see our own error with its name."""
    refusal = ""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names:
            info, value = checkpoint.info(name), checkpoint.raw(name)
            assert value.shape == (info.num_rows, info.row_bytes)
            assert value.nbytes == info.size_bytes <= path.stat().st_size
            if info.shape and info.shape[0]:
                assert sum(map(len, checkpoint.pieces(name, [0, info.shape[0] - 1]))) == 2
    except CheckpointError as error:
        refusal = str(error)
    assert not refusal or refusal.startswith(str(path))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_mutated_bytes(folder: Path, data: st.DataObject) -> None:
    suffix = data.draw(st.sampled_from(sorted(SOURCES)))
    raw = bytearray(SOURCES[suffix])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        # The head of a file is where its claims are.
        at = at if data.draw(st.booleans()) else at % min(600, max(1, len(raw)))
        kind = data.draw(st.sampled_from(["set", "delete", "insert", "cut", "grow"]))
        if kind == "set" and raw:
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "delete":
            del raw[at : at + data.draw(st.integers(1, 16))]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "cut":
            del raw[at:]
        else:
            raw += data.draw(st.binary(min_size=1, max_size=20))
    path = folder / f"mutated{suffix}"
    path.write_bytes(raw)
    read_everything(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=4), JSON, max_size=3)}))
def test_invented_indexes(folder: Path, value: Any) -> None:
    (folder / "index.json").write_text(json.dumps(value))
    try:
        index = read_index(folder / "index.json")
    except CheckpointError:
        return
    for shard in index.values():
        assert not shard.startswith("/")
        assert ".." not in shard.split("/")
