"""Upload an artifact to the Hub: audited first, its own files alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from eagle_slim.vocab_tools.hub import LIBRARY_NAME, explained, trouble_of

from .artifact.format import CARD_NAME, OWN_NAMES
from .artifact.manifest import MANIFEST_NAME, Manifest
from .errors import ArtifactError
from .verify.rules import READ_TOO
from .verify.verify import verify_artifact


def files_to_upload(folder: Path | str, repo_id: str) -> list[str]:
    """Audit an artifact as `eagle-verify` does, offline, and return the names of its own files, sorted.

    Raises SourceError for what is no repository id; ArtifactError where the audit fails, or the card is a link.
    """
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    with explained(repo_id, purpose="write"):
        validate_repo_id(repo_id)
    folder = Path(folder)
    own = {MANIFEST_NAME, CARD_NAME, *Manifest.load(folder).files}
    # What an engine would read by mistake here does not travel, so it spoils nothing there.
    failed = [check for check in verify_artifact(folder, offline=True).failed if check.name != "stray files"]
    if failed:
        problem = f"not uploaded, as the audit fails: {failed[0].name}: {failed[0].detail}"
        raise ArtifactError.at(folder, f"{problem}\nConvert the head again; eagle-verify shows every check.")
    if (folder / CARD_NAME).is_symlink():
        # It has no checksum: as a link it would carry any file of this machine along.
        raise ArtifactError.at(folder / CARD_NAME, "not uploaded: it is a link.\nPut the file itself there.")
    return sorted(name for name in own if (folder / name).exists())


def push_folder(folder: Path | str, repo_id: str, private: bool | None = None) -> str:
    """Audit an artifact, upload its own files, return the repository's address; raises SourceError, ArtifactError."""
    return upload_files(Path(folder), files_to_upload(folder, repo_id), repo_id, private)


def upload_files(folder: Path, names: Sequence[str], repo_id: str, private: bool | None = None) -> str:
    """Upload files of a folder to the model repository `name/repository` and return its address.

    A repository that does not exist is made, as visible as `private` says, or as the account's default. Of one that
    does, what another artifact left and this one has not is deleted in the same commit: it is in the history. Raises
    SourceError without a token, the right to write, or a connection, and for what is no repository id; ArtifactError
    where the repository holds other weights, and nothing was uploaded.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(library_name=LIBRARY_NAME)
    with explained(repo_id, purpose="write"):
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        others = set(api.list_repo_files(created.repo_id)) - {*names}
        stale = {name for name in others if re.fullmatch(OWN_NAMES, name)}
        if foreign := sorted(name for name in others - stale if name.endswith(READ_TOO) and "/" not in name):
            problem = f"not uploaded: it holds {', '.join(foreign[:4])}, which an engine may read, too, or instead"
            raise ArtifactError.at(repo_id, f"{problem}.\nRemove it there, or choose another repository.")
        added = [CommitOperationAdd(name, str(folder / name)) for name in names]
        gone = [CommitOperationDelete(name) for name in sorted(stale)]
        try:
            api.create_commit(created.repo_id, [*added, *gone], commit_message="Upload slim draft head")
        # The library's wrapper around whatever stopped the upload of one large file.
        except RuntimeError as error:
            raise trouble_of(error, repo_id, purpose="write") from error
    return str(created)
