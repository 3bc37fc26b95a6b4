"""Folders appear whole or not at all: written as a hidden sibling, brought to the disk, then renamed into place.

The sibling of `NAME` is `.NAME.eagle-slim-new`, locked with flock(2) by the run that writes it; the kernel drops the
lock when that run dies, and the next run on the name takes the folder over. What is replaced is renamed to
`.NAME.eagle-slim-old` first. A run killed between the two renames leaves nothing at the name; the next one puts the old
folder back before it begins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_slim.vocab_tools.files import expand_home

from .errors import OutputError, OutputExistsError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


@contextmanager
def atomic_directory(out: Path | str, force: bool = False, marker: str | None = None) -> Iterator[Path]:
    """Give an empty folder to write into; on success it becomes `out`, after an error nothing of it remains.

    Args:
        out: where the folder shall be. A symbolic link is followed. Missing parents are made.
        force: replace what is at `out`.
        marker: name of a file that a folder must hold to be replaced, unless it is empty; so that `force` on a wrong
            name cannot delete what this program did not write.

    Yields:
        A new sibling of `out`, on the same file system.

    Raises:
        OutputExistsError: as `check_output`.
        OutputError: the disk refuses, or another run is writing `out`.
    """
    check_output(out, force, marker)
    out = _real(out)
    new, old = (out.with_name(f".{out.name}.eagle-slim-{state}") for state in ("new", "old"))
    with _explained(out, new):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(new, out)
        try:
            if old.exists() and not os.path.lexists(out):
                os.rename(old, out)
            shutil.rmtree(old, ignore_errors=True)
            check_output(out, force, marker)
            yield new
            _sync_tree(new)
            # Somebody may have written it in the meantime.
            check_output(out, force, marker)
            if os.path.lexists(out):
                os.rename(out, old)
            os.rename(new, out)
            _sync(out.parent)
        except BaseException:
            if old.exists() and not os.path.lexists(out):
                os.rename(old, out)
            shutil.rmtree(new, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    shutil.rmtree(old, ignore_errors=True)


def check_output(out: Path | str, force: bool = False, marker: str | None = None) -> None:
    """Raise OutputExistsError unless `atomic_directory` with these arguments may write `out`; touches nothing.

    For a command that wants to refuse before it downloads or computes anything. OutputError where no folder can be made
    there: below a file, or where writing is not permitted.
    """
    out = _real(out)
    place = _nearest(out.parent)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        problem = f"cannot be written: {place} is not a folder that you may write to"
        raise OutputError.at(out, f"{problem}.\nWrite to another place with --out.")
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise OutputExistsError.at(out, "exists already.\nGive --force to replace it, or another name.")
    if not out.is_dir() or (marker is not None and not (out / marker).is_file()):
        found = f"it holds files but no {marker}" if out.is_dir() else "it is a file"
        advice = "Choose another name, or remove it yourself."
        raise OutputExistsError.at(out, f"not replaced: {found}, so this program did not write it.\n{advice}")


def _real(path: Path | str) -> Path:
    return Path(os.path.realpath(expand_home(path)))


def _nearest(place: Path) -> Path:
    """Return the path itself, or the nearest of its parents that exists."""
    return next(path for path in (place, *place.parents) if path.exists())


def _locked(new: Path, out: Path) -> int:
    """Make an empty folder and return a descriptor that holds its lock; OutputError where another run has it."""
    new.mkdir(exist_ok=True)
    lock = os.open(new, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        problem = "another run is writing it.\nWait for that one, or write to another place with --out."
        raise OutputError.at(out, problem) from error
    for left in new.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; there the rename itself is what they promise.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _explained(out: Path, new: Path) -> Iterator[None]:
    """Turn the errors of the output's disk into OutputError; errors about other files pass as they are."""
    try:
        yield
    except OSError as error:
        paths = [Path(name) for name in (error.filename, error.filename2) if isinstance(name, str)]
        is_ours = any(path in (out, out.parent) or path.is_relative_to(new) for path in paths)
        if not is_ours and error.errno not in _DISK_ERRORS:
            raise
        problem = f"cannot be written: {error.strerror} ({error.filename or out})"
        raise OutputError.at(out, f"{problem}.\nWrite to another place with --out.") from error
