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
from contextlib import contextmanager, suppress
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
    out = _real(out)
    new, old = (out.with_name(f".{out.name}.eagle-slim-{state}") for state in ("new", "old"))
    with _explained(out):
        check_output(out, force, marker)
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(new, out)
    try:
        with _explained(out, new):
            if old.exists() and not os.path.lexists(out):
                os.rename(old, out)
            shutil.rmtree(old, ignore_errors=True)
            check_output(out, force, marker)
            yield new
            _sync_tree(new)
            _put_in_place(new, out, old, force, marker)
    except BaseException:
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
    if not place.is_dir():
        raise _refusal(NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place)), out)
    if not os.access(place, os.W_OK | os.X_OK):
        raise _refusal(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place)), out)
    if not os.path.lexists(out):
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    if not force:
        raise OutputExistsError.at(out, "exists already.\nGive --force to replace it, or another name.")
    if not out.is_dir():
        problem = "is a file; a folder is to be written here.\nChoose another name."
        raise OutputExistsError.at(out, problem)
    if marker is not None and not (out / marker).is_file():
        raise OutputExistsError.at(
            out,
            f"not replaced: it holds files but no {marker}, so this program did not write it.\n"
            "Choose another name, or remove the folder yourself.",
        )


def require_space(folder: Path | str, size_bytes: int) -> None:
    """Raise OutputError unless the disk of `folder` (or of its nearest parent that exists) has `size_bytes` free."""
    if (free := free_bytes(folder)) < size_bytes:
        raise OutputError.at(
            folder,
            f"the disk is full: {size_bytes:,} bytes are needed, {free:,} are free.\n"
            "Free some space, or write to another disk.",
        )


def free_bytes(folder: Path | str) -> int:
    """Return the bytes that are free on the disk of `folder`, or of its nearest parent that exists."""
    return shutil.disk_usage(_nearest(_real(folder))).free


def _real(path: Path | str) -> Path:
    real = Path(os.path.realpath(expand_home(path)))
    if not real.name:
        raise OutputExistsError.at(path, "the root folder cannot be replaced.\nChoose another name.")
    return real


def _nearest(place: Path) -> Path:
    """Return the path itself, or the nearest of its parents that exists."""
    while not place.exists():
        place = place.parent
    return place


def _locked(new: Path, out: Path) -> int:
    """Make an empty folder and return a descriptor that holds its lock; OutputError where another run has it."""
    while True:
        new.mkdir(exist_ok=True)
        lock = os.open(new, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            problem = "another run is writing it.\nWait for that one, or write to another place with --out."
            raise OutputError.at(out, problem) from error
        # The run that had it may just have renamed it into place.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(new), os.fstat(lock)):
                break
        os.close(lock)
    for left in new.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock


def _put_in_place(new: Path, out: Path, old: Path, force: bool, marker: str | None) -> None:
    if not os.path.lexists(out):
        os.rename(new, out)
    else:
        # Somebody may have written it in the meantime.
        check_output(out, force, marker)
        try:
            os.rename(out, old)
            os.rename(new, out)
        except BaseException:
            if not os.path.lexists(out):
                os.rename(old, out)
            raise
    _sync(out.parent)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(root, name) for name in names), Path(root)):
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
def _explained(out: Path, new: Path | None = None) -> Iterator[None]:
    """Turn the errors of a disk into OutputError; errors about other files than those in `new` pass as they are."""
    try:
        yield
    except OSError as error:
        is_ours = new is None or any(str(name).startswith(str(new)) for name in (error.filename, error.filename2))
        if not is_ours and error.errno not in _DISK_ERRORS:
            raise
        raise _refusal(error, out) from error


def _refusal(error: OSError, out: Path) -> OutputError:
    problem = f"cannot be written: {error.strerror} ({error.filename or out}).\nWrite to another place with --out."
    return OutputError.at(out, problem)
