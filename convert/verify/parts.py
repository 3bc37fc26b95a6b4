"""The parts of an artifact that its checks read, each once, and the ways in which a check ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from eagle_slim.vocab_tools.errors import EagleSlimError
from eagle_slim.vocab_tools.token_maps import ids_from_d2t
from numpy.typing import NDArray

from ..artifact.manifest import CONFIG_NAME, WEIGHTS_NAME, Manifest
from ..errors import ArtifactError
from ..files import read_object
from ..heads.draft_head import DraftHead
from ..heads.open import head_from_checkpoint
from ..rows.checkpoint import Checkpoint
from ..rows.dtypes import LONG_NAMES
from ..rows.safetensors_file import SafetensorsFile

_T = TypeVar("_T")
Status = Literal["ok", "warning", "failed", "skipped"]


class SkipCheck(Exception):  # noqa: N818  (not an error: the check cannot be made)
    """The check cannot be made; the message says why."""


class Doubt(Exception):  # noqa: N818  (not an error: the artifact is sound)
    """The check found a loss or a condition, and no fault of the artifact; the message names it."""


class _Part(Generic[_T]):
    """A part read on first use: its own check fails where it cannot be read, and every later one is skipped."""

    def __init__(self, read: Callable[[Any], _T]) -> None:
        self._read, self._name = read, read.__name__

    def __get__(self, parts: Parts, owner: type[Parts]) -> _T:
        if self._name not in parts.found:
            parts.found[self._name] = SkipCheck(f"{self._name} could not be read")
            parts.found[self._name] = self._read(parts)
        part: _T = parts.found[self._name]
        if isinstance(part, SkipCheck):
            raise part
        return part


@dataclass
class Parts:
    """An artifact folder, read part by part: a bad part raises an EagleSlimError once, and `SkipCheck` from then on.

    `found` has the parts read so far, by name.
    """

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)

    @_Part
    def manifest(self) -> Manifest:
        """The manifest."""
        return Manifest.load(self.folder)

    @_Part
    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_object(self.folder / CONFIG_NAME, ArtifactError, str(self.folder))

    @_Part
    def weights(self) -> SafetensorsFile:
        """The header of the weights file."""
        return SafetensorsFile(self.folder / WEIGHTS_NAME)

    @_Part
    def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor of the weights file."""
        return {name: self.checkpoint.sha256(name) for name in self.weights.tensors}

    @_Part
    def ids(self) -> NDArray[np.int64]:
        """Target id of each row, int64 [draft_vocab]: of int64 offsets, unique, ascending and in range."""
        vocab = self.with_map().target_vocab
        ids = ids_from_d2t(self.vector("d2t", "int64"), form="offset", target_vocab=vocab)
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if len(falls):
            raise ArtifactError(f"ids do not ascend: row {falls[0] + 1} is below the row before it")
        return ids

    @_Part
    def head(self) -> DraftHead:
        """The artifact, opened as any head is."""
        return head_from_checkpoint(self.checkpoint, self.config, str(self.folder))

    @property
    def target_layers(self) -> int | None:
        """Decoder layers of the target, where the manifest records them."""
        layers = self.manifest.target.get("num_hidden_layers")
        return layers if isinstance(layers, int) else None

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors of the weights file."""
        return Checkpoint.of(self.weights)

    def vector(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        """Read a vector of "int64" or "bool"; ArtifactError for any other tensor, CheckpointError for none."""
        info = self.checkpoint.info(name)
        found = LONG_NAMES.get(info.dtype, info.dtype)
        refuse(
            found != dtype or len(info.shape) != 1, f"expected a vector of {dtype}, found {found} {list(info.shape)}"
        )
        return self.checkpoint.raw(name).reshape(-1).view(dtype)

    def with_lm_head(self) -> Manifest:
        """Return the manifest of an artifact with an LM head, or skip the check."""
        if self.manifest.kind == "eagle":
            raise SkipCheck("EAGLE-1/2 heads have no map and no LM head of their own")
        return self.manifest

    def with_map(self) -> Manifest:
        """Return the manifest of an artifact with an LM head over a reduced vocabulary, or skip the check."""
        if self.with_lm_head().rank_order_ids is None:
            raise SkipCheck("a full vocabulary has no map")
        return self.manifest


def refuse(condition: bool, message: str) -> None:
    """Raise ArtifactError with `message` where `condition` holds."""
    if condition:
        raise ArtifactError(message)


def join(problems: Sequence[str]) -> None:
    """Raise ArtifactError with all problems, if there are any."""
    refuse(bool(problems), "; ".join(problems))


def ended(check: Callable[[], str]) -> tuple[Status, str]:
    """Run a check; return "ok", "warning", "failed" or "skipped", and its finding or the reason."""
    try:
        return "ok", check()
    except SkipCheck as reason:
        return "skipped", str(reason)
    except Doubt as doubt:
        return "warning", str(doubt)
    except EagleSlimError as error:
        return "failed", str(error)
