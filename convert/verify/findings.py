"""What the groups of checks share: the parts of an artifact that have been read so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import sha256_of
from ..artifact.manifest import Manifest
from ..errors import ArtifactError
from ..head.draft_head import DraftHead
from ..head.open import head_from_checkpoint
from ..rows import dtypes
from ..rows.checkpoint import Checkpoint
from ..rows.safetensors_file import SafetensorsFile

_Part = TypeVar("_Part")


class SkipCheck(Exception):  # noqa: N818  (not an error: the check cannot be made)
    """The check cannot be made; the message says why."""


class Doubt(Exception):  # noqa: N818  (not an error: the artifact is sound)
    """The check found something to know, which is no fault of the artifact; the message says what."""


@dataclass
class Findings:
    """Parts of an artifact, None until a check has read them.

    Attributes:
        ids: int64 [draft_vocab], target id of each row, from a map that is sound.
        digests: SHA-256 of each tensor of the weights file.
    """

    folder: Path
    manifest: Manifest | None = None
    config: dict[str, Any] | None = None
    weights: SafetensorsFile | None = None
    ids: NDArray[np.int64] | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def need_manifest(self) -> Manifest:
        """The manifest, or skip the check."""
        return needed(self.manifest, "the manifest could not be read")

    def need_config(self) -> dict[str, Any]:
        """config.json, or skip the check."""
        return needed(self.config, "config.json could not be read")

    def need_weights(self) -> SafetensorsFile:
        """The weights file, or skip the check."""
        return needed(self.weights, "model.safetensors could not be read")

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors of the weights file, or skip the check."""
        return Checkpoint.of(self.need_weights())

    def digest(self, name: str) -> str:
        """SHA-256 of a tensor of the weights file, read once for all checks."""
        if name not in self.digests:
            self.digests[name] = self.checkpoint.sha256(name)
        return self.digests[name]

    def need_head(self, location: str) -> DraftHead:
        """The artifact as any head is opened, or skip the check; `location` names it in messages."""
        return head_from_checkpoint(self.checkpoint, self.need_config(), location=location)

    def need_lm_head(self) -> Manifest:
        """The manifest of an artifact with an LM head, or skip the check."""
        manifest = self.need_manifest()
        if manifest.kind == "eagle":
            raise SkipCheck("EAGLE-1/2 heads have no map and no LM head of their own")
        return manifest

    def need_map(self) -> Manifest:
        """The manifest of an artifact with an LM head over a reduced vocabulary, or skip the check."""
        manifest = self.need_lm_head()
        if manifest.rank_order_ids is None:
            raise SkipCheck("a full vocabulary has no map")
        return manifest

    def need_ids(self) -> NDArray[np.int64]:
        """The target id of each row, or skip the check."""
        return needed(self.ids, "the map is not sound")


def needed(part: _Part | None, why: str) -> _Part:
    """The part, or skip the check because of `why`."""
    if part is None:
        raise SkipCheck(why)
    return part


def all_finite(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor of floating-point numbers holds neither NaN nor infinity."""
    dtype = checkpoint.info(name).dtype
    return all(dtypes.all_finite(piece, dtype) for piece in checkpoint.pieces(name))


def written_otherwise(file: SafetensorsFile, entry: Mapping[str, Any], digest: Callable[[str], str]) -> list[str]:
    """Where a safetensors file differs from its `entry` in the manifest; `digest`: SHA-256 of a tensor by name."""
    with file.path.open("rb") as opened:
        start = opened.read(file.data_offset)
    problems = []
    if file.size_bytes != entry.get("size_bytes"):
        problems.append(f"expected {entry.get('size_bytes')} bytes, found {file.size_bytes}")
    if sha256_of(start) != entry.get("header_sha256"):
        problems.append("the header is not as it was written")
    recorded = entry.get("tensors", {})
    for name in sorted(file.tensors):
        if recorded.get(name) != digest(name):
            problems.append(f"{name} is not as it was written" if name in recorded else f"{name} is not recorded")
    return problems + [f"{name} is missing" for name in sorted(set(recorded) - set(file.tensors))]


def refuse(condition: bool, message: str) -> None:
    """Raise ArtifactError with `message` where `condition` holds."""
    if condition:
        raise ArtifactError(message)


def join(problems: list[str]) -> None:
    """Raise ArtifactError with all problems, if there are any."""
    if problems:
        raise ArtifactError("; ".join(problems))
