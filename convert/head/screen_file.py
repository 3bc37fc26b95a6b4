"""The file of a screen, beside a head's weights: how it is named and laid out, and which head it belongs to.

A safetensors file with `screen.rows` [rows, rank] in the target's dtype, `screen.down` float32 [rank, hidden] and
`screen.project` float32 [hidden, rank]; `drafter.screen` of the runtime says what they are, FORMAT.md what its metadata
are. Its name ends so that no engine reads it, as that of `kept_rows.KEPT_ROWS_NAME` does: vLLM and SGLang load every
`*.safetensors` of a folder and refuse tensors that they do not know.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ArtifactError, MismatchError
from ..hub.snapshot import fetch
from ..rows.safetensors_file import SafetensorsFile
from .draft_head import DraftHead

SCREEN_NAME = "screen.eagle_slim"
SCREEN_FORMAT = "eagle-slim-screen-1"
ROWS, DOWN, PROJECT = SCREEN_TENSORS = ("screen.rows", "screen.down", "screen.project")
_NUMBERS = ("rank", "groups", "per_group", "draft_vocab_size")
_REMEDY = "Make the screen again for this head, with eagle-screen."


def has_screen(head: DraftHead) -> bool:
    """Whether a head's manifest records a screen."""
    return head.manifest is not None and SCREEN_NAME in head.manifest.files


def head_digest(head: DraftHead, ids: NDArray[np.int64] | None = None) -> str:
    """SHA-256, as hex, of what a screen is made from: the layer whose states it is fitted to, and which ids it screens.

    Of the bytes of every `mlp.down_proj.weight`, by name, and then the target ids of the LM-head rows as little-endian
    int64: ``ids``, or the head's own. Conversion leaves the former as they are, so that heads of one source and one
    vocabulary share a screen.
    """
    digest = hashlib.sha256()
    for name in head.tensors.names:
        if name.endswith("mlp.down_proj.weight"):
            digest.update(bytes.fromhex(head.tensors.source.sha256(head.tensors.stored[name])))
    ids = head.draft_ids_to_target if ids is None else ids
    digest.update((np.arange(head.draft_vocab) if ids is None else ids).astype("<i8").tobytes())
    return digest.hexdigest()


def open_screen_file(folder: Path, head: DraftHead, offline: bool = False) -> SafetensorsFile:
    """Open the screen in a folder and hold it against a head; its numbers are then integers of at least 1.

    Of an artifact on the Hub the file is fetched now, unless ``offline``.

    Raises:
        ArtifactError: another format, or tensors that do not fit each other.
        MismatchError: made for a head of another size, or for another head.
        CheckpointError: missing, or not a safetensors file.
    """
    source = head.source
    if source is not None and source.repo_id is not None and folder == source.folder:
        fetch(source.snapshot, [f"{source.subfolder}/{SCREEN_NAME}".lstrip("/")], offline)
    file = SafetensorsFile(folder / SCREEN_NAME)
    found = file.header.metadata
    if found.get("format") != SCREEN_FORMAT:
        problem = f"format is {found.get('format')!r}, this eagle-slim reads {SCREEN_FORMAT!r}.\n{_REMEDY}"
        raise ArtifactError.at(file.where, problem, key="format", found=found.get("format"))
    for name in _NUMBERS:
        if not found.get(name, "").isascii() or not found.get(name, "").isdecimal() or int(found[name]) < 1:
            problem = f"{name} is {found.get(name)!r}, expected a number of at least 1.\n{_REMEDY}"
            raise ArtifactError.at(file.where, problem, key=name, found=found.get(name))
    rank, rows = int(found["rank"]), int(found["draft_vocab_size"])
    if rows != head.draft_vocab:
        problem = f"screens {rows:,} rows, and {head.location} has {head.draft_vocab:,}.\n{_REMEDY}"
        raise MismatchError.at(file.where, problem, key="draft_vocab_size", expected=head.draft_vocab, found=rows)
    shapes = dict(zip(SCREEN_TENSORS, ((rows, rank), (rank, head.hidden_size), (head.hidden_size, rank)), strict=True))
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None or tensor.shape != shape or (name != ROWS and tensor.dtype != "F32"):
            stored = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            wanted = f"{'' if name == ROWS else 'F32 '}{list(shape)}"
            problem = f"{name}: expected {wanted}, found {stored}.\n{_REMEDY}"
            raise ArtifactError.at(file.where, problem, tensor=name, expected=shape, found=stored)
    if (digest := head_digest(head)) != found.get("head_sha256"):
        problem = f"was made for another head than {head.location}.\n{_REMEDY}"
        raise MismatchError.at(file.where, problem, key="head_sha256", expected=digest, found=found.get("head_sha256"))
    return file
