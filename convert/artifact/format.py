"""The artifact: a folder with a slim head, its manifest and its side files (FORMAT.md), and how it is loaded.

config.json  model.safetensors  eagle_slim.json  freq_N.pt  README.md
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ArtifactError
from ..heads.open import DraftHead, open_head
from ..sources.source import ResolvedSource, open_head_source
from .manifest import CONFIG_NAME, WEIGHTS_NAME, Manifest

CARD_NAME = "README.md"
OWN_NAMES = r"(config|eagle_slim)\.json|model\.safetensors|README\.md|freq_\d+\.pt|model-\w+\.gguf"
"""Pattern of the names that a conversion writes."""


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


def freq_name(draft_vocab: int) -> str:
    """Name the token map with `draft_vocab` ids, as FR-Spec does."""
    return f"freq_{draft_vocab}.pt"


def freq_bytes(rank_order_ids: NDArray[np.int64]) -> bytes:
    """Write a token map as SGLang and FR-Spec read it with `torch.load`: a list[int] in rank order.

    The archive of `torch.save`, whose import takes longer than many a conversion, with a fixed name and time.
    Format: `torch/serialization.py`, `_save`; `caffe2/serialize/inline_container.h`.
    """
    records = {
        "data.pkl": pickle.dumps([int(token_id) for token_id in rank_order_ids], protocol=2),
        "byteorder": b"little",
        "version": b"3\n",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return buffer.getvalue()
