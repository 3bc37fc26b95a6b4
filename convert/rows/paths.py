"""Choose the weights files of a folder, and refuse names in an index file or option that lead out of it.

Order of preference, as in transformers: `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin`,
`pytorch_model.bin.index.json`; and, where none of these exists, one single other `*.safetensors`. What is beside the
chosen files (an older `.bin`) is not looked at; of a head's, `open_head` warns.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.files import read_object

from ..errors import CheckpointError
from .safetensors_file import damaged, shorten

WEIGHTS_PREFERENCE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHTS = re.compile(r"(?!training_args|optimizer|scheduler|scaler|consolidated)[^/]*\.(safetensors|bin)")
"""Names of files that an engine may read a head from: no state of a trainer, and not Mistral's copy of a model.

vLLM, SGLang and FR-Spec read .pt, the suffix of maps and of trainers' states, only where neither of the two is.
"""


def choose_weights(names: list[str], where: str) -> str:
    """Return which of the file names of a folder or repository holds or indexes its weights.

    Raises CheckpointError where none does, or several could.
    """
    for preferred in WEIGHTS_PREFERENCE:
        if preferred in names:
            return preferred
    others = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    plain = [name for name in others if name != "consolidated.safetensors"] or others
    if len(plain) == 1 and "-of-" not in plain[0]:
        return plain[0]
    found = f"Found {', '.join(plain[:5] or sorted(names)[:8]) or 'no files'}."
    problem = f"no weights: expected one of {', '.join(WEIGHTS_PREFERENCE)}. {found}"
    advice = "Give the file that is meant one of these names, or name a sub-folder of a head with --subfolder."
    if any("-of-" in name for name in names):
        advice = "These are shards without their index: fetch the .index.json too, or save the head as one file."
    raise CheckpointError.at(where, f"{problem}\n{advice}")


def read_index(path: Path) -> dict[str, str]:
    """Read an index file: the shard of each tensor. The shards themselves are not looked at.

    Raises CheckpointError: not JSON, no `weight_map` of strings, or a shard name that could leave its folder.
    """
    weight_map = read_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(path, "expected an object with a filled weight_map")
    for name, shard in weight_map.items():
        if not stays_inside(shard) or not shard.endswith((".safetensors", *TORCH_SUFFIXES)):
            problem = f"shard of tensor {shorten(name)}: expected a file of weights in this folder"
            raise CheckpointError.at(path, f"{problem}, found {shorten(shard)}.\nFetch the repository again.")
    return weight_map


def stays_inside(name: object) -> bool:
    """Whether `name` is a relative path without `..`, which no shell or terminal reads as anything else."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def clean_subfolder(subfolder: object) -> str:
    """Return --subfolder without a slash at its end, "" for None; UsageError where it could lead out of its folder."""
    if subfolder is None:
        return ""
    if not isinstance(subfolder, str) or not stays_inside(subfolder):
        expected = "expected the name of a folder inside the repository or folder, such as eagle3"
        raise UsageError(f"--subfolder {shorten(subfolder)}: {expected}.")
    return "/".join(PurePosixPath(subfolder).parts)


def list_names(folder: Path) -> list[str]:
    """Return the names of the files of a folder; CheckpointError where it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not os.path.isdir(folder / name))
    except OSError as error:
        raise CheckpointError.at(folder, f"cannot be listed: {error.strerror}.") from error
