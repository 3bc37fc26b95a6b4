"""Uploading an artifact."""

from __future__ import annotations

from pathlib import Path

from eagle_slim.vocab_tools.hub_errors import plain

from ..errors import SourceError
from .client import api, ask
from .snapshot import check_repository_id


def check_push(repo_id: str) -> None:
    """Make sure, without a trace on the Hub, that the token may write to a repository of this name.

    Raises:
        SourceError: not a repository id, no token, a token that may only read, or a name of somebody else.
    """
    check_repository_id(repo_id)
    who = ask(lambda: api().whoami(), repo_id, purpose="write")
    owners = [who["name"], *(org["name"] for org in who.get("orgs") or ())]
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    owner = repo_id.partition("/")[0] if "/" in repo_id else who["name"]
    if owner not in owners or role == "read":
        reason = "its token may only read" if role == "read" else f"it writes to {', '.join(owners)}"
        raise SourceError(
            f"{repo_id}: may not be written with this account: {reason}.\n"
            "Log in with another token (`hf auth login`, or HF_TOKEN), or choose another name."
        )


def push_folder(folder: Path | str, repo_id: str, private: bool | None = None) -> str:
    """Upload every file of a folder to a model repository, made if it does not exist, and return its address.

    Args:
        folder: what to upload.
        repo_id: `name/repository`.
        private: visibility of a new repository; the account's default if None.

    Raises:
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    created = ask(lambda: api().create_repo(repo_id, private=private, exist_ok=True), repo_id, purpose="write")

    def upload() -> None:
        try:
            api().upload_folder(
                repo_id=created.repo_id, folder_path=str(folder), commit_message="Upload slim draft head"
            )
        except RuntimeError as error:
            # The library's wrapper around whatever stopped the upload of one large file.
            raise SourceError(
                f"{repo_id}: the upload failed: {plain(error, 160)} ({plain(error.__cause__)}).\n"
                "Nothing was committed: run the same command again.",
                repo_id=repo_id,
            ) from error

    ask(upload, repo_id, purpose="write")
    return str(created)
