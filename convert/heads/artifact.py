"""`Artifact`: a folder that eagle-convert wrote (FORMAT.md), loaded and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..artifact.files import CONFIG_NAME, WEIGHTS_NAME
from ..artifact.manifest import Manifest
from ..errors import ArtifactError
from ..sources.source import ResolvedSource, open_head_source
from .draft_head import DraftHead
from .open import open_head


@dataclass(frozen=True)
class Artifact:
    """A converted head, loaded and checked; its tensors are read when asked for."""

    folder: Path
    head: DraftHead
    manifest: Manifest

    @property
    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer that the vocabulary was chosen for, or None where none was at hand."""
        found = (self.manifest.tokenizer or {}).get("hash")
        return found if isinstance(found, str) else None

    @classmethod
    def load(cls, folder: str | Path | ResolvedSource) -> Artifact:
        """Open an artifact and check that manifest, configuration, map and weights fit each other.

        Reads no weights; `verify_artifact` compares every byte. Raises ArtifactError where the folder is no artifact,
        or its parts disagree; CheckpointError, MismatchError and UnsupportedHeadError as `open_head`.
        """
        source = open_head_source(Path(folder)) if isinstance(folder, str | Path) else folder
        folder = source.folder
        manifest = source.manifest or Manifest.load(folder)
        # The side files are for engines and readers; a snapshot of the Hub may lack them.
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            path, expected = folder / name, manifest.files.get(name, {}).get("size_bytes")
            size = path.stat().st_size if path.is_file() else "no file"
            if size != expected:
                advice = "Fetch the artifact again, or convert the head again."
                raise ArtifactError.at(path, f"expected {expected} bytes, found {size}.\n{advice}")
        head = open_head(source)
        if (problem := _disagreement(head, manifest)) is not None:
            raise ArtifactError.at(folder, f"{problem}.\nConvert the head again, or run eagle-verify to see all of it.")
        return cls(folder, head, manifest)


def _disagreement(head: DraftHead, manifest: Manifest) -> str | None:
    ranked = manifest.rank_order_ids
    if head.kind != manifest.kind:
        return f"the manifest says {manifest.kind}, the tensors are {head.kind}"
    if head.target_vocab != manifest.target_vocab:
        return f"vocab_size is {head.target_vocab}, the manifest says {manifest.target_vocab}"
    if ranked is not None and len(np.unique(ranked)) != len(ranked):
        return "rank_order_ids holds an id twice"
    if head.kind == "eagle":
        return None
    if head.draft_vocab != manifest.draft_vocab:
        return f"lm_head.weight has {head.draft_vocab} rows, the manifest says {manifest.draft_vocab}"
    ids = head.draft_ids_to_target
    if (ids is None) != (ranked is None):
        return "there is a map but no ranks, or ranks but no map"
    if ids is not None and ranked is not None and not np.array_equal(ids, np.sort(ranked)):
        return "d2t and rank_order_ids name different ids"
    return None
