"""Writing a file whole or not at all, and paths in the user's home."""

import errno
import os
from pathlib import Path

import pytest
from eagle_slim.vocab_tools.files import expand_home, write_file


def test_the_new_file_takes_the_place_of_the_old(tmp_path: Path) -> None:
    write_file(tmp_path / "x", b"old")
    write_file(tmp_path / "x", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("x", b"new")]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_file(tmp_path / "x", b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(tmp_path / "x", b"new")
    assert caught.value.filename == str(tmp_path / "x")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("x", b"old")]


def test_a_missing_folder_is_named_by_the_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "no" / "x", b"")
    assert caught.value.filename == str(tmp_path / "no" / "x")


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert expand_home("~/head") == Path("/home/someone/head")
    assert expand_home("~no-such-user/head") == Path("~no-such-user/head")
