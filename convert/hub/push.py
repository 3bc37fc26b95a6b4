"""Uploading an artifact."""

from __future__ import annotations

from pathlib import Path

from ..errors import SourceError
from .client import api, ask
from .errors import plain


def push_folder(
    folder: Path | str,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload slim draft head",
) -> str:
    """Upload every file of a folder to a model repository, made if it does not exist, and return its address.

    Args:
        folder: what to upload.
        repo_id: `name/repository`.
        private: visibility of a new repository; the account's default if None.
        revision: an existing branch; the main one if None.
        commit_message: of the one commit.

    Raises:
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    created = ask(lambda: api().create_repo(repo_id, private=private, exist_ok=True), repo_id, revision, "write")

    def upload() -> None:
        try:
            api().upload_folder(
                repo_id=created.repo_id, folder_path=str(folder), revision=revision, commit_message=commit_message
            )
        except RuntimeError as error:
            # The library's wrapper around whatever stopped the upload of one large file.
            raise SourceError(
                f"{repo_id}: the upload failed: {plain(error, 160)} ({plain(error.__cause__)}).\n"
                "Nothing was committed: run the same command again.",
                repo_id=repo_id,
            ) from error

    ask(upload, repo_id, revision, "write")
    return str(created)
