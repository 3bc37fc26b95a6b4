import pytest
from support.heads import write_eagle3, write_target
from support.raising import exit_code


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def head(tmp_path):
    return write_eagle3(tmp_path / "head")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in-process in `tmp_path`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(command, *arguments):
        code = exit_code(command, [str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call
