"""Upload an artifact to the Hub: audited first, its own files alone."""

from __future__ import annotations

from pathlib import Path

from .artifact.format import CARD_NAME
from .artifact.manifest import MANIFEST_NAME, Manifest
from .errors import ArtifactError
from .hub.push import upload_files
from .verify.verify import verify_artifact


def files_to_upload(folder: Path | str) -> list[str]:
    """Audit an artifact as `eagle-verify` does, offline, and return the names of its own files, sorted.

    Raises:
        ArtifactError: no artifact, the audit fails, or its card is a link.
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
    if (folder / CARD_NAME).is_symlink():
        # It has no checksum: as a link it would carry any file of this machine along.
        raise ArtifactError.at(folder / CARD_NAME, "not uploaded: it is a link.\nPut the file itself there.")
    return sorted(name for name in own if (folder / name).exists())


def push_folder(folder: Path | str, repo_id: str, private: bool | None = None) -> str:
    """Upload an artifact to a model repository, made if it does not exist, and return its address.

    Args:
        folder: the artifact. Files that neither its manifest nor its card accounts for stay behind.
        repo_id: `name/repository`.
        private: visibility of a new repository; the account's default if None.

    Raises:
        ArtifactError: as `files_to_upload`; the Hub was not asked.
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    return upload_files(Path(folder), files_to_upload(folder), repo_id, private)
