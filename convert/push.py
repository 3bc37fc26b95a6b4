"""Upload an artifact to the Hub: audited first, its own files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .artifact.format import CARD_NAME
from .artifact.manifest import MANIFEST_NAME, Manifest
from .errors import ArtifactError
from .hub.push import upload_files
from .rows.paths import path_inside
from .verify.verify import verify_artifact


@dataclass(frozen=True)
class Upload:
    """Files of an artifact to upload, and the other files of its folder; both sorted."""

    folder: Path
    names: tuple[str, ...]
    left: tuple[str, ...]


def plan_upload(folder: Path | str) -> Upload:
    """Audit an artifact as `eagle-verify` does, offline, and choose the files that an upload takes.

    Raises:
        ArtifactError: no artifact, or the audit fails.
        CheckpointError: a file of it is a link that leads out of the folder.
    """
    folder = Path(folder)
    own = {MANIFEST_NAME, CARD_NAME, *Manifest.load(folder).files}
    # What an engine would read by mistake here does not travel, so it spoils nothing there.
    failed = [check for check in verify_artifact(folder, offline=True).failed if check.name != "stray files"]
    if failed:
        raise ArtifactError.at(
            folder,
            f"not uploaded, as the audit fails: {failed[0].name}: {failed[0].detail}\n"
            "Convert the head again; eagle-verify shows every check.",
        )
    present = sorted(path.name for path in folder.iterdir())
    for name in own.intersection(present):
        # The card has no checksum: as a link out of the folder it would carry any file of this machine along.
        path_inside(folder, name)
    return Upload(
        folder, tuple(name for name in present if name in own), tuple(name for name in present if name not in own)
    )


def push_folder(folder: Path | str, repo_id: str, private: bool | None = None) -> str:
    """Upload an artifact to a model repository, made if it does not exist, and return its address.

    Args:
        folder: the artifact. Files that neither its manifest nor its card accounts for stay behind.
        repo_id: `name/repository`.
        private: visibility of a new repository; the account's default if None.

    Raises:
        ArtifactError: no artifact, or the audit fails; the Hub was not asked.
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    upload = plan_upload(folder)
    return upload_files(upload.folder, upload.names, repo_id, private)
