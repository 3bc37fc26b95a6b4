"""Folders appear whole or not at all: written aside, brought to the disk, then renamed into place.

At any moment of a `kill -9` or a power cut the old result or the new one is at its name, never a part of one. What a
killed run leaves behind is a hidden sibling, `.NAME.<8 hex digits>.eagle-slim-tmp` (a half-written or a replaced
result) or `.NAME.<8 hex digits>.eagle-slim-old` (see below). Each is locked with flock(2) by the process that works on
it, and the kernel drops the lock when that process dies; so the next run on the same name takes every lock that it can
get, and removes what each protects.

A folder is replaced by exchanging both names in one step (renameat2 with RENAME_EXCHANGE). Where the kernel or the file
system cannot, the old folder is renamed aside, then the new one into place; a process killed between the two leaves no
folder at the name, and the next run on that name puts the old one back before it begins.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_slim.vocab_tools.files import expand_home

from .errors import OutputError, OutputExistsError

_TEMPORARY = ".eagle-slim-tmp"
_REPLACED = ".eagle-slim-old"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
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
    """
    out = _real(out)
    with _explained(out):
        clean_leftovers(out)
        check_output(out, force, marker)
        parent_existed = _nearest(out.parent)
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary, lock = _locked_folder(out)
    try:
        with _explained(out, temporary):
            yield temporary
            _sync_tree(temporary)
            _put_in_place(temporary, out, force, marker)
            _sync_up(out.parent, parent_existed)
    finally:
        # After an exchange this is the old folder, otherwise what is left after an error.
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def check_output(out: Path | str, force: bool = False, marker: str | None = None) -> None:
    """Raise OutputExistsError unless `atomic_directory` with these arguments may write `out`; touches nothing.

    For a command that wants to refuse before it downloads or computes anything. OutputError where no folder can be made
    there: below a file, or where writing is not permitted.
    """
    out = _real(out)
    place = _nearest(out.parent)
    if not place.is_dir():
        raise OutputError.at(
            out, f"cannot be written: {place} is a file.\nWrite to another place with --out.", errno=errno.ENOTDIR
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise _refusal(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place)), out)
    if not os.path.lexists(out):
        return
    is_empty = out.is_dir() and not any(out.iterdir())
    if not force and not is_empty:
        raise _exists(out)
    if not out.is_dir():
        raise OutputExistsError.at(
            out, "is a file; a folder is to be written here.\nChoose another name.", found="file"
        )
    if marker is not None and not (out / marker).is_file() and not is_empty:
        raise OutputExistsError.at(
            out,
            f"not replaced: it holds files but no {marker}, so this program did not write it.\n"
            "Choose another name, or remove the folder yourself.",
            marker=marker,
        )


def require_space(folder: Path | str, size_bytes: int) -> None:
    """Raise OutputError unless the disk of `folder` (or of its nearest parent that exists) has `size_bytes` free."""
    if (free := free_bytes(folder)) < size_bytes:
        raise OutputError.at(
            folder,
            f"the disk is full: {size_bytes:,} bytes are needed, {free:,} are free.\n"
            "Free some space, or write to another disk.",
            needed=size_bytes,
            free=free,
        )


def free_bytes(folder: Path | str) -> int:
    """Bytes that are free on the disk of `folder`, or of its nearest parent that exists."""
    return shutil.disk_usage(_nearest(_real(folder))).free


def clean_leftovers(out: Path | str) -> None:
    """Remove what killed runs left beside `out`; put back the old folder where a kill fell between two renames.

    What a living process holds, and what has other names, stays. Errors of removing are ignored: a leftover is only
    untidy.
    """
    out = _real(out)
    pattern = re.compile(
        re.escape(f".{out.name}.") + r"[0-9a-f]{8}(" + f"{_TEMPORARY}|{_REPLACED}".replace(".", r"\.") + ")"
    )
    try:
        siblings = [name for name in os.listdir(out.parent) if pattern.fullmatch(name)]
    except OSError:
        return
    for name in siblings:
        leftover = out.parent / name
        if (lock := _try_lock(leftover)) is None:
            continue
        try:
            if name.endswith(_REPLACED) and not os.path.lexists(out):
                os.rename(leftover, out)
            else:
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(lock)


def _real(path: Path | str) -> Path:
    real = Path(os.path.realpath(expand_home(path)))
    if not real.name:
        raise OutputExistsError.at(path, "the root folder cannot be replaced.\nChoose another name.")
    return real


def _sibling(out: Path, suffix: str) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}{suffix}")


def _locked_folder(out: Path) -> tuple[Path, int]:
    while True:
        temporary = _sibling(out, _TEMPORARY)
        temporary.mkdir()
        lock = _try_lock(temporary)
        # Another run's cleaning may have come between the two lines above; then the folder is gone or going.
        if lock is not None:
            return temporary, lock


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a file or folder, or None if another process has it or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same(path, fd):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _same(path: Path, fd: int) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _put_in_place(temporary: Path, out: Path, force: bool, marker: str | None) -> None:
    if not os.path.lexists(out):
        _rename_new(temporary, out)
        return
    # It was absent or replaceable at the beginning; somebody may have written it in the meantime.
    check_output(out, force, marker)
    if _exchange(temporary, out):
        return
    replaced = _sibling(out, _REPLACED)
    lock = _try_lock(out)
    try:
        os.rename(out, replaced)
        os.rename(temporary, out)
    except BaseException:
        if not os.path.lexists(out) and os.path.lexists(replaced):
            os.rename(replaced, out)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the kernel, the C library or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _rename_new(temporary: Path, out: Path) -> None:
    """Rename to a name that must be free; a race with another writer ends in an error, not in a lost result."""
    try:
        os.rename(temporary, out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _exists(out) from error
        raise


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                _sync_path(path)
        _sync_path(root)


def _sync_up(folder: Path, last: Path) -> None:
    """Sync `folder` and its parents up to `last` to the disk, new folders included."""
    while True:
        _sync_path(str(folder))
        if folder == last or folder == folder.parent:
            return
        folder = folder.parent


def _sync_path(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no fsync for folders; there the rename itself is what they promise.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _exists(out: Path) -> OutputExistsError:
    return OutputExistsError.at(out, "exists already.\nGive --force to replace it, or another name.")


@contextmanager
def _explained(out: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn the errors of a disk into OutputError; errors about other files pass as they are."""
    try:
        yield
    except OSError as error:
        ours = temporary is None or any(
            str(name).startswith(str(temporary)) for name in (error.filename, error.filename2) if name is not None
        )
        if not ours and error.errno not in _DISK_ERRORS:
            raise
        raise _refusal(error, out) from error


def _nearest(place: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    while not place.exists():
        place = place.parent
    return place


def _refusal(error: OSError, out: Path) -> OutputError:
    problem = f"cannot be written: {error.strerror} ({error.filename or out}).\nWrite to another place with --out."
    return OutputError.at(out, problem, errno=error.errno)
