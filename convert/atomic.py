"""Folders that appear whole or not at all: written as a hidden sibling, synced, then renamed into place.

The sibling of `NAME` is `.NAME.eagle-slim-new`, locked with flock(2) by the run that writes it; the kernel drops the
lock when that run dies, and the next run on the name takes the folder over. What is replaced is renamed to
`.NAME.eagle-slim-old` first. A run killed between the two renames leaves nothing at the name; the next one puts the old
folder back before it begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from eagle_slim.vocab_tools.files import expand_home, sync

from .errors import OutputError, OutputExistsError

# Files that Finder and Explorer put into any folder that they show, or copy to another file system.
_LEFT_BY_DESKTOPS = re.compile(r"\.DS_Store|\._.*|Thumbs\.db|desktop\.ini")


@contextlib.contextmanager
def atomic_directory(
    out: Path | str, force: bool = False, marker: str | None = None, names: str = ".*", wait: bool = False
) -> Iterator[Path]:
    """Give an empty folder to write into; on success it becomes `out`, after an error nothing of it remains.

    Args:
        out: where the folder shall be. A symbolic link is followed. Missing parents are made.
        force: replace what is at `out`; not what this program did not write, told by the next two.
        marker: name of a file that a folder must hold to be replaced, unless it is empty.
        names: pattern of the names that such a folder may hold.
        wait: for another run that is writing `out`, instead of OutputError; what it wrote is then there already.

    Raises OutputExistsError as `check_output`; OutputError where the disk refuses (every OSError of the body counts as
    such), or another run is writing `out`.
    """
    check_output(out, force, marker, names)
    out = _real(out)
    new, old = _aside(out, "new"), _aside(out, "old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(new, out, wait)
        try:
            _put_back(old, out)
            shutil.rmtree(old, ignore_errors=True)
            check_output(out, force, marker, names)
            yield new
            for path in (*new.rglob("*"), new):
                sync(path)
            # Somebody may have written it in the meantime.
            check_output(out, force, marker, names)
            if os.path.lexists(out):
                os.rename(out, old)
            os.rename(new, out)
            sync(out.parent)
        except BaseException:
            _put_back(old, out)
            shutil.rmtree(new, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        raise _unwritable(out, str(error.strerror)) from error
    shutil.rmtree(old, ignore_errors=True)


def check_output(out: Path | str, force: bool = False, marker: str | None = None, names: str = ".*") -> None:
    """Raise OutputExistsError unless `atomic_directory` may replace `out`, OutputError where nothing can be written."""
    out = _real(out)
    if not out.name:
        raise _unwritable(out, "it is the root of all folders")
    parent = _parent_of(out)
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise _unwritable(out, f"{parent} is not a folder that you may write to")
    try:
        os.lstat(_aside(out, "new"))
    except OSError as error:
        # Such as a name that is too long.
        if not isinstance(error, FileNotFoundError):
            raise _unwritable(out, str(error.strerror)) from error
    found = [path.name for path in out.iterdir() if not _LEFT_BY_DESKTOPS.fullmatch(path.name)] if out.is_dir() else []
    if not os.path.lexists(out) or (out.is_dir() and not found):
        return
    if not force:
        raise OutputExistsError.at(out, "exists already.\nGive --force to replace it, or another name.")
    problem = None if out.is_dir() else "it is a file"
    if problem is None and marker is not None and not (out / marker).is_file():
        problem = f"it holds files but no {marker}"
    if problem is None and (strange := [name for name in found if not re.fullmatch(names, name)]):
        problem = f"it holds {', '.join(sorted(strange)[:4])}"
    if problem is not None:
        advice = "Choose another name, or remove it yourself."
        raise OutputExistsError.at(out, f"not replaced: {problem}; only what this program wrote is.\n{advice}")


def check_room(out: Path | str, size_bytes: int) -> None:
    """Raise OutputError where the disk of `out` has less room than `size_bytes`."""
    disk = shutil.disk_usage(_parent_of(_real(out)))
    # Some network file systems tell neither.
    if disk.total and disk.free < size_bytes:
        raise _unwritable(_real(out), f"{size_bytes:,} bytes are needed, and the disk has {disk.free:,}")


def _unwritable(out: Path, problem: str) -> OutputError:
    return OutputError.at(out, f"cannot be written: {problem}.\nWrite to another place with --out.")


def _parent_of(out: Path) -> Path:
    return next(path for path in out.parents if os.path.exists(path))


def _aside(out: Path, state: str) -> Path:
    return out.with_name(f".{out.name}.eagle-slim-{state}")


def _real(path: Path | str) -> Path:
    return Path(os.path.realpath(expand_home(path)))


def _put_back(old: Path, out: Path) -> None:
    """Undo the first of the two renames, where the second did not follow."""
    if old.exists() and not os.path.lexists(out):
        os.rename(old, out)


def _locked(new: Path, out: Path, wait: bool) -> int:
    """Make an empty folder and return a descriptor that holds its lock; OutputError where another run has it."""
    lock = None
    while lock is None:
        new.mkdir(exist_ok=True)
        # Another run may rename or remove this folder at any time until it is locked.
        with contextlib.suppress(FileNotFoundError):
            opened = os.open(new, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(opened), new.stat()):
                    lock = opened
            except BlockingIOError as error:
                problem = "another run is writing it.\nWait for that one, or write to another place with --out."
                raise OutputError.at(out, problem) from error
            finally:
                if lock is None:
                    os.close(opened)
    for left in new.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock
