"""Small files, written whole or not at all (to a temporary file beside them, synced, then renamed), and read."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import EagleSlimError, UsageError

_LFS_POINTER = b"version https://git-lfs"


def expand_home(path: str | Path) -> Path:
    """Return a path with `~` and `~user` replaced; an unknown user is left as it is, as in a shell."""
    return Path(os.path.expanduser(path))


def check_named(path: object) -> None:
    """Raise UsageError for an empty name: as a path it would be the current folder."""
    if path == "":
        raise UsageError("The name of a token map or counts file is empty. Name a file to read.")


def regular_file(path: str | Path, error_type: type[EagleSlimError], what: str = "file") -> Path:
    """Return the path of a file; raises `error_type` where it is missing, a folder, or a pipe or device (may block).

    So, too, for the text that Git LFS leaves in the place of a file that it has not fetched.
    """
    path = Path(path)
    try:
        state = path.stat()
        mode, start = state.st_mode, b""
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                start = file.read(len(_LFS_POINTER))
        is_pointer = start == _LFS_POINTER and state.st_size < 1024
    except (FileNotFoundError, NotADirectoryError) as error:
        raise error_type(f"{path}: no such {what}.{place_below(path)}") from error
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise error_type(f"{path}: is {found}; a regular file is needed.")
    if is_pointer:
        advice = "Run `git lfs pull` in that folder, or fetch the repository with `hf download`."
        raise error_type(f"{path}: this is a Git LFS pointer, not the {what}.\n{advice}")
    return path


def place_below(path: Path) -> str:
    """Tell where a missing configuration or tokenizer is below its folder, as in the Hub's cache; "" for nowhere."""
    found: list[Path] = []
    # Folders may come and go while they are searched, as those of /proc do.
    with suppress(OSError):
        if path.name in ("config.json", "tokenizer.json"):
            found = [one for depth in ("*", "snapshots/*") for one in sorted(path.parent.glob(f"{depth}/{path.name}"))]
    return f"\nThere is one in {found[0].parent}: name that folder." if found else ""


def refuse_existing(path: str | Path, force: bool = False) -> Path:
    """Return the output path; UsageError, before any work, where it exists (without `force`) or is not writable."""
    path = Path(path)
    if path.exists():
        if not path.is_file():
            regular_file(path, UsageError)
        elif not force:
            raise UsageError(f"{path}: exists already. Choose another name, or overwrite it with --force.")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise UsageError(f"{path}: the folder {folder} does not exist.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: the folder {folder} cannot be written. Name a file in another one.")
    return path


def write_file(path: str | Path, data: bytes) -> None:
    """Write bytes so that a reader, or a killed writer, sees the old file or the new one; follows links; OSError."""
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("xb") as file:
            file.write(data)
        sync(aside)
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # The system's error names the temporary file, or no file.
            error.filename = str(path)
        raise
    sync(path.parent)


def json_bytes(value: Any, **options: Any) -> bytes:
    """Return JSON in UTF-8; of names of files, bytes that are no UTF-8 are escaped, and read again as they were."""
    return json.dumps(value, ensure_ascii=False, **options).encode(errors="backslashreplace")


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; there the rename itself is what they promise.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_text(path: str | Path, error_type: type[EagleSlimError]) -> str:
    """Read a file of UTF-8 text; anything unreadable raises `error_type` with the file's name."""
    path = regular_file(path, error_type)
    try:
        # Editors of Windows put a mark before UTF-8.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise error_type(f"{path}: not readable as text: {error}.") from error


def read_json(path: str | Path, error_type: type[EagleSlimError]) -> Any:
    """Read a JSON file; anything unreadable raises `error_type` with the file's name."""
    try:
        return json.loads(read_text(path, error_type))
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path}: not readable as JSON: {error}.") from error


def read_object(path: str | Path, error_type: type[EagleSlimError]) -> dict[str, Any]:
    """Read a file that holds one JSON object; anything else raises `error_type` with the file's name."""
    value = read_json(path, error_type)
    if not isinstance(value, dict):
        raise error_type(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value
