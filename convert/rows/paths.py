"""Choose the weights files of a folder, and refuse names in an index file that lead out of it.

Order of preference, as in transformers: `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin`,
`pytorch_model.bin.index.json`; and, where none of these exists, one single other `*.safetensors`. What is beside the
chosen files (`consolidated.safetensors`, an older `.bin`) is not looked at.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from eagle_slim.vocab_tools.errors import UsageError

from ..errors import CheckpointError
from ..files import read_object
from .types import damaged, shorten

SINGLE_SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
SINGLE_TORCH = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHTS_PREFERENCE = (SINGLE_SAFETENSORS, SAFETENSORS_INDEX, SINGLE_TORCH, TORCH_INDEX)
TORCH_SUFFIXES = (".bin", ".pt", ".pth")


def choose_weights(names: list[str], where: str) -> str:
    """Return which of the file names of a folder or repository holds or indexes its weights.

    Raises:
        CheckpointError: none does, or several could.
    """
    for preferred in WEIGHTS_PREFERENCE:
        if preferred in names:
            return preferred
    shards = [name for name in names if "-of-" in name and name.endswith((".safetensors", ".bin"))]
    if shards:
        raise CheckpointError.at(
            where,
            f"holds shards such as {shards[0]} but no index: expected {SAFETENSORS_INDEX} or {TORCH_INDEX}.\n"
            "Fetch the index file as well.",
        )
    others = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    plain = [name for name in others if name != "consolidated.safetensors"] or others
    if len(plain) == 1:
        return plain[0]
    if plain:
        raise CheckpointError.at(
            where,
            f"several files of weights and none with the usual name: {', '.join(plain[:5])}.\n"
            "Name a head's with --weights-file; of a target, give a folder with the one that is meant and its "
            "config.json.",
        )
    raise CheckpointError(
        f"{where}: no weights: expected one of {', '.join(WEIGHTS_PREFERENCE)}; of a head, --weights-file names "
        "another, --subfolder a sub-folder.\n" + (f"Found {', '.join(sorted(names)[:8])}." if names else "It is empty.")
    )


def doubts_of_choice(names: list[str]) -> list[str]:
    """Warn where one file of weights is taken, and an index with shards of the same format lies beside it."""
    single, index = WEIGHTS_PREFERENCE[:2] if SINGLE_SAFETENSORS in names else WEIGHTS_PREFERENCE[2:]
    shards = [name for name in names if "-of-" in name and name.endswith(Path(single).suffix)]
    if not shards or single not in names or index not in names:
        return []
    return [
        f"{single} is read, though {index} and {shards[0]} lie beside it: if these are the right weights, say "
        f"--weights-file {index}"
    ]


def read_index(path: Path) -> dict[str, str]:
    """Read an index file: the shard of each tensor. The shards themselves are not looked at.

    Raises:
        CheckpointError: not JSON, no `weight_map` of strings, or a shard name that could leave its folder.
    """
    weight_map = read_object(path, CheckpointError, str(path.parent)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(path, "expected an object with a filled weight_map")
    for name, shard in weight_map.items():
        if not stays_inside(shard) or not shard.endswith((".safetensors", *TORCH_SUFFIXES)):
            raise CheckpointError.at(
                path,
                f"shard of tensor {shorten(name)}: expected a file of weights in this folder, found {shorten(shard)}.\n"
                "An index that points elsewhere is not to be trusted: fetch the repository from its author again.",
            )
    return weight_map


def stays_inside(name: object) -> bool:
    """Whether `name` is a relative path without `..`, which no shell or terminal reads as anything else."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def clean_subfolder(subfolder: object) -> str:
    """Return the name of a folder inside a repository or folder, without a slash at its end; "" for None.

    Raises:
        UsageError: an absolute path, one with `..`, or no string.
    """
    if subfolder is None:
        return ""
    if not isinstance(subfolder, str) or not stays_inside(subfolder):
        raise UsageError(
            f"--subfolder {shorten(subfolder)}: expected the name of a folder inside the repository or folder, "
            "such as eagle3 or heads/eagle3."
        )
    return "/".join(PurePosixPath(subfolder).parts)


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder` after checking that it exists and does not lead elsewhere.

    Links may end inside the folder itself or, where the folder is a snapshot of the Hugging Face cache, in the blobs of
    that repository or in the blobs which the repositories of that cache share.

    Raises:
        CheckpointError: the file is missing, or a link leads out of these places.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = "a link to nothing" if path.is_symlink() else "not there"
        raise CheckpointError.at(
            path, f"{reason}. Expected a file of weights.\nFetch the missing file, or the whole repository again."
        ) from error
    if not any(real.is_relative_to(root) for root in _allowed_roots(folder)):
        raise CheckpointError.at(
            path,
            f"a link that leads out of the checkpoint, to {real}.\n"
            "Expected a file in this folder; copy the file there if you trust it.",
        )
    return path


def _allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which a file of the checkpoint `folder` may lie, links resolved."""
    real = folder.resolve()
    # A folder of the snapshot, as well as the snapshot itself.
    for snapshot in (real, *real.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--", "spaces--")):
            return real, repository / "blobs", repository.parent / "blobs"
    return (real,)


def list_names(folder: Path) -> list[str]:
    """Return the names of the files of a folder; CheckpointError where it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not os.path.isdir(folder / name))
    except OSError as error:
        raise CheckpointError.at(folder, f"cannot be listed: {error.strerror}.") from error
