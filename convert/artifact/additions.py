"""Files added to an artifact that exists: the whole folder is replaced in one step, other files as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..atomic import atomic_directory
from ..manifest import MANIFEST_NAME
from .artifact import Artifact

Entries = dict[str, dict[str, Any]]
"""Entries of the manifest for files, by file name."""


def add_files(artifact: Artifact, names: Collection[str], write: Callable[[Path], Entries]) -> Entries:
    """Add files to an artifact, or replace them; returns what `write` returned.

    `write` is given the new folder, without those of these names, and returns the entries for the manifest.
    """
    manifest = artifact.manifest
    with atomic_directory(artifact.folder, force=True, marker=MANIFEST_NAME) as new:
        replaced = {MANIFEST_NAME, *names}
        shutil.copytree(
            artifact.folder,
            new,
            symlinks=True,
            ignore=lambda place, found: replaced & set(found) if Path(place) == artifact.folder else set(),
            copy_function=_link,
            dirs_exist_ok=True,
        )
        written = write(new)
        manifest = replace(manifest, files=dict(sorted({**manifest.files, **written}.items())))
        (new / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return written


def _link(source: str, place: str) -> None:
    """The same file under a second name, or a copy on disks that have none."""
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, place, follow_symlinks=False)
