"""DraftVocab → token maps of other tools; formats.py lists them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..files import write_file
from .draft_vocab import DraftVocab
from .formats import FORMATS, NPY_NAMES, PICKLES, MapFormat
from .token_map import d2t_from_ids, t2d_from_ids

_SUFFIXES: dict[str, tuple[str, ...]] = {
    "freq": PICKLES,
    "vllm": (".json", *PICKLES),
    "d2t-pt": PICKLES,
    "modelopt": PICKLES,
    "safetensors": (".safetensors",),
    "npy": ("",),
    "json": (".json",),
}


def export_token_map(vocab: DraftVocab, path: str | Path, format: MapFormat | None = None) -> None:
    """Write a vocabulary as a token map; the bytes depend on the ids only, not on the file's name.

    Args:
        path: file to write; for "npy" a folder that exists.
        format: one of `FORMATS`; by default "json" for .json, "safetensors" for .safetensors, "freq" for .pt.

    Raises:
        UsageError: the format does not go with the file's ending, or the list formats are asked of ids without rank.
        OSError: the file cannot be written.
    """
    path = Path(path)
    format = format or _format_of(path)
    if format not in FORMATS:
        raise UsageError(f"token map format {format!r}: expected one of {', '.join(FORMATS)}.")
    if path.suffix not in _SUFFIXES[format]:
        endings = " or ".join(_SUFFIXES[format])
        found = f"{path.suffix!r}" if path.suffix else "a name without ending"
        expected = f"a file ending in {endings}" if endings.strip() else "a folder"
        raise UsageError(f"{path}: format {format!r} is written to {expected}, not {found}.", path=path, format=format)
    if format in ("freq", "vllm") and not vocab.ranked:
        raise UsageError(
            f"Format {format!r} lists ids in rank order, but these come from a map in ascending order, which has none. "
            "Rank them with counts first (`eagle-vocab rank --candidates`).",
            format=format,
            ranked=False,
        )
    for name, data in _encode(vocab, format, path.suffix).items():
        write_file(path / name if name else path, data)


def writes_t2d(path: str | Path, format: MapFormat | None = None) -> bool:
    """Whether `export_token_map` writes a t2d, whose length is the target's vocabulary, and not ids alone."""
    return (format or _format_of(Path(path))) in ("d2t-pt", "safetensors", "npy")


def _format_of(path: Path) -> MapFormat:
    if path.suffix == ".json":
        return "json"
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.suffix in PICKLES:
        return "freq"
    if path.is_dir():
        return "npy"
    raise UsageError(f"{path}: this name tells no token map format. Give one with --format.", path=path, format=None)


def _encode(vocab: DraftVocab, format: MapFormat, suffix: str) -> dict[str, bytes]:
    """Return the bytes by file name inside the output folder, "" for the output itself."""
    ids = vocab.ascending_ids
    d2t, t2d = d2t_from_ids(ids), t2d_from_ids(ids, vocab.target_vocab)
    if format == "json":
        return {"": vocab.to_bytes()}
    if format == "vllm" and suffix == ".json":
        return {"": (json.dumps(vocab.target_ids.tolist()) + "\n").encode()}
    if format in ("freq", "vllm"):
        return {"": _torch_bytes(vocab.target_ids.tolist())}
    if format == "safetensors":
        from safetensors.numpy import save

        return {"": bytes(save({"d2t": d2t, "t2d": t2d}, metadata={"format": "pt"}))}
    if format == "npy":
        return {name: _npy_bytes(array) for name, array in zip(NPY_NAMES, (d2t, t2d), strict=True)}
    import torch

    offsets = torch.from_numpy(d2t)
    return {"": _torch_bytes(offsets if format == "modelopt" else {"d2t": offsets, "t2d": torch.from_numpy(t2d)})}


def _torch_bytes(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
