"""Uploading files to a repository of the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_slim.vocab_tools.hub import LIBRARY_NAME, explained, trouble_of

from ..errors import SourceError


def check_push(repo_id: str) -> None:
    """Check write access to a repository of this name without creating anything.

    Raises:
        SourceError: not a repository id, no token, a token that may only read, or a name of somebody else.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, not in __all__

    with explained(repo_id, purpose="write"):
        validate_repo_id(repo_id)
        who = HfApi(library_name=LIBRARY_NAME).whoami()
    owners = [who["name"], *(org["name"] for org in who.get("orgs") or ())]
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    owner = repo_id.partition("/")[0] if "/" in repo_id else who["name"]
    if owner not in owners or role == "read":
        reason = "its token may only read" if role == "read" else f"it writes to {', '.join(owners)}"
        raise SourceError(
            f"{repo_id}: may not be written with this account: {reason}.\n"
            "Log in with another token (`hf auth login`, or HF_TOKEN), or choose another name."
        )


def upload_files(folder: Path, names: Sequence[str], repo_id: str, private: bool | None = None) -> str:
    """Upload files of a folder to a model repository, made if it does not exist, and return its address.

    A new repository is as visible as `private` says, or as the account's default.

    Raises:
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name=LIBRARY_NAME)
    with explained(repo_id, purpose="write"):
        created = api.create_repo(repo_id, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, str(folder / name)) for name in names]
        try:
            api.create_commit(created.repo_id, operations, commit_message="Upload slim draft head")
        # The library's wrapper around whatever stopped the upload of one large file.
        except RuntimeError as error:
            raise trouble_of(error, repo_id, purpose="write") from error
    return str(created)
