"""Change a written artifact and sign it again, so that a check must find the fault itself and not by a checksum."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from eagle_slim.convert.artifact.checksums import encode_checksums, row_checksums
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


class Attack:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def change_tensors(folder: Path, change: Callable[[Tensors], Any], sign_rows: bool = False) -> None:
    """Load the weights, let `change` work on them, save them, and record their checksums in the manifest."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    raw = {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
    entry = {
        "size_bytes": len(data),
        "header_sha256": hashlib.sha256(data[:start]).hexdigest(),
        "tensors": {name: hashlib.sha256(values).hexdigest() for name, values in raw.items()},
    }

    def sign(manifest: dict[str, Any]) -> None:
        manifest["files"]["model.safetensors"] = entry
        if sign_rows:
            rows = raw["lm_head.weight"].reshape(len(tensors["lm_head.weight"]), -1)
            manifest["row_checksums"] = encode_checksums(row_checksums(rows))

    change_manifest(folder, sign)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    sign_file(folder, "config.json")


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "eagle_slim.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def sign_file(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change_manifest(folder, lambda manifest: manifest["files"].update({name: entry}))
