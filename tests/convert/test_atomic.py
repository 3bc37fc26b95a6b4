"""Whole or not at all: after errors, interrupts and kills at any moment, the old result or the new one."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
from concurrent import futures

import pytest
from eagle_slim.convert import OutputError, OutputExistsError, atomic
from eagle_slim.convert.atomic import atomic_directory, check_output
from support.raising import raises_with


def tree(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(out, text, during=lambda: None, **options):
    with atomic_directory(out, **options) as folder:
        (folder / "a").write_text(text)
        during()
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text(text)


def test_new_folder_with_parents(tmp_path):
    out = tmp_path / "x" / "y" / "out"
    with atomic_directory(out) as folder:
        assert folder.parent == out.parent
        (folder / "a").write_text("1")
        assert not out.exists()
    assert tree(tmp_path) == {"x/y/out/a": "1"}
    (tmp_path / "plain").mkdir()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_existing_folder_is_refused_before_anything(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "into an empty folder")
    with pytest.raises(OutputExistsError, match="exists already") as caught, atomic_directory(tmp_path / "out"):
        pytest.fail("the body must not run")
    assert caught.value.exit_code == 2
    assert os.listdir(tmp_path) == ["out"]


def test_force_replaces_only_what_is_marked(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    check_output(out, force=True, marker="manifest.json")
    (out / "thesis.txt").write_text("years of work")
    with raises_with(OutputExistsError, "manifest.json"):
        write(out, "new", force=True, marker="manifest.json")
    assert tree(out) == {"thesis.txt": "years of work"}
    (out / "manifest.json").write_text("{}")
    write(out, "new", force=True, marker="manifest.json")
    assert tree(out) == {"a": "new", "sub/b": "new"}
    with raises_with(OutputExistsError, "sub"):
        check_output(out, force=True, names="a|manifest.json")
    (tmp_path / "file").touch()
    with raises_with(OutputExistsError, "file"):
        write(tmp_path / "file", "new", force=True)


def test_what_a_desktop_leaves_in_a_folder_is_nobodys_work(tmp_path):
    out = tmp_path / "out"
    for round_number in range(2):
        out.mkdir(exist_ok=True)
        for name in (".DS_Store", "._model.safetensors", "Thumbs.db", "desktop.ini"):
            (out / name).write_text("x")
        # At first there is nothing else, which is an empty folder; then an artifact, which is replaced.
        with atomic_directory(out, force=round_number == 1, marker="a", names="a") as folder:
            (folder / "a").write_text(str(round_number))
        assert tree(out) == {"a": str(round_number)}
    (out / ".git").mkdir()
    with raises_with(OutputExistsError, "it holds .git"):
        check_output(out, force=True, marker="a", names="a")


def test_a_link_is_followed(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert tree(tmp_path / "real") == {"a": "new", "sub/b": "new"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_errors_and_interrupts_leave_the_old(tmp_path, error):
    def break_off():
        raise error

    write(tmp_path / "out", "old")
    with pytest.raises(error):
        write(tmp_path / "out", "half", break_off, force=True)
    assert tree(tmp_path) == {"out/a": "old", "out/sub/b": "old"}
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("call", "number"), [("fsync", 1), ("fsync", 4), ("rename", 1), ("rename", 2)])
def test_a_disk_that_fails_at_any_step(tmp_path, monkeypatch, call, number):
    out = tmp_path / "out"
    write(out, "old")
    real, calls = getattr(os, call), itertools.count(1)

    def fail(*args):
        if next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
        real(*args)

    monkeypatch.setattr(atomic.os, call, fail)
    with raises_with(OutputError, os.strerror(errno.ENOSPC), "--out"):
        write(out, "new", force=True)
    assert tree(tmp_path) == {"out/a": "old", "out/sub/b": "old"}


def test_errors_of_the_disk_while_writing_are_ours(tmp_path):
    with pytest.raises(OutputError, match=os.strerror(errno.EFBIG)), atomic_directory(tmp_path / "out"):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_seen_beforehand(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with raises_with(OutputError, f"{tmp_path / 'file'} is not a folder"):
        check_output(tmp_path / "file" / "not" / "yet")
    check_output(tmp_path / "not" / "yet")
    with raises_with(OutputError, "root"):
        check_output("/", force=True)
    monkeypatch.setattr(atomic.os, "access", lambda *_: False)
    with raises_with(OutputError, f"{tmp_path} is not a folder that you may write to"):
        check_output(tmp_path / "not" / "yet")
    assert os.listdir(tmp_path) == ["file"]


KILL = """
import os, signal, sys
from eagle_slim.convert import atomic
point, out = sys.argv[1], sys.argv[2]
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
real, renames = os.rename, []
def rename(*names):
    renames.append(names)
    if point == f"before rename {len(renames)}":
        die()
    real(*names)
os.rename = rename
if point == "before sync":
    atomic.sync = die
if point == "before removing the old":
    atomic.sync = lambda path: die() if len(renames) == 2 else None
with atomic.atomic_directory(out, force=True) as folder:
    (folder / "a").write_text("new")
    if point == "while writing":
        die()
    (folder / "sub").mkdir()
    (folder / "sub" / "b").write_text("new")
"""


POINTS = dict.fromkeys(("while writing", "before sync", "before rename 1"), "old")
# Between the two renames there is nothing at the name until the next run.
POINTS |= {"before rename 2": None, "before removing the old": "new"}


@pytest.mark.parametrize(("point", "expected"), POINTS.items())
def test_killed_at_any_step(tmp_path, point, expected):
    out = tmp_path / "out"
    write(out, "old")
    run = subprocess.run([sys.executable, "-c", KILL, point, str(out)], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert tree(out) == ({} if expected is None else {"a": expected, "sub/b": expected})
    # The next run puts back what a kill took from its place, and cleans up.
    with pytest.raises(OutputExistsError):
        write(out, "without force")
    assert tree(out) == {"a": expected or "old", "sub/b": expected or "old"}
    write(out, "later", force=True)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert tree(out) == {"a": "later", "sub/b": "later"}


def test_two_writers_at_once(tmp_path):
    out = tmp_path / "out"
    with atomic_directory(out) as first:
        (first / "a").write_text("first")
        with pytest.raises(OutputError, match="another run"):
            write(out, "second")
    assert tree(tmp_path) == {"out/a": "first"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_writer_that_waits_for_another(tmp_path, fails):
    out = tmp_path / "out"

    def second():
        with atomic_directory(out, wait=True) as folder:
            (folder / "a").write_text("second")

    with futures.ThreadPoolExecutor(1) as pool, contextlib.suppress(KeyError), atomic_directory(out) as folder:
        waiting = pool.submit(second)
        with pytest.raises(futures.TimeoutError):
            waiting.result(0.3)
        (folder / "a").write_text("first")
        if fails:
            raise KeyError
    assert type(waiting.exception(1800)) is (type(None) if fails else OutputExistsError)
    assert tree(tmp_path) == {"out/a": "second" if fails else "first"}


def test_what_comes_to_the_name_meanwhile_stays(tmp_path):
    out = tmp_path / "out"

    def overtake():
        out.mkdir()
        (out / "theirs").write_text("theirs")

    with pytest.raises(OutputExistsError):
        write(out, "ours", overtake)
    assert tree(tmp_path) == {"out/theirs": "theirs"}
