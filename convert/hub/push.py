"""Uploading files to a repository of the Hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle_slim.vocab_tools.hub_errors import plain
from eagle_slim.vocab_tools.hub_session import Tries

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


def upload_files(folder: Path, names: Sequence[str], repo_id: str, private: bool | None = None) -> str:
    """Upload files of a folder to a model repository, made if it does not exist, and return its address.

    A new repository is as visible as `private` says, or as the account's default.

    Raises:
        SourceError: no token, no right to write, no connection, or not a repository id.
    """
    from huggingface_hub import CommitOperationAdd

    created = ask(lambda: api().create_repo(repo_id, private=private, exist_ok=True), repo_id, purpose="write")
    tries = Tries(repo_id)

    def upload() -> None:
        operations = [CommitOperationAdd(name, str(folder / name)) for name in names]
        try:
            with _no_bars_off_a_terminal():
                api().create_commit(created.repo_id, operations, commit_message="Upload slim draft head")
        except RuntimeError as error:
            # The library's wrapper around whatever stopped the upload of one large file, which it reads as it sends it.
            if tries.wait_after(error):
                return upload()
            raise SourceError(
                f"{repo_id}: the upload failed: {plain(error, 160)} ({plain(error.__cause__)}).\n"
                "Nothing was committed: run the same command again.",
                repo_id=repo_id,
            ) from error

    ask(upload, repo_id, purpose="write")
    return str(created)


@contextmanager
def _no_bars_off_a_terminal() -> Iterator[None]:
    """Silence the library's bars of uploads where stderr is no terminal; those of downloads check for themselves."""
    from huggingface_hub import constants

    # Public, not in __all__.
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars  # type: ignore[attr-defined]

    # Set either way, the variable is the user's choice.
    if sys.stderr.isatty() or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
