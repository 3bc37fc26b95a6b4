"""The parts of an artifact that its checks read, each once, and how a check ends."""

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
    """The check found something to know, which is no fault of the artifact; the message says what."""


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
    """An artifact folder, read part by part; each part raises an EagleSlimError once, and `SkipCheck` from then on.

    `found` has what was read, by name.
    """

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)

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
    def ids(self) -> NDArray[np.int64]:
        """Target id of each row, int64 [draft_vocab]: of int64 offsets, unique, ascending and in range."""
        manifest, values = self.with_map(), self.tensor("d2t")
        refuse(str(values.dtype) != "int64" or values.ndim != 1, f"expected int64 [draft_vocab], found {values.dtype}")
        ids = ids_from_d2t(values, form="offset", target_vocab=manifest.target_vocab)
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if len(falls):
            raise ArtifactError(f"ids do not ascend: row {falls[0] + 1} is below the row before it")
        return ids

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors of the weights file."""
        return Checkpoint.of(self.weights)

    def head(self, location: str) -> DraftHead:
        """Open the artifact as any head is opened; `location` names it in messages."""
        return head_from_checkpoint(self.checkpoint, self.config, location)

    def digest(self, name: str) -> str:
        """SHA-256 of a tensor of the weights file, read once for all checks."""
        if name not in self._digests:
            self._digests[name] = self.checkpoint.sha256(name)
        return self._digests[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ArtifactError where it is missing."""
        refuse(name not in self.weights.tensors, f"{name} is missing")
        return self.weights.tensors[name].shape

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Read a tensor of whole numbers or booleans."""
        shape, dtype = self.shape(name), self.weights.tensors[name].dtype
        return self.checkpoint.raw(name).reshape(-1).view(LONG_NAMES[dtype]).reshape(shape)

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
    if problems:
        raise ArtifactError("; ".join(problems))


def ended(check: Callable[[], str]) -> tuple[Status, str]:
    """Run a check: how it ended ("ok", "warning", "failed" or "skipped"), and what it found."""
    try:
        return "ok", check()
    except SkipCheck as reason:
        return "skipped", str(reason)
    except Doubt as doubt:
        return "warning", str(doubt)
    except EagleSlimError as error:
        return "failed", str(error)
