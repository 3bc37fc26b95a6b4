"""The head that an artifact was made from, where it is still at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConvertError
from ..head import names
from ..head.draft_head import DraftHead
from ..head.open import open_head
from ..manifest import Manifest
from ..rows.lm_head import rows_of_ids
from ..sources.builtin import EMBEDDED_HEAD_NAME
from ..sources.source import open_head_source


def open_original(manifest: Manifest, given: str | None = None, offline: bool = True) -> DraftHead | None:
    """Open the head that an artifact was made from, read as it was then.

    Args:
        manifest: of the artifact.
        given: folder or repository of the head; None for the built-in one, or for the recorded repository at the
            recorded revision, in the Hub's cache.
        offline: fetch nothing for `given` either.

    Returns:
        None where the head was a local folder and none is given.
    """
    where: dict[str, Any] = {key: manifest.head.get(key) for key in ("subfolder", "weights_file")}
    reading: dict[str, Any] = {
        "d2t_form": manifest.head.get("d2t_form", "auto"),
        "tap_layers": manifest.tap_layers or None,
    }
    if given is not None:
        return open_head(open_head_source(given, offline=offline, **where), **reading)
    name, revision = manifest.head.get("repo_id"), manifest.head.get("revision")
    if name is not None:
        return open_head(open_head_source(name, revision=revision, offline=True, **where), **reading)
    return open_head(None, **reading) if manifest.head.get("name") == EMBEDDED_HEAD_NAME else None


def folder_beside(artifact: Path, recorded: Mapping[str, Any]) -> Path | None:
    """The folder beside an artifact that has the name which the manifest records of a local head or target, if any."""
    name = recorded.get("name")
    if recorded.get("repo_id") is not None or not isinstance(name, str):
        return None
    found = artifact.resolve().parent / name
    return found if found.is_dir() and found != artifact.resolve() else None


def original_at_hand(head: DraftHead) -> DraftHead | None:
    """The head that an artifact was slimmed from, if it is on this machine with an LM head of more rows.

    Looked for where `open_original` looks, and, where it was a local folder, under its name beside the artifact. It is
    taken only if its rows of the artifact's ids are the artifact's rows, value for value.
    """
    manifest, ids = head.manifest, head.draft_ids_to_target
    if manifest is None or head.source is None or ids is None:
        return None
    beside = folder_beside(head.source.folder, manifest.head)
    with contextlib.suppress(ConvertError):
        found = open_original(manifest, None if beside is None else str(beside))
        if found is None or not found.has_lm_head:
            return None
        if found.draft_vocab <= head.draft_vocab or found.dtype_name != head.dtype_name:
            return None
        rows, own = found.tensors.rows(names.LM_HEAD, rows_of_ids(found, ids)), head.tensors.get(names.LM_HEAD)
        return found if rows.shape == own.shape and bool((rows == own).all()) else None
    return None
