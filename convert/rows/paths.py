"""Which files of a folder are its weights, and whether a name, as an index file has them, stays inside that folder.

Order of preference, as in transformers: `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin`,
`pytorch_model.bin.index.json`; and, where none of these exists, one single other `*.safetensors`. What is beside the
chosen files (`consolidated.safetensors`, an older `.bin`) is not looked at.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from eagle_slim.vocab_tools.errors import UsageError

from ..errors import CheckpointError
from ..files import read_regular
from .types import damaged, shorten

SINGLE_SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
SINGLE_TORCH = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHTS_PREFERENCE = (SINGLE_SAFETENSORS, SAFETENSORS_INDEX, SINGLE_TORCH, TORCH_INDEX)
TORCH_SUFFIXES = (".bin", ".pt", ".pth")

# An index has about 100 bytes for each tensor; the largest published ones have some ten megabytes.
_MAX_INDEX_BYTES = 256_000_000


@dataclass(frozen=True)
class WeightsIndex:
    """An index file that has passed every check: the shard of each tensor, shards in order of first mention."""

    where: str
    shard_of: dict[str, str]

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards, each once, relative to the folder of the index."""
        return tuple(dict.fromkeys(self.shard_of.values()))


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
            found=shards[0],
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
            found=plain,
        )
    raise CheckpointError(
        f"{where}: no weights: expected one of {', '.join(WEIGHTS_PREFERENCE)}; of a head, --weights-file names "
        "another, --subfolder a sub-folder.\n"
        + (f"Found {', '.join(sorted(names)[:8])}." if names else "It is empty."),
        found=sorted(names),
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


def read_index(path: Path) -> WeightsIndex:
    """Read and check an index file on disk; the shards themselves are not looked at.

    Raises:
        CheckpointError: the file cannot be read, or `parse_index` refuses it.
    """
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise damaged(str(path), f"an index of {path.stat().st_size:,} bytes is not an index")
        return parse_index(read_regular(path), str(path))
    except OSError as error:
        raise CheckpointError.at(path, f"cannot be read: {error.strerror}.") from error


def parse_index(raw: bytes, where: str) -> WeightsIndex:
    """Check the JSON of an index and return it.

    Raises:
        CheckpointError: not JSON, no `weight_map` of strings, or a shard name that could leave its folder.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise damaged(where, "the index names a tensor twice")
        return dict(pairs)

    try:
        index = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"not valid JSON ({shorten(str(error))})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(where, "expected an object with a filled weight_map")
    for name, shard in weight_map.items():
        check_shard_name(shard, f"{where}: shard of tensor {shorten(name)}")
    return WeightsIndex(where, weight_map)


def check_shard_name(shard: object, label: str) -> None:
    """Raise CheckpointError unless `shard` is a relative file name without `..`."""
    safe = (
        isinstance(shard, str)
        and shard.isprintable()
        and "\\" not in shard
        and PurePosixPath(shard).parts not in ((), ("/",))
        and not PurePosixPath(shard).is_absolute()
        and ".." not in PurePosixPath(shard).parts
        and str(PurePosixPath(shard)) == shard
        and shard.endswith((".safetensors", *TORCH_SUFFIXES))
    )
    if not safe:
        raise CheckpointError(
            f"{label}: expected the name of a file in the same folder, found {shorten(shard)}.\n"
            "An index that points elsewhere is not to be trusted: fetch the repository from its author again.",
            shard=shard,
        )


def clean_subfolder(subfolder: object) -> str:
    """Return the name of a folder inside a repository or folder, without a slash at its end; "" for None.

    Raises:
        UsageError: an absolute path, one with `..`, or no string.
    """
    if subfolder is None:
        return ""
    path = PurePosixPath(subfolder) if isinstance(subfolder, str) and subfolder.isprintable() else None
    if path is None or path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise UsageError(
            f"subfolder {shorten(subfolder)}: expected the name of a folder inside the repository or folder, "
            "such as eagle3 or heads/eagle3.",
            option="--subfolder",
            found=subfolder,
        )
    return "/".join(path.parts)


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
            path,
            f"{reason}. Expected a file of weights.\nFetch the missing file, or the whole repository again.",
            found=reason,
        ) from error
    if not any(real.is_relative_to(root) for root in allowed_roots(folder)):
        raise CheckpointError.at(
            path,
            f"a link that leads out of the checkpoint, to {real}.\n"
            "Expected a file in this folder; copy the file there if you trust it.",
            found=str(real),
        )
    return path


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which a file of the checkpoint `folder` may really lie, links resolved."""
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
