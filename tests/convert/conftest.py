import pytest
from support.heads import write_target


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in-process in `tmp_path`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(command, *arguments):
        with pytest.raises(SystemExit) as stop:
            command([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call
