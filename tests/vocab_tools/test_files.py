import errno
import os
import stat
from functools import partial
from pathlib import Path

import pytest
from eagle_slim.vocab_tools import DraftVocab, EagleSlimError, TokenCounts, UsageError, import_token_map, load_tokenizer
from eagle_slim.vocab_tools.files import read_object, refuse_existing, write_file
from eagle_slim.vocab_tools.sources import CorpusSource, open_source
from support.raising import raises_with, waiting_for_nothing


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch, call):
    write_file(tmp_path / "x", b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(tmp_path / "x", b"new")
    assert caught.value.filename == str(tmp_path / "x")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("x", b"old")]


def test_a_file_is_written_where_folders_cannot_be_synced(tmp_path, monkeypatch):
    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", sync)
    write_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_link_is_followed_to_the_file_that_is_written(tmp_path):
    (tmp_path / "store").mkdir()
    link = tmp_path / "link"
    link.symlink_to("store/x")
    for data in (b"new", b"newer"):
        write_file(refuse_existing(link, force=True), data)
        assert link.is_symlink()
        assert (tmp_path / "store/x").read_bytes() == data
    link.unlink()
    link.symlink_to("nowhere/x")
    with raises_with(UsageError, str(tmp_path / "nowhere")):
        refuse_existing(link)


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with raises_with(UsageError, "a pipe or a device"):
        refuse_existing(tmp_path / "pipe", force=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with raises_with(UsageError, str(tmp_path), "cannot be written"):
        refuse_existing(tmp_path / "x")


def test_a_file_that_git_lfs_has_not_fetched_is_overwritten_as_any_other(tmp_path):
    (tmp_path / "x").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with raises_with(UsageError, "exists already", "--force"):
        refuse_existing(tmp_path / "x")
    assert refuse_existing(tmp_path / "x", force=True) == tmp_path / "x"


READERS = {
    "counts": ("a.safetensors", TokenCounts.load),
    "vocabulary": ("a.json", DraftVocab.load),
    "token map": ("a.pt", import_token_map),
    "tokenizer": ("tokenizer.json", load_tokenizer),
    "JSON lines": ("a.jsonl", lambda path: open_source(CorpusSource(str(path)))),
    "corpus folder": ("a.jsonl", lambda path: open_source(CorpusSource(str(path.parent)))),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_nothing_waits_for_what_is_not_a_regular_file(tmp_path, name, read):
    path = tmp_path / name
    os.mkfifo(path)
    with waiting_for_nothing(), pytest.raises(EagleSlimError, match="a pipe or a device"):
        read(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with waiting_for_nothing(), pytest.raises(EagleSlimError, match="a pipe or a device"):
        read(path)


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, name, read):
    (tmp_path / name).write_text("content")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with raises_with(EagleSlimError, name, "cannot be read: Permission denied"):
        read(tmp_path / name)


@pytest.mark.parametrize("depth", ["snapshots/abc", "eagle3"])
def test_a_configuration_further_below_is_told(tmp_path, depth):
    (tmp_path / depth).mkdir(parents=True)
    for name, read in (
        ("config.json", partial(read_object, error_type=UsageError)),
        ("tokenizer.json", load_tokenizer),
    ):
        (tmp_path / depth / name).write_text("{}")
        with raises_with(EagleSlimError, f"no {name}" if read is load_tokenizer else name, str(tmp_path / depth)):
            read(tmp_path if read is load_tokenizer else tmp_path / name)


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_what_git_lfs_leaves_in_place_of_a_file_is_named(tmp_path, name, read):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with raises_with(EagleSlimError, name, "Git LFS pointer", "git lfs pull"):
        read(tmp_path / name)
